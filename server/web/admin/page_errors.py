"""Errors under `/admin`: pages for browsers, problems for programs."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from litestar import Request, Response

from server.conversation.errors import (
    CompactionNotFound,
    ConversationBusy,
    ConversationNotFound,
    EpochMoved,
    Internal,
    RouteNotFound,
    SessionEnded,
    StrataError,
    TurnNotFound,
    TurnNotRunning,
)
from server.web.admin.login import START, own_page
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.sessions import COOKIE, BrowserSessions
from server.web.errors import ANSWERS, answer_exception, answer_headers, translate
from server.web.request import FAILURE, PROBLEM_CODE, part_of

_PROGRAMS: Final = "/admin/api"
_CONVERSATION: Final = re.compile(r"(/admin/conversations/conv_[0-9a-z]+)/.+", re.ASCII)
_ADVICE: Final[Mapping[type[StrataError], str]] = {
    ConversationBusy: "Wait for the turn to end, or cancel it on the conversation's page. Then try again.",
    ConversationNotFound: "Search the list of conversations. It may have been deleted.",
    TurnNotRunning: "The turn has ended. The conversation's page shows how.",
    TurnNotFound: "The conversation's page lists its turns.",
    CompactionNotFound: "All turns are sent as messages: there is nothing to undo.",
    EpochMoved: "The history was changed meanwhile, by another operator or by the server. Check it, then try again.",
}
"""Advice for people. The hints of these errors are for programs."""
_WHOLE_PAGE: Final = {"hx-retarget": "main", "hx-reselect": "main", "hx-reswap": "outerHTML"}
"""These headers make htmx show the error in place of the part of the page that was requested."""


def answer_any_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer any exception of the application: with a page for browsers under `/admin`, else with a problem."""
    if not _wants_page(request):
        return answer_exception(request, error)
    known = translate(request, error)
    request.scope["state"][PROBLEM_CODE] = known.code
    if isinstance(known, Internal):
        request.scope["state"][FAILURE] = error
    if isinstance(known, RouteNotFound):
        known = RouteNotFound("There is no such page.", hint="Follow a link from the start page.")
    if isinstance(known, SessionEnded):
        return _send_to_login(request)
    return _answer_error(request, known)


def _wants_page(request: Request[Any, Any, Any]) -> bool:
    path = request.scope["path"]
    is_page = (path == START or path.startswith(f"{START}/")) and not f"{path}/".startswith(f"{_PROGRAMS}/")
    return is_page and "text/html" in request.headers.get("accept", "")


def _answer_error(request: Request[Any, Any, Any], error: StrataError) -> Response[bytes]:
    status = ANSWERS[type(error)].status
    headers = answer_headers(error)
    # With this header a browser would show its own password dialog.
    headers.pop("www-authenticate", None)
    return answer_page(
        request,
        "error.html",
        status_code=status,
        headers={**headers, **(_WHOLE_PAGE if _is_htmx(request) else {})},
        title=HTTPStatus(status).phrase,
        message=Internal().message if isinstance(error, Internal) else error.message,
        advice=_ADVICE.get(type(error), error.advice),
        code=error.code,
        # The guard does not run if there is no such page. A browser with a cookie most likely has a session.
        may_navigate=COOKIE in request.cookies,
        back_url=None if isinstance(error, ConversationNotFound) else _conversation_page(request),
    )


def _conversation_page(request: Request[Any, Any, Any]) -> str | None:
    """Return the page of the conversation if the request is for a page below it."""
    found = _CONVERSATION.fullmatch(request.scope["path"])
    return found[1] if found else None


def _send_to_login(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Redirect to the login, which redirects back to the page. A form that was sent is lost."""
    goal = _address_of(request) if request.scope["method"] == "GET" else START
    if _lacks_cookie_of_site(request):
        return answer_page(request, "again.html", goal=goal)
    url = "/admin/login" if goal == START else f"/admin/login?goal={quote(goal)}"
    browser_sessions: BrowserSessions = part_of(request.scope, "browser_sessions")
    cookies = (browser_sessions.expired_cookie(request),) if COOKIE in request.cookies else ()
    if _is_htmx(request):
        headers = {"hx-redirect": url, "cache-control": "no-store"}
        return Response(content=b"", status_code=401, headers=headers, cookies=list(cookies))
    return answer_redirect(url, cookies=cookies)


def _lacks_cookie_of_site(request: Request[Any, Any, Any]) -> bool:
    """Return whether the browser followed a link of another site, and therefore did not send the strict cookie.

    The page then reloads itself, and the browser sends the cookie with that request.
    """
    site, method = request.headers.get("sec-fetch-site"), request.scope["method"]
    return method == "GET" and site in {"cross-site", "same-site"} and COOKIE not in request.cookies


def _address_of(request: Request[Any, Any, Any]) -> str:
    path = request.scope["raw_path"].decode("latin-1").partition("?")[0]
    query = request.scope["query_string"].decode("latin-1")
    return own_page(f"{path}?{query}" if query else path)


def _is_htmx(request: Request[Any, Any, Any]) -> bool:
    return "hx-request" in request.headers
