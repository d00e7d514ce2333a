"""From a template to an answer. Whatever people and models wrote is escaped, in every template, without being asked."""

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
from server.web.admin.notices import find_notice
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
"""What there is, in the order of its use."""

PAGE_HEADERS: Final[Mapping[str, str]] = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # Not `no-referrer`: a browser would send its forms with `Origin: null` then.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
    "vary": "cookie, accept",
}
"""Beside those that the edge gives to every answer."""


def show_text(text: str) -> str:
    """Text in which everything can be seen: control characters become their pictures, those that turn the direction of
    what follows their numbers, half a pair of surrogates the mark for a character that cannot be shown. Line ends and
    tabs stay what they are.
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
    """What a template's expressions come to, before it is escaped. What is a piece of a page already stays so."""
    return show_text(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


def _url_encode(value: str | Mapping[str, str]) -> str:
    """As Jinja's own, but half a pair of surrogates, which has no place in an address, becomes a question mark."""
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
    """A page as text."""
    return _ENVIRONMENT.get_template(template).render(**values)


def session_of(request: Request[Any, Any, Any]) -> AdminSession | None:
    """Who is logged in, where the guard has looked."""
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
    """The answer with a page. Templates see the session, the path, the request's id and a notice beside the values."""
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
    """The header that tells htmx what the page's address is: its own would have the form's empty fields in it.

    None where it was not htmx who asked. Where it goes back in history, the address is there already.
    """
    if "hx-request" not in request.headers:
        return None
    return {} if "hx-history-restore-request" in request.headers else {"hx-push-url": address}


def answer_redirect(url: str, *, cookies: tuple[Cookie, ...] = ()) -> Response[bytes]:
    """See another page, whatever the method was."""
    return Response(content=b"", status_code=303, headers={**PAGE_HEADERS, "location": url}, cookies=list(cookies))
