"""Authentication by API key. Every route under `/v1` and `/admin/api` has a `KeyGuard` with the scope that it needs."""

from dataclasses import dataclass
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.handlers import BaseRouteHandler
from litestar.params import SkipValidation

from server.conversation.api_key import ApiKey, KeyRing, RateLimiter, Scope, parse_key_text
from server.conversation.audit import Actor
from server.conversation.errors import KeyRejected, RateLimited, ScopeMissing
from server.inspection.admin_sessions import AdminSession
from server.telemetry.logs import extend_log_context
from server.web.forwarded import TrustedProxies
from server.web.request import SESSION, StrataRequest, part_of
from server.web.tenant_boundary import TenantBoundary

BEARER: Final = "bearer"
"""The name of the security scheme in the OpenAPI document."""

REFUSAL: Final = "refusal"
"""Key of the scope's state: a `RateLimited` that the handler has to raise unless the request is a duplicate."""

_RETRY_HEADERS: Final = ("idempotency-key", "x-stainless-retry-count")
"""Only requests with one of these headers can be recognised as duplicates."""


@dataclass(frozen=True, slots=True)
class KeyGuard:
    """A guard that requires a valid key with a scope, or any valid key if the scope is None.

    It runs before the body is read. Every request looks the key up in the `KeyRing`, which describes how soon a
    revocation takes effect.
    """

    scope: Scope | None
    limited: bool = True
    """Whether the request counts against the key's rate."""
    spares_duplicates: bool = False
    """Leave it to the handler to refuse a request above the rate that may be a duplicate. A duplicate of an accepted
    request is answered regardless of the rate; otherwise the client could not get the answer."""

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        """Raise `KeyRejected`, `ScopeMissing`, `OtherTenantReadOnly` or `RateLimited`."""
        key_ring: KeyRing = part_of(connection.scope, "key_ring")
        presented = parse_key_text(bearer_token(connection))
        key = await key_ring.find_live_key(presented) if presented else None
        if key is None:
            raise KeyRejected
        connection.scope["user"] = key
        extend_log_context(tenant_id=key.tenant_id, api_key_id=key.id)
        if self.scope is not None and not key.opens(self.scope):
            raise ScopeMissing(scope=self.scope.value)
        if self.scope is Scope.ADMIN:
            boundary: TenantBoundary = part_of(connection.scope, "tenant_boundary")
            proxies: TrustedProxies = part_of(connection.scope, "trusted_proxies")
            await boundary.cross(connection, key, Actor(key_id=key.id, address=proxies.address_of(connection)))
        if self.limited:
            await self._admit(connection, key)

    async def _admit(self, connection: ASGIConnection[Any, Any, Any, Any], key: ApiKey) -> None:
        rate_limiter: RateLimiter = part_of(connection.scope, "rate_limiter")
        try:
            await rate_limiter.admit(key.id)
        except RateLimited as refusal:
            if not self.spares_duplicates or not any(name in connection.headers for name in _RETRY_HEADERS):
                raise
            connection.scope["state"][REFUSAL] = refusal


any_live_key: Final = KeyGuard(None)
client_only: Final = KeyGuard(Scope.CLIENT)
client_sparing_duplicates: Final = KeyGuard(Scope.CLIENT, spares_duplicates=True)
admin_only: Final = KeyGuard(Scope.ADMIN, limited=False)


async def provide_caller(request: StrataRequest) -> ApiKey:
    """Return the key that the guard accepted. Handlers bind every query to its tenant."""
    caller = request.user
    if caller is None:
        raise KeyRejected
    return caller


async def provide_actor(request: StrataRequest, caller: NamedDependency[SkipValidation[ApiKey]]) -> Actor:
    """Return the key, the session and the address that a request comes from, for the audit log."""
    session: AdminSession | None = request.scope["state"].get(SESSION)
    proxies: TrustedProxies = part_of(request.scope, "trusted_proxies")
    address = proxies.address_of(request)
    return Actor(key_id=caller.id, address=address) if session is None else session.actor(address)


def bearer_token(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the bearer token; an empty string if there is none, or more than one: proxies differ in which they use."""
    values = connection.headers.getall("authorization", [])
    if len(values) != 1:
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == BEARER else ""
