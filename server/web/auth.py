"""Who is asking. Every route under `/v1` and `/admin` carries a `KeyGuard` that says what it takes to enter."""

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
"""Where the scope's state holds a `RateLimited` that a handler has to raise, unless the request is a duplicate."""

_RETRY_HEADERS: Final = ("idempotency-key", "x-stainless-retry-count")
"""Without one of these a request cannot be recognised as a duplicate."""


@dataclass(frozen=True, slots=True)
class KeyGuard:
    """Lets a request in that presents a live key with the scope; any live key where no scope is named.

    It runs before the body is read. Every request asks the key ring, which knows of a revocation at once or moments
    later, see there.
    """

    scope: Scope | None
    limited: bool = True
    """Whether the request counts against the key's rate."""
    spares_duplicates: bool = False
    """The handler decides what to do with a request above the rate that may have been sent before: what was accepted
    once is answered, whatever the rate, or the client would never learn of it."""

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        """Raises `KeyRejected`, `ScopeMissing`, `OtherTenantReadOnly` and `RateLimited`."""
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
    """The key that the guard let in; handlers get it as `caller` and bind every query to its tenant."""
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
    """The token, or nothing. Two Authorization headers are one too many: proxies disagree on which one counts."""
    values = connection.headers.getall("authorization", [])
    if len(values) != 1:
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == BEARER else ""
