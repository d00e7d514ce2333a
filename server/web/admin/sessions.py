"""Browser sessions of the pages: the cookie, the guard of every page, and protection against forged forms."""

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
_MAX_FIELDS: Final = 100
_FORM_FIELDS: Final = "admin_form"
"""Key of the scope's state: the fields of the form, once it was read."""

Connection = ASGIConnection[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSessions:
    """Sessions and their cookies."""

    sessions: AdminSessions
    proxies: TrustedProxies

    def address_of(self, connection: Connection) -> str | None:
        return self.proxies.address_of(connection)

    def new_cookie(self, connection: Connection, token: str) -> Cookie:
        """Return the cookie of a session. It lasts as long as the browser runs and, with TLS, is sent over TLS only."""
        return Cookie(
            key=COOKIE,
            value=token,
            path=_PATH,
            httponly=True,
            samesite="strict",
            secure=self.proxies.is_secure(connection),
        )

    def expired_cookie(self, connection: Connection) -> Cookie:
        """Return the cookie that makes a browser delete the session's cookie."""
        cookie = self.new_cookie(connection, "")
        cookie.max_age = 0
        return cookie

    async def find_session(self, connection: Connection) -> AdminSession | None:
        """Return the session of the cookie; None if there is no cookie or if the session has ended."""
        token = connection.cookies.get(COOKIE)
        return await self.sessions.find_session(token) if token else None


async def require_session(connection: Connection, _handler: BaseRouteHandler) -> None:
    """Guard every page except the login. Raises `SessionEnded`, `RequestForged` and `OtherTenantReadOnly`."""
    browser_sessions: BrowserSessions = part_of(connection.scope, "browser_sessions")
    is_safe = connection.scope["method"] in _SAFE_METHODS  # type: ignore[typeddict-item]  # reason: pages are HTTP
    if not is_safe:
        refuse_cross_site(connection)
    session = await browser_sessions.find_session(connection)
    if session is None:
        raise SessionEnded
    connection.scope["state"][SESSION] = session
    connection.scope["user"] = session.key
    extend_log_context(tenant_id=session.key.tenant_id, api_key_id=session.key.id)
    if not is_safe and not session.takes(await _csrf_token(connection)):
        raise RequestForged
    boundary: TenantBoundary = part_of(connection.scope, "tenant_boundary")
    await boundary.cross(connection, session.key, session.actor(browser_sessions.address_of(connection)))


def refuse_cross_site(connection: Connection) -> None:
    """Raise `RequestForged` for a form of another site.

    Browsers send the origin of a request in headers that no page can set: `Sec-Fetch-Site` on secure connections,
    `Origin` with every form. A request without either does not come from a browser and is refused.
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
    """Return the fields of a form, the last value of each. Raises `MediaTypeUnsupported` and `BodyMalformed`."""
    if request.content_type[0].lower() != _FORM:
        raise MediaTypeUnsupported("The pages accept URL-encoded forms only.", hint=f"Send `Content-Type: {_FORM}`.")
    # The guard reads the form for its token; parsing a long form twice would take noticeable time.
    form: Mapping[str, str] | None = request.scope["state"].get(_FORM_FIELDS)
    if form is None:
        body = await request.body()
        try:
            form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
        except ValueError:
            raise BodyMalformed("The form cannot be read.", hint="Load the page again.") from None
        request.scope["state"][_FORM_FIELDS] = form
    return form


async def provide_session(request: Request[Any, Any, Any]) -> AdminSession:
    """Return the session that the guard found. Handlers bind every query to its tenant."""
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
