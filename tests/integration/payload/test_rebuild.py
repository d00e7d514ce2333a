"""What was sent can be rebuilt from what is stored, and a fork continues with the bytes of its source."""

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.conversation.call import Call
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    rebuild,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_steps import TEXT, steps, take_step

_CLOCK = re.compile(rb"current_datetime[^,}]+")


@pytest.mark.parametrize("provider", BOTH)
@settings(max_examples=10)
@example(taken=[("leave", 1), ("switch", BOTH[0]), ("leave", 1), ("switch", BOTH[1]), ("leave", 2), ("cancel", 1)])
@given(taken=st.lists(steps, min_size=1, max_size=8))
async def test_every_request_can_be_rebuilt_byte_for_byte(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, taken: list[tuple[Any, ...]]
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    for step in taken:
        await take_step(driver, step)
    await assert_rebuilds(driver)
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())
        emulated[name].state.request_log.clear()


async def _exact_calls(driver: ConversationDriver) -> dict[int, Call]:
    return {call.turn_seq: call for call in await driver.calls()}


@pytest.mark.parametrize("provider", BOTH)
async def test_a_fork_at_any_turn_sends_the_bytes_of_its_source(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    await driver.change(context={"todos": ["stay"]})
    tasks = {1: "First.", 7: "Second.", 9: "Third.", 13: "Fourth."}
    await driver.task(tasks[1], tool_reply("Oslo", "Bergen"), tool_reply("Tromsø"), text_reply("Cold."), picture=True)
    await driver.fail(tasks[7], text_reply(TEXT), after_chunks=5)
    await driver.task(tasks[9], tool_reply("Bergen"), text_reply("Wet."))
    await driver.task(tasks[13], text_reply("Fine."))
    sent = await _exact_calls(driver)
    for at_seq in range(2, 14, 2):
        fork = await driver.fork(at_seq)
        asked_at = at_seq + 1
        if asked_at in tasks:
            await fork.task(tasks[asked_at], text_reply("Otherwise."))
        else:
            await _answer_pending(fork)
        payload, body = await rebuild(fork, (await _exact_calls(fork))[asked_at + 1])
        source_payload, source_body = await rebuild(driver, sent[asked_at + 1])
        assert payload.static_text == source_payload.static_text
        assert payload.tools == source_payload.tools
        # The layered order begins with the current dynamic block, the append-only one ends with it.
        kept = slice(1, -1) if payload.messages[0].seq is None else slice(0, -1)
        assert payload.messages[kept] == source_payload.messages[kept]
        assert _CLOCK.sub(b"", body) == _CLOCK.sub(b"", source_body)
        await assert_rebuilds(fork)
    assert_all_accepted(emulated[provider].requests())
    assert await _exact_calls(driver) == sent


async def _answer_pending(fork: ConversationDriver) -> None:
    """A fork inside a loop waits for the same results."""
    conversation = await fork.program.store.load_conversation(fork.tenant_id, fork.conversation_id)
    assert conversation.pending_calls
    await fork.answer_calls([call.id for call in conversation.pending_calls], text_reply("Otherwise."))


@pytest.mark.parametrize("provider", BOTH)
async def test_a_fork_at_an_input_does_not_include_its_answer(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    await driver.task("First.", tool_reply("Oslo", "Bergen"), text_reply("Cold."))
    await driver.task("Second.", text_reply("Fine."))
    for at_seq in (1, 3, 5):
        fork = await driver.fork(at_seq)
        await fork.task("Otherwise?", tool_reply("Oslo"), text_reply("Otherwise."))
        assert [turn.seq for turn in await fork.turns()] == list(range(1, at_seq + 6))
        await assert_rebuilds(fork)
    assert_all_accepted(emulated[provider].requests())
