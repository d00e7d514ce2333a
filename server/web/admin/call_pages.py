"""The page of one call: outcome, proof of the request, cache, cost, and everything sent and received."""

import asyncio
from collections import Counter
from typing import Any, Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.inspection.admin_sessions import AdminSession
from server.inspection.calls import CallInspector, InspectedCall, RebuiltRequest, RequestProof
from server.inspection.signatures import SignatureState
from server.web.admin.call_content import (
    draw_cache,
    draw_layers,
    draw_times,
    show_answer,
    show_difference,
    show_headers,
    show_notes,
    show_request,
    show_usage,
)
from server.web.admin.call_links import CallLinks, ConversationLinks
from server.web.admin.page_budget import PageBudget, open_window
from server.web.admin.rendering import answer_page
from server.web.api.call_views import CallView
from server.web.api.inspection import show_request as show_request_bytes
from server.web.api.inspection import show_response as show_response_bytes
from server.web.json_text import answer_json
from server.web.request import StrataRequest

_PATH: Final = "/conversations/{conversation_id:str}/calls/{turn_seq:int}/{attempt:int}"
_MANIFEST_ROWS: Final = 60
"""Rows at the start and at the end of the manifest."""
_ATTEMPTS: Final = 20
_SIGNATURES: Final = 40


@get(_PATH)
async def show_call(
    request: StrataRequest,
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[bytes]:
    """Show a call on a page of bounded size, with downloads of all bytes."""
    scope = session.tenant_scope
    found = await call_inspector.inspect_call(scope, conversation_id, turn_seq, attempt)
    previous = None
    if found.previous is not None:
        key = found.previous.turn_seq, found.previous.start.attempt
        previous = await call_inspector.rebuild_request(scope, conversation_id, *key)
    return await answer_call(request, found, previous, ConversationLinks(conversation_id=conversation_id))


download_request: Final = get(f"{_PATH}/request")(show_request_bytes)
download_response: Final = get(f"{_PATH}/response")(show_response_bytes)


@get(f"{_PATH}/json")
async def download_call(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[Any]:
    """Download the call as JSON, as `/admin/api` returns it, with a session instead of a key."""
    found = await call_inspector.inspect_call(session.tenant_scope, conversation_id, turn_seq, attempt)
    return answer_call_json(found, f"call-{turn_seq}-{attempt}")


async def answer_call(
    request: StrataRequest, found: InspectedCall, previous: RebuiltRequest | None, links: CallLinks
) -> Response[bytes]:
    """Answer with the page of a call of a conversation or a replay."""
    # Requests and answers may be megabytes of JSON: the event loop must not wait for them.
    values = await asyncio.to_thread(_describe, found, previous)
    return answer_page(request, "call.html", links=links, **values)


def answer_call_json(found: InspectedCall, name: str) -> Response[Any]:
    """Answer with a call as a JSON file."""
    headers = {"content-disposition": f'attachment; filename="{name}.json"', "cache-control": "no-store"}
    return answer_json(CallView.of(found), headers=headers)


def _describe(found: InspectedCall, previous: RebuiltRequest | None) -> dict[str, Any]:
    """Collect the values of the template. Texts take from the budget in this order."""
    budget = PageBudget()
    counts = Counter(each.signature.state for each in found.signatures)
    return {
        "found": found,
        "start": found.call.start,
        "end": found.call.end,
        "outcome": found.outcome,
        "cache": found.cache,
        "cache_bars": draw_cache(found),
        "layers": draw_layers(found),
        "times": draw_times(found),
        "attempts": open_window(found.attempts, head=_ATTEMPTS, tail=_ATTEMPTS),
        "is_previous_known": previous is not None and previous.proof is not RequestProof.IMPOSSIBLE,
        "notes": show_notes(found, budget),
        "answer": show_answer(found, budget),
        "difference": show_difference(found, previous, budget),
        "members": show_request(found.request.body, budget) if found.request.body is not None else (),
        "manifest": open_window(found.blocks, head=_MANIFEST_ROWS, tail=_MANIFEST_ROWS),
        "signatures": open_window(found.signatures, head=_SIGNATURES, tail=0),
        "signature_counts": {state: counts[state] for state in SignatureState},
        "response_headers": show_headers(found, budget),
        "usage_reported": show_usage(found, budget),
    }
