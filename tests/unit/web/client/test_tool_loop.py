"""Tools run in the client, their errors are results, and all results of a turn are sent in one request."""

import asyncio
import threading
from typing import Any

import pytest

from server.web.client import (
    StrataClient,
    ToolFunction,
    ToolRan,
    ToolRoundsExceeded,
    TurnFailed,
    TurnOptions,
)
from tests.support.fakes.scripted_strata import CONVERSATION_ID, ScriptedStrata, answer_events, called, failed

CALLS = [
    {"id": "call_1", "name": "add", "arguments": {"a": 1, "b": 2}},
    {"id": "call_2", "name": "fail", "arguments": {}},
]


async def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    raise LookupError("no such thing")


def results_of(strata: ScriptedStrata) -> list[Any]:
    return [request.body.get("tool_results") for request in strata.requests]


async def test_results_go_back_in_one_request_and_errors_are_results(
    client: StrataClient, strata: ScriptedStrata
) -> None:
    strata.replies.extend([lambda seq: called(seq, *CALLS), lambda seq: answer_events(seq, "Three.")])
    async with client.run_tools(CONVERSATION_ID, "Add.", {"add": add, "fail": fail}) as loop:
        events = [event async for event in loop]
        ended = await loop.result()
    assert ended.turn.text == "Three."
    assert [event.call.id for event in events if isinstance(event, ToolRan)] == ["call_1", "call_2"]
    assert results_of(strata) == [
        None,
        [
            {"tool_call_id": "call_1", "output": 3, "is_error": False},
            {"tool_call_id": "call_2", "output": "LookupError: no such thing", "is_error": True},
        ],
    ]


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ({}, "There is no tool called add."),
        ({"add": lambda: 1}, "TypeError"),
        ({"add": lambda a, b: object()}, "TypeError"),  # noqa: ARG005  reason: the model's arguments
        ({"add": lambda a, b: float("nan")}, "ValueError"),  # noqa: ARG005  reason: as above
    ],
)
async def test_a_tool_that_cannot_run_or_be_encoded_is_an_error_for_the_model(
    client: StrataClient, strata: ScriptedStrata, tools: dict[str, ToolFunction], sentence: str
) -> None:
    strata.replies.extend([lambda seq: called(seq, CALLS[0]), lambda seq: answer_events(seq, "Oh.")])
    async with client.run_tools(CONVERSATION_ID, "Add.", tools) as loop:
        await loop.result()
    [result] = results_of(strata)[1]
    assert result["is_error"]
    assert sentence in result["output"]


async def test_calls_of_one_turn_run_concurrently(client: StrataClient, strata: ScriptedStrata) -> None:
    both = asyncio.Barrier(2)
    blocking = threading.Barrier(2)

    async def wait() -> str:
        await both.wait()
        return "met"

    def block() -> str:
        blocking.wait(30)
        return "met"

    calls = [{"id": f"call_{n}", "name": name, "arguments": {}} for n, name in enumerate(["wait", "block"] * 2)]
    strata.replies.extend([lambda seq: called(seq, *calls), lambda seq: answer_events(seq, "Done.")])
    async with client.run_tools(CONVERSATION_ID, "Go.", {"wait": wait, "block": block}) as loop:
        await loop.result()
    assert [result["output"] for result in results_of(strata)[1]] == ["met"] * 4


async def test_each_turn_of_a_loop_has_a_unique_key_and_the_revision_applies_to_the_first(
    client: StrataClient, strata: ScriptedStrata
) -> None:
    strata.replies.extend([lambda seq: called(seq, CALLS[0]), lambda seq: answer_events(seq, "Three.")])
    options = TurnOptions(idempotency_key="mine", expected_revision=0, abandon_pending_calls=True)
    async with client.run_tools(CONVERSATION_ID, "Add.", {"add": add}, options=options) as loop:
        await loop.result()
    first, second = strata.requests
    assert [request.headers["idempotency-key"] for request in (first, second)] == ["mine", "mine.1"]
    assert first.body["expected_revision"] == 0
    assert not {"expected_revision", "abandon_pending_calls"} & second.body.keys()


async def test_an_endless_loop_is_ended(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.extend([lambda seq: called(seq, CALLS[0])] * 3)
    async with client.run_tools(CONVERSATION_ID, "Add.", {"add": add}, max_rounds=3) as loop:
        with pytest.raises(ToolRoundsExceeded, match="3 turns"):
            await loop.result()
    assert len(strata.requests) == 3


async def test_a_turn_that_fails_ends_the_loop(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.extend([lambda seq: called(seq, CALLS[0]), lambda seq: failed(seq, "Th")])
    async with client.run_tools(CONVERSATION_ID, "Add.", {"add": add}) as loop:
        with pytest.raises(TurnFailed) as caught:
            await loop.result()
    assert caught.value.ended.turn.text == "Th"


async def test_a_loop_can_be_left(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda seq: called(seq, CALLS[0]))
    async with client.run_tools(CONVERSATION_ID, "Add.", {"add": add}) as loop:
        async for _ in loop:
            break
    assert results_of(strata) == [None]
