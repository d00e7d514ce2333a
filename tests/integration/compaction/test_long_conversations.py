"""Two hundred turns with tools, images and mishaps, on strict providers: nothing is refused and nothing moves."""

import json
from typing import Any

import pytest

from server.conversation.turn import TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    Walk,
    answers_in,
    asks,
    assert_all_accepted,
    assert_rebuilds,
    begin_walk,
    messages_of,
    signatures_in,
    tells,
)
from tests.support.emulators import BOTH, EmulatedProviders

LENGTH = 200
MISHAPS = {9: "cancel", 17: "fail", 26: "cancel_call", 34: "abandon"}


async def _live(walk: Walk) -> None:
    """Exchange by exchange, until the conversation is long."""
    number = 0
    while walk.ended is None or walk.ended.turn.seq < LENGTH:
        number += 1
        text = f"Task {number}."
        match MISHAPS.get(number):
            case "cancel":
                ended = await walk.cancel(text, tells("One two three four five six seven eight."), after_events=3)
                assert ended.turn.state is TurnState.CANCELLED
            case "cancel_call":
                ended = await walk.cancel(text, asks("Oslo", "Bergen"), after_events=4)
                assert ended.turn.state is TurnState.CANCELLED
            case "fail":
                ended = await walk.fail(text, tells("One two three four five six seven eight."), after_chunks=5)
                assert ended.turn.state is TurnState.FAILED
            case "abandon":
                await walk.task(text, asks("Oslo"))
                ended = await walk.task(f"{text} Never mind.", tells("Fine."), abandons_calls=True)
                assert ended.turn.state is TurnState.COMPLETE
            case _:
                await _exchange(walk, number, text)


async def _exchange(walk: Walk, number: int, text: str) -> None:
    replies = [tells(f"Answer {number}.")]
    if number % 3 == 0:
        replies.insert(0, asks("Oslo", "Bergen", "Tromsø"))
    if number % 4 == 0:
        replies.insert(0, asks(f"City {number}"))
    if number % 10 == 0:
        await walk.change(context={"todos": [f"to do since {number}"]})
    ended = await walk.task(text, *replies, picture=number % 7 == 0)
    assert ended.turn.state is TurnState.COMPLETE
    assert ended.conversation.pending_calls == ()


def _assert_layered(bodies: list[dict[str, Any]]) -> None:
    """Static, dynamic, buffered, trigger; and the buffer only grows."""
    before: list[Any] = []
    for body in bodies:
        dynamic, *rest = messages_of(GEMINI, body)
        assert body["systemInstruction"] == bodies[0]["systemInstruction"]
        assert body["tools"] == bodies[0]["tools"]
        assert "current_datetime" in json.loads(dynamic["parts"][0]["text"])
        assert "current_datetime" not in json.dumps(rest)
        assert rest[: len(before)] == before
        assert rest[-1]["role"] == "user"
        before = rest


def _assert_append_only(bodies: list[dict[str, Any]]) -> None:
    """Each request begins with the whole of the one before it; what is new at its end has the world as it is now."""
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
async def test_two_hundred_turns_with_tools_and_mishaps_are_all_accepted(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    await _live(walk)
    requests = emulated[provider].requests()
    assert_all_accepted(requests)
    bodies = [request["body"] for request in requests]
    (_assert_layered if provider == GEMINI else _assert_append_only)(bodies)

    # What goes back is what came, signatures and all.
    natives = await walk.natives()
    # The newest answer is still to be sent.
    sent_back = [native for seq, native in natives.items() if seq < max(natives)]
    assert answers_in(provider, bodies[-1]) == sent_back
    assert len(signatures_in(sent_back)) >= 90
    calls = await walk.calls()
    turns = await walk.turns()
    assert [turn.seq for turn in turns] == list(range(1, len(turns) + 1))
    assert len(calls) == len(bodies) == len(turns) // 2
    assert [warning for call in calls for warning in call.start.warnings] == []
    kinds = {repair["kind"] for call in calls for repair in call.start.repairs}
    assert "call_abandoned" in kinds
    assert await assert_rebuilds(walk) == len(calls)
