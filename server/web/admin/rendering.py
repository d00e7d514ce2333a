"""Rendering of page templates. All values are escaped, in every template, by default."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request, Response
from litestar.datastructures import Cookie

from server.conversation.bundled import find_bundled
from server.inspection.admin_sessions import AdminSession
from server.web.admin.assets import ASSETS
from server.web.admin.labels import find_notice
from server.web.request import SESSION, request_id_of

_UNSHOWABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_CONTROL_PICTURES: Final = 0x2400
_DELETE: Final = 0x7F
_SPACE: Final = 0x20
_DIRECTIONS: Final = frozenset({*range(0x202A, 0x202F), *range(0x2066, 0x206A)})

NAVIGATION: Final = (
    ("/admin", "Overview"),
    ("/admin/conversations", "Conversations"),
    ("/admin/assistants", "Assistants"),
    ("/admin/replays", "Replays"),
    ("/admin/keys", "Keys"),
    ("/admin/audit", "Audit log"),
)
"""URLs and names of the pages in the header."""

PAGE_HEADERS: Final[Mapping[str, str]] = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # Not `no-referrer`: browsers would send forms with `Origin: null`.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
    "vary": "cookie, accept",
}
"""The middleware adds further headers to every answer."""


def show_text(text: str) -> str:
    """Make invisible characters visible.

    Control characters become control pictures, characters that change the direction of text become their code points,
    and unpaired surrogates become replacement characters. Line ends and tabs are kept.
    """
    return _UNSHOWABLE.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < _SPACE:
        return chr(_CONTROL_PICTURES + code)
    if code in _DIRECTIONS:
        return f"[U+{code:04X}]"
    return "\u2421" if code == _DELETE else "\ufffd"


def _finalize(value: object) -> object:
    """Convert the value of an expression in a template before it is escaped. Markup is kept."""
    return show_text(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


def _url_encode(value: str | Mapping[str, str]) -> str:
    """Encode like Jinja's own filter, with a question mark for an unpaired surrogate, which a URL cannot contain."""
    if isinstance(value, Mapping):
        return urlencode(value, errors="replace")
    return quote(value, errors="replace")


def _asset_url(name: str) -> str:
    return ASSETS[name].url


def _build_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(find_bundled("templates") / "admin"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters["utc"] = _in_utc
    environment.filters["urlencode"] = _url_encode
    environment.globals["asset"] = _asset_url
    environment.globals["navigation"] = NAVIGATION
    return environment


_ENVIRONMENT: Final = _build_environment()


def render(template: str, **values: object) -> str:
    """Render a page as text."""
    return _ENVIRONMENT.get_template(template).render(**values)


def session_of(request: Request[Any, Any, Any]) -> AdminSession | None:
    """Return the session that the guard found, if it ran."""
    session: AdminSession | None = request.scope["state"].get(SESSION)
    return session


def answer_page(
    request: Request[Any, Any, Any],
    template: str,
    *,
    status_code: int = 200,
    headers: Mapping[str, str] | None = None,
    **values: object,
) -> Response[bytes]:
    """Answer with a page. Templates also get the session, the path, the request id and the notice."""
    session = session_of(request)
    text = render(
        template,
        session=session,
        csrf_token=session.csrf_token if session else None,
        path=request.scope["path"].rstrip("/"),
        request_id=request_id_of(request.scope),
        notice=find_notice(request.query_params),
        **values,
    )
    return Response(content=text.encode(), status_code=status_code, headers={**PAGE_HEADERS, **(headers or {})})


def pushed_address(request: Request[Any, Any, Any], address: str) -> Mapping[str, str] | None:
    """Return the header with the URL that htmx shows; its own URL would contain the empty fields of the form.

    None if the request was not sent by htmx. Empty if htmx restores a page of the history, whose URL is known.
    """
    if "hx-request" not in request.headers:
        return None
    return {} if "hx-history-restore-request" in request.headers else {"hx-push-url": address}


def answer_redirect(url: str, *, cookies: tuple[Cookie, ...] = ()) -> Response[bytes]:
    """Redirect to a page, with GET."""
    return Response(content=b"", status_code=303, headers={**PAGE_HEADERS, "location": url}, cookies=list(cookies))
