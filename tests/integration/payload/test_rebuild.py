"""What was sent can be made again from what is stored; and a fork goes on with the very bytes of its source."""

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.conversation.call import Call
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    Walk,
    asks,
    assert_all_accepted,
    assert_rebuilds,
    begin_walk,
    rebuild,
    tells,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_steps import TEXT, steps, take_step

_CLOCK = re.compile(rb"current_datetime[^,}]+")


@pytest.mark.parametrize("provider", BOTH)
@settings(max_examples=10)
@example(taken=[("leave", 1), ("switch", BOTH[0]), ("leave", 1), ("switch", BOTH[1]), ("leave", 2), ("cancel", 1)])
@given(taken=st.lists(steps, min_size=1, max_size=8))
async def test_every_request_can_be_made_again_to_the_byte(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, taken: list[tuple[Any, ...]]
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    for step in taken:
        await take_step(walk, step)
    await assert_rebuilds(walk)
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())
        emulated[name].state.request_log.clear()


async def _exact_calls(walk: Walk) -> dict[int, Call]:
    return {call.turn_seq: call for call in await walk.calls()}


@pytest.mark.parametrize("provider", BOTH)
async def test_a_fork_at_any_turn_asks_with_the_bytes_of_its_source(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    await walk.change(context={"todos": ["stay"]})
    tasks = {1: "First.", 7: "Second.", 9: "Third.", 13: "Fourth."}
    await walk.task(tasks[1], asks("Oslo", "Bergen"), asks("Tromsø"), tells("Cold."), picture=True)
    await walk.fail(tasks[7], tells(TEXT), after_chunks=5)
    await walk.task(tasks[9], asks("Bergen"), tells("Wet."))
    await walk.task(tasks[13], tells("Fine."))
    sent = await _exact_calls(walk)
    for at_seq in range(2, 14, 2):
        fork = await walk.fork(at_seq)
        asked_at = at_seq + 1
        if asked_at in tasks:
            await fork.task(tasks[asked_at], tells("Otherwise."))
        else:
            await _answer_pending(fork)
        payload, body = await rebuild(fork, (await _exact_calls(fork))[asked_at + 1])
        source_payload, source_body = await rebuild(walk, sent[asked_at + 1])
        assert payload.static_text == source_payload.static_text
        assert payload.tools == source_payload.tools
        # The layered order begins with the world as it is now, the append-only one ends with it.
        kept = slice(1, -1) if payload.messages[0].seq is None else slice(0, -1)
        assert payload.messages[kept] == source_payload.messages[kept]
        assert _CLOCK.sub(b"", body) == _CLOCK.sub(b"", source_body)
        await assert_rebuilds(fork)
    assert_all_accepted(emulated[provider].requests())
    assert await _exact_calls(walk) == sent


async def _answer_pending(fork: Walk) -> None:
    """A fork inside a loop waits for the same results."""
    conversation = await fork.program.store.load_conversation(fork.tenant_id, fork.conversation_id)
    assert conversation.pending_calls
    await fork.answer_calls([call.id for call in conversation.pending_calls], tells("Otherwise."))


@pytest.mark.parametrize("provider", BOTH)
async def test_a_fork_at_an_input_leaves_its_answer_behind(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    await walk.task("First.", asks("Oslo", "Bergen"), tells("Cold."))
    await walk.task("Second.", tells("Fine."))
    for at_seq in (1, 3, 5):
        fork = await walk.fork(at_seq)
        await fork.task("Otherwise?", asks("Oslo"), tells("Otherwise."))
        assert [turn.seq for turn in await fork.turns()] == list(range(1, at_seq + 6))
        await assert_rebuilds(fork)
    assert_all_accepted(emulated[provider].requests())
