"""Who is asking. Every route under `/v1` and `/admin` carries a `KeyGuard` that says what it takes to enter."""

from dataclasses import dataclass
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from server.api_key import ApiKey, Scope, parse_key_text
from server.errors import KeyRejected, ScopeMissing
from server.key_ring import KeyRing
from server.telemetry.logs import extend_log_context
from server.web.request import StrataRequest

BEARER: Final = "bearer"
"""The name of the security scheme in the OpenAPI document."""

KEY_RING: Final = "key_ring"
"""Where the application's state holds the key ring; guards have no other way to it."""


@dataclass(frozen=True, slots=True)
class KeyGuard:
    """Lets a request in that presents a live key with the scope; any live key where no scope is named.

    It runs before the body is read. The key is looked up on every request, so revoking takes effect at once.
    """

    scope: Scope | None

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler) -> None:
        """Raises `KeyRejected` and `ScopeMissing`."""
        key_ring: KeyRing = connection.app.state[KEY_RING]
        presented = parse_key_text(_bearer_token(connection))
        key = await key_ring.find_live_key(presented) if presented else None
        if key is None:
            raise KeyRejected
        connection.scope["user"] = key
        extend_log_context(tenant_id=key.tenant_id, api_key_id=key.id)
        if self.scope is not None and self.scope not in key.scopes:
            raise ScopeMissing(scope=self.scope.value)


any_live_key: Final = KeyGuard(None)
client_only: Final = KeyGuard(Scope.CLIENT)
admin_only: Final = KeyGuard(Scope.ADMIN)


async def provide_caller(request: StrataRequest) -> ApiKey:
    """The key that the guard let in; handlers get it as `caller` and bind every query to its tenant."""
    caller = request.user
    if caller is None:
        raise KeyRejected
    return caller


def _bearer_token(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """The token, or nothing. Two Authorization headers are one too many: proxies disagree on which one counts."""
    values = connection.headers.getall("authorization", [])
    if len(values) != 1:
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == BEARER else ""
