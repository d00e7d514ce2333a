"""One call under the lens: why it failed, why the cache missed, what exactly was sent, what came back, what it cost."""

import asyncio
from typing import Any, Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.conversation.payload import ManifestEntry
from server.conversation.turn import describe_ending
from server.inspection.admin_sessions import AdminSession
from server.inspection.call_explanation import explain_cache, explain_error, explain_outcome
from server.inspection.call_view import CallInspection, CallInspector, RebuiltRequest, RequestProof
from server.inspection.port import Inspector
from server.web.admin.call_answer import show_answer
from server.web.admin.call_figures import draw_cache, draw_layers, draw_times
from server.web.admin.call_links import CallLinks, ConversationLinks
from server.web.admin.call_notes import show_headers, show_notes, show_signatures, show_usage
from server.web.admin.call_request import show_difference, show_request
from server.web.admin.page_budget import PageBudget, open_window
from server.web.admin.rendering import answer_page
from server.web.api.call_views import CallView
from server.web.api.inspection import answer_bytes
from server.web.json_text import answer_json
from server.web.request import StrataRequest

_PATH: Final = "/conversations/{conversation_id:str}/calls/{turn_seq:int}/{attempt:int}"
_MANIFEST_ROWS: Final = 60
"""Of the beginning, and of the end."""
_ATTEMPTS: Final = 20


@get(_PATH)
async def show_call(
    request: StrataRequest,
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[bytes]:
    """The whole call on a page of bounded size; all bytes can be downloaded from it."""
    reach = session.tenant_scope
    found = await call_inspector.inspect_call(reach, conversation_id, turn_seq, attempt)
    previous = None
    if found.previous is not None:
        place = found.previous.turn_seq, found.previous.start.attempt
        previous = await call_inspector.rebuild_request(reach, conversation_id, *place)
    return await answer_call(request, found, previous, ConversationLinks(conversation_id=conversation_id))


@get(f"{_PATH}/request")
async def download_request(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[bytes]:
    """Every byte of the request, made again."""
    made = await call_inspector.rebuild_request(session.tenant_scope, conversation_id, turn_seq, attempt)
    name = f"request-{turn_seq}-{attempt}"
    return answer_bytes(made.body or b"", name, {"x-strata-proof": made.proof.value})


@get(f"{_PATH}/response")
async def download_response(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Response[bytes]:
    """Every byte that came back."""
    stored = await inspector.load_stored_call(session.tenant_scope, conversation_id, turn_seq, attempt)
    end = stored.call.end
    raw = None if end is None else end.raw_response
    return answer_bytes(raw or b"", f"response-{turn_seq}-{attempt}")


@get(f"{_PATH}/json")
async def download_call(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[Any]:
    """The call as `/admin/api` answers it, for those who have a session and no key at hand."""
    found = await call_inspector.inspect_call(session.tenant_scope, conversation_id, turn_seq, attempt)
    return answer_call_json(found, f"call-{turn_seq}-{attempt}")


async def answer_call(
    request: StrataRequest, found: CallInspection, previous: RebuiltRequest | None, links: CallLinks
) -> Response[bytes]:
    """The answer with the page of a call, wherever it was made."""
    # Requests and answers may be megabytes of JSON: other turns stream meanwhile.
    values = await asyncio.to_thread(_describe, found, previous)
    return answer_page(request, "call.html", links=links, **values)


def answer_call_json(found: CallInspection, name: str) -> Response[Any]:
    """The answer with all of a call as a file."""
    headers = {"content-disposition": f'attachment; filename="{name}.json"', "cache-control": "no-store"}
    return answer_json(CallView.of(found), headers=headers)


def _describe(found: CallInspection, previous: RebuiltRequest | None) -> dict[str, Any]:
    """What the template says of a call. Who asks for room first is sure to be shown."""
    budget, request = PageBudget(), found.request
    stop_reason = None if found.folded is None else found.folded.answer.stop_reason
    return {
        "found": found,
        "start": found.call.start,
        "end": found.call.end,
        "outcome": explain_outcome(found.call, found.turn, stop_reason),
        "ending": describe_ending(found.turn.ending) if found.turn is not None and found.gave_answer else "",
        "cache": explain_cache(found.call),
        "cache_bars": draw_cache(found),
        "layers": draw_layers(found),
        "times": draw_times(found),
        "attempts": open_window(found.attempts, head=_ATTEMPTS, tail=_ATTEMPTS),
        "proof_error": explain_error(request.error_code) if request.error_code else None,
        "rebuilt_block": _rebuilt_block(request),
        "is_previous_known": previous is not None and previous.proof is not RequestProof.IMPOSSIBLE,
        "notes": show_notes(found.call.start, budget),
        "answer": show_answer(found, budget),
        "difference": show_difference(found, previous, budget),
        "members": show_request(request.body, budget) if request.body is not None else (),
        "manifest": open_window(found.blocks, head=_MANIFEST_ROWS, tail=_MANIFEST_ROWS),
        "signatures": show_signatures(found),
        "response_headers": show_headers(found, budget),
        "usage_reported": show_usage(found, budget),
    }


def _rebuilt_block(request: RebuiltRequest) -> ManifestEntry | None:
    """What stands in the place of the first block that differs, as it was made again."""
    place = request.first_difference
    return None if place is None or place >= len(request.manifest) else request.manifest[place]
