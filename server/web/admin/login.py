"""Logging in and out."""

import re
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, SkipValidation

from server.conversation.api_key import parse_key_text
from server.conversation.errors import KeyRejected, LoginLocked, ScopeMissing, StrataError
from server.inspection.admin_sessions import AdminSession
from server.web.admin.entry import Entry, read_form, refuse_foreign, require_session
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.errors import ANSWERS, answer_headers
from server.web.request import PROBLEM_CODE, StrataRequest

START: Final = "/admin"
_OWN_PAGE: Final = re.compile(r"/admin(?:[/?][^\\\s]*)?", re.ASCII)
_URL_LIMIT: Final = 2000
_MINUTE: Final = 60
_ADVICE: Final[dict[type[StrataError], str]] = {
    KeyRejected: "This is no live admin key.",
    ScopeMissing: "This key does not have the scope “admin”, which the pages need.",
    LoginLocked: "This is no live admin key, and too many logins with it have failed from your address.",
}


@get("/login")
async def show_login(
    request: StrataRequest,
    entry: NamedDependency[SkipValidation[Entry]],
    goal: FromQuery[str] = START,
) -> Response[bytes]:
    """The form; who is logged in already has no need of it."""
    if await entry.find_session(request) is not None:
        return answer_redirect(own_page(goal))
    return answer_page(request, "login.html", goal=own_page(goal), problem=None, wait=None)


@post("/login", status_code=303)
async def log_in(request: StrataRequest, entry: NamedDependency[SkipValidation[Entry]]) -> Response[bytes]:
    """A session for a key. One that the browser had before is ended: it is never carried into the next."""
    refuse_foreign(request)
    form = await read_form(request)
    goal = own_page(form.get("goal", START))
    address = entry.address_of(request)
    try:
        _, token = await entry.sessions.log_in(parse_key_text(form.get("key", "").strip()), address=address)
    except (KeyRejected, ScopeMissing, LoginLocked) as refusal:
        return _refuse(request, refusal, goal)
    before = await entry.find_session(request)
    if before is not None:
        await entry.sessions.log_out(before, address=address)
    return answer_redirect(goal, cookies=(entry.cookie_for(request, token),))


@post("/logout", guards=[require_session], status_code=303)
async def log_out(
    request: StrataRequest,
    entry: NamedDependency[SkipValidation[Entry]],
    session: NamedDependency[SkipValidation[AdminSession]],
) -> Response[bytes]:
    """Ends the session."""
    await entry.sessions.log_out(session, address=entry.address_of(request))
    return answer_redirect("/admin/login", cookies=(entry.cookie_away(request),))


def own_page(url: str) -> str:
    """A page of ours to go on to. Any other address becomes the start page: nobody is sent to a stranger from here."""
    is_own = len(url) <= _URL_LIMIT and _OWN_PAGE.fullmatch(url) is not None and not url.startswith("/admin/login")
    return url if is_own and url.isascii() and url.isprintable() else START


def _refuse(request: Request[Any, Any, Any], refusal: StrataError, goal: str) -> Response[bytes]:
    """The form again, with the reason. The key is not in it."""
    request.scope["state"][PROBLEM_CODE] = refusal.code
    seconds = refusal.details.get("retry_after_seconds")
    headers = {name: value for name, value in answer_headers(refusal).items() if name == "retry-after"}
    return answer_page(
        request,
        "login.html",
        status_code=ANSWERS[type(refusal)].status,
        headers=headers,
        goal=goal,
        problem=_ADVICE[type(refusal)],
        wait=_tell_wait(int(seconds)) if isinstance(seconds, int | float) else None,
    )


def _tell_wait(seconds: int) -> str:
    count, unit = (seconds, "second") if seconds < _MINUTE else (-(-seconds // _MINUTE), "minute")
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
