"""What a provider reports about the end of a turn reaches clients, later readers and operators."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.emulator.reply import Fault, FaultKind
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.http_driver import ApiClient, open_api, turns
from tests.support.page_driver import open_operator
from tests.support.verifying import verify

KEY = "AIzaSyA-0123456789abcdefghijklmnopqrstu"


@pytest.fixture
async def api(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server) as opened:
        yield opened


async def assert_shown_everywhere(
    server: StrataServer, api: ApiClient, conversation_id: str, turn: Any, words: str
) -> None:
    """The stored turn, its last event, the page of the conversation and a fork have the same text."""
    assert await api.expect(200, "GET", turns(conversation_id, 2)) == turn
    assert (await api.expect(200, "GET", turns(conversation_id)))["data"][1] == turn
    _, _, ended = (await api.read_events("GET", turns(conversation_id, 2) + "/events"))[-1]
    assert ended["turn"] == turn
    assert ended.get("error") == turn["error"]
    async with open_operator(server.url) as operator:
        await operator.log_in(server.admin_key)
        pages = [await operator.get(f"/admin/conversations/{conversation_id}{part}") for part in ("", "/calls/2/1")]
    assert all(words in page.text for page in pages)
    async with open_api(server, server.admin_key) as admin:
        shown = await admin.expect(200, "GET", f"/admin/api/conversations/{conversation_id}")
    assert words in json.dumps(shown, ensure_ascii=False)


@pytest.mark.parametrize("provider", BOTH)
async def test_the_message_and_the_delay_of_the_provider_are_shown(
    strata_server: StrataServer, api: ApiClient, emulated: EmulatedProviders, database: Database, provider: str
) -> None:
    conversation_id = await api.begin(provider)
    message = f"Slow down, {KEY} asks too often."
    emulated[provider].inject_fault(FaultKind.RATE_LIMITED, retry_after_seconds=3600, message=message)
    answer = await api.ask("POST", turns(conversation_id), {"input": "Hello."})
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["source"]) == (429, "provider_rate_limited", "provider")
    assert answer.headers["retry-after"] == "3600"
    assert problem["retry_after_seconds"] == 3600
    assert "asks too often." in problem["provider_message"]
    assert KEY not in answer.text
    error = problem["turn"]["error"]
    assert {name: error[name] for name in ("source", "provider_message", "provider_status", "retry_after_seconds")} == {
        name: problem[name] for name in ("source", "provider_message", "provider_status", "retry_after_seconds")
    }
    await assert_shown_everywhere(strata_server, api, conversation_id, problem["turn"], "asks too often.")
    assert (await verify(database, [conversation_id])).mismatches == ()


@pytest.mark.parametrize("provider", BOTH)
async def test_an_exhausted_balance_is_a_quota_error_and_not_an_invalid_request(
    api: ApiClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation_id = await api.begin(provider)
    emulated[provider].inject_fault(FaultKind.NO_CREDIT)
    problem = await api.expect(502, "POST", turns(conversation_id), {"input": "Hello."})
    assert problem["code"] == "provider_quota_exceeded"
    assert "credit" in problem["provider_message"]
    assert len(emulated[provider].requests()) == 1
    assert (await api.say(conversation_id))["turn"]["state"] == "complete"


@pytest.mark.parametrize("provider", BOTH)
async def test_the_details_of_a_refusal_are_shown(
    strata_server: StrataServer, api: ApiClient, emulated: EmulatedProviders, database: Database, provider: str
) -> None:
    conversation_id = await api.begin(provider)
    emulated[provider].inject_fault(FaultKind.REFUSAL, message="This is about weapons.")
    ended = await api.say(conversation_id)
    assert (ended["turn"]["stop_reason"], ended["turn"]["error"]) == ("refusal", None)
    details = ended["turn"]["stop_details"]
    assert "This is about weapons." in details.values()
    await assert_shown_everywhere(strata_server, api, conversation_id, ended["turn"], "This is about weapons.")
    assert (await verify(database, [conversation_id])).mismatches == ()


async def test_a_blocked_prompt_has_its_reason(api: ApiClient, emulated: EmulatedProviders) -> None:
    conversation_id = await api.begin(GEMINI)
    emulated[GEMINI].inject_fault(FaultKind.BLOCKED_PROMPT, message="Not allowed here.")
    details = (await api.say(conversation_id))["turn"]["stop_details"]
    assert (details["blockReason"], details["blockReasonMessage"]) == ("PROHIBITED_CONTENT", "Not allowed here.")


@pytest.mark.parametrize(
    ("delta", "stop_reason", "details"),
    [
        (
            {"stop_reason": "stop_sequence", "stop_sequence": "END"},
            "end_turn",
            {"reason": "stop_sequence", "stop_sequence": "END"},
        ),
        (
            {"stop_reason": "refusal", "stop_details": {"type": "refusal", "category": "bio", "explanation": None}},
            "refusal",
            {"reason": "refusal", "type": "refusal", "category": "bio", "explanation": None},
        ),
    ],
)
async def test_the_stop_sequence_and_the_category_are_shown(
    api: ApiClient, emulated: EmulatedProviders, delta: dict[str, Any], stop_reason: str, details: dict[str, Any]
) -> None:
    events = (
        {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Hi."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta},
        {"type": "message_stop"},
    )
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    conversation_id = await api.begin(ANTHROPIC)
    emulated[ANTHROPIC].queue_replies(Fault(kind=FaultKind.RAW, body=body))
    turn = (await api.say(conversation_id))["turn"]
    assert (turn["stop_reason"], turn["stop_details"]) == (stop_reason, details)


@pytest.mark.parametrize("provider", BOTH)
async def test_an_ordinary_end_has_no_details(api: ApiClient, provider: str) -> None:
    conversation_id = await api.begin(provider)
    assert (await api.say(conversation_id))["turn"]["stop_details"] is None
