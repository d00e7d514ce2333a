"""Who may see a page: the session behind the cookie, and whether a form comes from one of our own pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.handlers import BaseRouteHandler

from server.conversation.errors import BodyMalformed, MediaTypeUnsupported, RequestForged, SessionEnded
from server.inspection.admin_sessions import AdminSession, AdminSessions
from server.telemetry.logs import extend_log_context
from server.web.forwarded import TrustedProxies
from server.web.request import SESSION, part_of
from server.web.tenant_boundary import TenantBoundary

COOKIE: Final = "strata_admin"
CSRF_FIELD: Final = "csrf_token"
CSRF_HEADER: Final = "x-csrf-token"

_PATH: Final = "/admin"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM: Final = "application/x-www-form-urlencoded"
_FIELD_LIMIT: Final = 100
_READ_FORM: Final = "admin_form"
"""Where the scope's state holds the fields of a form that was read."""

Connection = ASGIConnection[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What it takes to know who is asking."""

    sessions: AdminSessions
    proxies: TrustedProxies

    def address_of(self, connection: Connection) -> str | None:
        """Where a request comes from."""
        return self.proxies.address_of(connection)

    def cookie_for(self, connection: Connection, token: str) -> Cookie:
        """The session's cookie. It goes with the browser's window and, behind TLS, over nothing else."""
        return Cookie(
            key=COOKIE,
            value=token,
            path=_PATH,
            httponly=True,
            samesite="strict",
            secure=self.proxies.is_secure(connection),
        )

    def cookie_away(self, connection: Connection) -> Cookie:
        """Takes the cookie back."""
        return Cookie(
            key=COOKIE,
            value="",
            path=_PATH,
            httponly=True,
            samesite="strict",
            secure=self.proxies.is_secure(connection),
            max_age=0,
        )

    async def find_session(self, connection: Connection) -> AdminSession | None:
        """The session of the cookie, where there is one that lasts."""
        token = connection.cookies.get(COOKIE)
        return await self.sessions.find_session(token) if token else None


async def require_session(connection: Connection, _handler: BaseRouteHandler) -> None:
    """The guard of every page but the login. Raises `SessionEnded`, `RequestForged` and `OtherTenantReadOnly`."""
    entry: Entry = part_of(connection.scope, "entry")
    is_safe = connection.scope["method"] in _SAFE_METHODS  # type: ignore[typeddict-item]  # reason: pages are HTTP
    if not is_safe:
        refuse_foreign(connection)
    session = await entry.find_session(connection)
    if session is None:
        raise SessionEnded
    connection.scope["state"][SESSION] = session
    connection.scope["user"] = session.key
    extend_log_context(tenant_id=session.key.tenant_id, api_key_id=session.key.id)
    if not is_safe and not session.takes(await _csrf_token(connection)):
        raise RequestForged
    boundary: TenantBoundary = part_of(connection.scope, "tenant_boundary")
    await boundary.cross(connection, session.key, session.actor(entry.address_of(connection)))


def refuse_foreign(connection: Connection) -> None:
    """A form of another site raises `RequestForged`.

    Browsers say where a request comes from, and no page can make them lie: in `Sec-Fetch-Site` where the connection is
    a safe one, in `Origin` on every form. What says neither is no browser, and has no business here.
    """
    fetch_site = connection.headers.get("sec-fetch-site")
    if fetch_site is not None:
        if fetch_site != "same-origin":
            raise RequestForged
        return
    origin = urlsplit(connection.headers.get("origin", ""))
    if not origin.netloc or origin.netloc.lower() != connection.headers.get("host", "").lower():
        raise RequestForged


async def read_form(request: Request[Any, Any, Any]) -> Mapping[str, str]:
    """The fields of a form; of one that is there twice the last. Raises `MediaTypeUnsupported`, `BodyMalformed`."""
    if request.content_type[0].lower() != _FORM:
        raise MediaTypeUnsupported("A page's forms are sent as forms.", hint=f"Send `Content-Type: {_FORM}`.")
    # The guard has read it already, for the token; a long one takes a while.
    known: Mapping[str, str] | None = request.scope["state"].get(_READ_FORM)
    if known is not None:
        return known
    body = await request.body()
    try:
        form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_FIELD_LIMIT))
    except ValueError:
        raise BodyMalformed("The form cannot be read.", hint="Load the page again.") from None
    request.scope["state"][_READ_FORM] = form
    return form


async def provide_session(request: Request[Any, Any, Any]) -> AdminSession:
    """The session that the guard let in; handlers get it as `session` and bind every query to its tenant."""
    session: AdminSession | None = request.scope["state"].get(SESSION)
    if session is None:
        raise SessionEnded
    return session


async def _csrf_token(connection: Connection) -> str:
    header = connection.headers.get(CSRF_HEADER)
    if header is not None:
        return header
    if not isinstance(connection, Request):
        return ""
    return (await read_form(connection)).get(CSRF_FIELD, "")
