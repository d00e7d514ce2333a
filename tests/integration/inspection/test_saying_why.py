"""What a provider says about the end of a turn reaches clients, later readers and operators."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.emulator.reply import Fault, FaultKind
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.http_driver import Talk, open_talk, turns
from tests.support.page_driver import open_operator
from tests.support.verifying import verify

KEY = "AIzaSyA-0123456789abcdefghijklmnopqrstu"


@pytest.fixture
async def talk(strata_server: StrataServer) -> AsyncIterator[Talk]:
    async with open_talk(strata_server) as opened:
        yield opened


async def assert_told_everywhere(server: StrataServer, talk: Talk, conversation_id: str, turn: Any, words: str) -> None:
    """The stored turn, its last event, the page of the conversation and a fork say the same."""
    assert await talk.expect(200, "GET", turns(conversation_id, 2)) == turn
    assert (await talk.expect(200, "GET", turns(conversation_id)))["data"][1] == turn
    _, _, ended = (await talk.hear("GET", turns(conversation_id, 2) + "/events"))[-1]
    assert ended["turn"] == turn
    assert ended.get("error") == turn["error"]
    async with open_operator(server.url) as operator:
        await operator.log_in(server.admin_key)
        pages = [await operator.get(f"/admin/conversations/{conversation_id}{part}") for part in ("", "/calls/2/1")]
    assert all(words in page.text for page in pages)
    async with open_talk(server, server.admin_key) as admin:
        shown = await admin.expect(200, "GET", f"/admin/api/conversations/{conversation_id}")
    assert words in json.dumps(shown, ensure_ascii=False)


@pytest.mark.parametrize("provider", BOTH)
async def test_the_providers_message_and_delay_are_told(
    strata_server: StrataServer, talk: Talk, emulated: EmulatedProviders, database: Database, provider: str
) -> None:
    conversation_id = await talk.begin(provider)
    message = f"Slow down, {KEY} asks too often."
    emulated[provider].fails(FaultKind.RATE_LIMITED, retry_after_seconds=3600, message=message)
    answer = await talk.ask("POST", turns(conversation_id), {"input": "Hello."})
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
    await assert_told_everywhere(strata_server, talk, conversation_id, problem["turn"], "asks too often.")
    assert (await verify(database, [conversation_id])).mismatches == ()


@pytest.mark.parametrize("provider", BOTH)
async def test_no_credit_is_a_quota_and_not_a_wrong_request(
    talk: Talk, emulated: EmulatedProviders, provider: str
) -> None:
    conversation_id = await talk.begin(provider)
    emulated[provider].fails(FaultKind.NO_CREDIT)
    problem = await talk.expect(502, "POST", turns(conversation_id), {"input": "Hello."})
    assert problem["code"] == "provider_quota_exceeded"
    assert "credit" in problem["provider_message"]
    assert len(emulated[provider].requests()) == 1
    assert (await talk.say(conversation_id))["turn"]["state"] == "complete"


@pytest.mark.parametrize("provider", BOTH)
async def test_the_details_of_a_refusal_are_told(
    strata_server: StrataServer, talk: Talk, emulated: EmulatedProviders, database: Database, provider: str
) -> None:
    conversation_id = await talk.begin(provider)
    emulated[provider].fails(FaultKind.REFUSAL, message="This is about weapons.")
    ended = await talk.say(conversation_id)
    assert (ended["turn"]["stop_reason"], ended["turn"]["error"]) == ("refusal", None)
    details = ended["turn"]["stop_details"]
    assert "This is about weapons." in details.values()
    await assert_told_everywhere(strata_server, talk, conversation_id, ended["turn"], "This is about weapons.")
    assert (await verify(database, [conversation_id])).mismatches == ()


async def test_a_blocked_prompt_says_what_blocked_it(talk: Talk, emulated: EmulatedProviders) -> None:
    conversation_id = await talk.begin(GEMINI)
    emulated[GEMINI].fails(FaultKind.BLOCKED_PROMPT, message="Not allowed here.")
    details = (await talk.say(conversation_id))["turn"]["stop_details"]
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
async def test_the_stop_sequence_and_the_category_are_told(
    talk: Talk, emulated: EmulatedProviders, delta: dict[str, Any], stop_reason: str, details: dict[str, Any]
) -> None:
    events = (
        {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Hi."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta},
        {"type": "message_stop"},
    )
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    conversation_id = await talk.begin(ANTHROPIC)
    emulated[ANTHROPIC].says(Fault(kind=FaultKind.RAW, body=body))
    turn = (await talk.say(conversation_id))["turn"]
    assert (turn["stop_reason"], turn["stop_details"]) == (stop_reason, details)


@pytest.mark.parametrize("provider", BOTH)
async def test_an_ordinary_end_has_nothing_to_say(talk: Talk, provider: str) -> None:
    conversation_id = await talk.begin(provider)
    assert (await talk.say(conversation_id))["turn"]["stop_details"] is None
