"""Pages to log in and out."""

import re
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, SkipValidation

from server.conversation.api_key import parse_key_text
from server.conversation.errors import KeyRejected, LoginLocked, ScopeMissing, StrataError
from server.inspection.admin_sessions import AdminSession
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.sessions import BrowserSessions, read_form, refuse_cross_site, require_session
from server.web.errors import ANSWERS, answer_headers
from server.web.request import PROBLEM_CODE, StrataRequest

START: Final = "/admin"
_OWN_PAGE: Final = re.compile(r"/admin(?:[/?][^\\\s]*)?", re.ASCII)
_MAX_URL_CHARS: Final = 2000
_MINUTE: Final = 60
_MESSAGES: Final[dict[type[StrataError], str]] = {
    KeyRejected: "This is not a valid admin key.",
    ScopeMissing: "This key does not have the scope “admin”, which the pages need.",
    LoginLocked: "This is not a valid admin key, and too many logins with it have failed from your address.",
}


@get("/login")
async def show_login(
    request: StrataRequest,
    browser_sessions: NamedDependency[SkipValidation[BrowserSessions]],
    goal: FromQuery[str] = START,
) -> Response[bytes]:
    """Show the form, or redirect a browser that is logged in."""
    if await browser_sessions.find_session(request) is not None:
        return answer_redirect(own_page(goal))
    return answer_page(request, "login.html", goal=own_page(goal), problem=None, wait=None)


@post("/login", status_code=303)
async def log_in(
    request: StrataRequest, browser_sessions: NamedDependency[SkipValidation[BrowserSessions]]
) -> Response[bytes]:
    """Open a session for a key. An earlier session of the browser is ended and never reused."""
    refuse_cross_site(request)
    form = await read_form(request)
    goal = own_page(form.get("goal", START))
    address = browser_sessions.address_of(request)
    try:
        presented = parse_key_text(form.get("key", "").strip())
        _, token = await browser_sessions.sessions.log_in(presented, address=address)
    except (KeyRejected, ScopeMissing, LoginLocked) as refusal:
        return _refuse(request, refusal, goal)
    previous = await browser_sessions.find_session(request)
    if previous is not None:
        await browser_sessions.sessions.log_out(previous, address=address)
    return answer_redirect(goal, cookies=(browser_sessions.new_cookie(request, token),))


@post("/logout", guards=[require_session], status_code=303)
async def log_out(
    request: StrataRequest,
    browser_sessions: NamedDependency[SkipValidation[BrowserSessions]],
    session: NamedDependency[SkipValidation[AdminSession]],
) -> Response[bytes]:
    await browser_sessions.sessions.log_out(session, address=browser_sessions.address_of(request))
    return answer_redirect("/admin/login", cookies=(browser_sessions.expired_cookie(request),))


def own_page(url: str) -> str:
    """Return the URL if it is a page of this server, else the start page: the login redirects to no other site."""
    is_own = len(url) <= _MAX_URL_CHARS and _OWN_PAGE.fullmatch(url) is not None and not url.startswith("/admin/login")
    return url if is_own and url.isascii() and url.isprintable() else START


def _refuse(request: Request[Any, Any, Any], refusal: StrataError, goal: str) -> Response[bytes]:
    """Show the form again with the reason, and without the key."""
    request.scope["state"][PROBLEM_CODE] = refusal.code
    seconds = refusal.details.get("retry_after_seconds")
    headers = {name: value for name, value in answer_headers(refusal).items() if name == "retry-after"}
    return answer_page(
        request,
        "login.html",
        status_code=ANSWERS[type(refusal)].status,
        headers=headers,
        goal=goal,
        problem=_MESSAGES[type(refusal)],
        wait=_format_wait(int(seconds)) if isinstance(seconds, int | float) else None,
    )


def _format_wait(seconds: int) -> str:
    count, unit = (seconds, "second") if seconds < _MINUTE else (-(-seconds // _MINUTE), "minute")
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
