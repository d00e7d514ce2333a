"""Two hundred turns with tools, images and failures, on strict providers: nothing is refused and nothing moves."""

import json
from typing import Any

import pytest

from server.conversation.turn import TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    ConversationDriver,
    answers_in,
    assert_all_accepted,
    assert_rebuilds,
    messages_of,
    signatures_in,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders

LENGTH = 200
MISHAPS = {9: "cancel", 17: "fail", 26: "cancel_call", 34: "abandon"}


async def _live(driver: ConversationDriver) -> None:
    """Exchange by exchange, until the conversation is long."""
    number = 0
    while driver.ended is None or driver.ended.turn.seq < LENGTH:
        number += 1
        text = f"Task {number}."
        match MISHAPS.get(number):
            case "cancel":
                ended = await driver.cancel(
                    text, text_reply("One two three four five six seven eight."), after_events=3
                )
                assert ended.turn.state is TurnState.CANCELLED
            case "cancel_call":
                ended = await driver.cancel(text, tool_reply("Oslo", "Bergen"), after_events=4)
                assert ended.turn.state is TurnState.CANCELLED
            case "fail":
                ended = await driver.fail(text, text_reply("One two three four five six seven eight."), after_chunks=5)
                assert ended.turn.state is TurnState.FAILED
            case "abandon":
                await driver.task(text, tool_reply("Oslo"))
                ended = await driver.task(f"{text} Never mind.", text_reply("Fine."), abandons_calls=True)
                assert ended.turn.state is TurnState.COMPLETE
            case _:
                await _exchange(driver, number, text)


async def _exchange(driver: ConversationDriver, number: int, text: str) -> None:
    replies = [text_reply(f"Answer {number}.")]
    if number % 3 == 0:
        replies.insert(0, tool_reply("Oslo", "Bergen", "Tromsø"))
    if number % 4 == 0:
        replies.insert(0, tool_reply(f"City {number}"))
    if number % 10 == 0:
        await driver.change(context={"todos": [f"to do since {number}"]})
    ended = await driver.task(text, *replies, picture=number % 7 == 0)
    assert ended.turn.state is TurnState.COMPLETE
    assert ended.conversation.pending_calls == ()


def _assert_layered(bodies: list[dict[str, Any]]) -> None:
    """Static, dynamic, buffered, trigger; the buffer only grows, and the dynamic block changes with the context."""
    before: list[Any] = []
    blocks = {messages_of(GEMINI, body)[0]["parts"][0]["text"] for body in bodies}
    contexts = {str(json.loads(block)["todos"]) for block in blocks}
    # The time in the block may change once, with the hour.
    assert 1 < len(contexts) <= len(blocks) <= len(contexts) + 1
    for body in bodies:
        dynamic, *rest = messages_of(GEMINI, body)
        assert body["systemInstruction"] == bodies[0]["systemInstruction"]
        assert body["tools"] == bodies[0]["tools"]
        assert "current_datetime" in json.loads(dynamic["parts"][0]["text"])
        tasks = [message["parts"] for message in rest if "text" in message["parts"][-1] and message["role"] == "user"]
        assert all("current_datetime" in json.loads(parts[0]["text"]) for parts in tasks)
        results = [message["parts"] for message in rest if "functionResponse" in message["parts"][0]]
        assert all("text" not in part for parts in results for part in parts)
        assert rest[: len(before)] == before
        assert rest[-1]["role"] == "user"
        before = rest


def _assert_append_only(bodies: list[dict[str, Any]]) -> None:
    """Each request begins with the whole previous one; the new part at its end has the current dynamic block."""
    before: list[Any] = []
    for body in bodies:
        messages = messages_of(ANTHROPIC, body)
        assert body["system"][0]["text"] == bodies[0]["system"][0]["text"]
        assert body["tools"] == bodies[0]["tools"]
        assert messages[: len(before)] == before
        assert messages[-1]["role"] == "user"
        if messages[-1]["content"][-1]["type"] == "text":
            assert "current_datetime" in json.dumps(messages[len(before) :])
        before = messages


@pytest.mark.parametrize("provider", BOTH)
async def test_two_hundred_turns_with_tools_and_failures_are_all_accepted(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    await _live(driver)
    requests = emulated[provider].requests()
    assert_all_accepted(requests)
    bodies = [request["body"] for request in requests]
    (_assert_layered if provider == GEMINI else _assert_append_only)(bodies)

    # What is sent back is what was received, with all signatures.
    natives = await driver.natives()
    # The newest answer is still to be sent.
    sent_back = [native for seq, native in natives.items() if seq < max(natives)]
    assert answers_in(provider, bodies[-1]) == sent_back
    assert len(signatures_in(sent_back)) >= 90
    calls = await driver.calls()
    turns = await driver.turns()
    assert [turn.seq for turn in turns] == list(range(1, len(turns) + 1))
    assert len(calls) == len(bodies) == len(turns) // 2
    assert [warning for call in calls for warning in call.start.warnings] == []
    kinds = {repair["kind"] for call in calls for repair in call.start.repairs}
    assert "call_abandoned" in kinds
    assert await assert_rebuilds(driver) == len(calls)
