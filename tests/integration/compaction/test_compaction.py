"""Compaction of conversations on strict providers: nothing is refused, nothing is lost, and everything can be
undone.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from server.compaction.report import CompactionOutcome
from server.conversation.errors import CompactionNotFound, ConversationNotFound
from server.conversation.turn import ModelResponseTurn, TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    messages_of,
    signatures_in,
    start_driver,
    text_reply,
    tool_reply,
    withheld_by,
)
from tests.support.emulators import BOTH, EmulatedProviders

KEEPING = {"compaction": {"policy": "off", "keep_exchanges": 2}}
"""Compacts only on request."""


def static_of(provider: str, body: Mapping[str, Any]) -> str:
    parts = body["systemInstruction"]["parts"] if provider == GEMINI else body["system"]
    return "".join(part["text"] for part in parts)


async def exchange(driver: ConversationDriver, number: int) -> None:
    replies = [text_reply(f"Answer {number}.")]
    if number % 3 == 0:
        replies.insert(0, tool_reply("Oslo", "Bergen"))
    ended = await driver.task(f"Task {number}.", *replies, picture=number % 5 == 0)
    assert ended.turn.state is TurnState.COMPLETE


@pytest.mark.parametrize("provider", BOTH)
async def test_a_repeatedly_compacted_conversation_continues(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor = strata_server.program.compactor
    statics: list[str] = []
    for number in range(1, 25):
        await exchange(driver, number)
        if number % 4 == 0:
            report = await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
            assert report.outcome is CompactionOutcome.COMPACTED
            history = await strata_server.program.store.load_history(driver.tenant_id, driver.conversation_id)
            statics.append(history.source.static_text or "")
            covered = [seq for segment in history.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
            buffered = [turn.seq for turn in history.source.buffered]
            assert covered + buffered == [turn.seq for turn in await driver.turns()]
    requests = emulated[provider].requests()
    assert_all_accepted(requests)
    for before, after in pairwise(statics):
        assert after.startswith(before)
    last = requests[-1]["body"]
    assert static_of(provider, last) == statics[-2]
    assert "Task 1." in static_of(provider, last)
    assert "That is easy." not in static_of(provider, last)
    assert "I have to know" not in static_of(provider, last)
    assert await assert_rebuilds(driver) == len(requests)


@pytest.mark.parametrize("provider", BOTH)
async def test_after_an_undo_the_request_is_as_before(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    """Two copies of one conversation; one is compacted and undone. Their next requests are the same."""
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor = strata_server.program.compactor
    for number in range(1, 9):
        await exchange(driver, number)
    assert driver.ended is not None
    copy = await driver.fork(driver.ended.turn.seq)
    await compactor.compact(driver.tenant_id, copy.conversation_id, force=True)
    undone = await compactor.undo(driver.tenant_id, copy.conversation_id)
    assert (undone.outcome, undone.first_seq, undone.last_seq) == (CompactionOutcome.UNDONE, 1, undone.last_seq)
    for one in (driver, copy):
        await one.task("And now?", text_reply("Now this."))
    first, second = (request["body"] for request in emulated[provider].requests()[-2:])
    assert without_clock(provider, first) == without_clock(provider, second)
    assert_all_accepted(emulated[provider].requests())
    # Signatures that were withheld for a while are sent again.
    assert len(signatures_in(messages_of(provider, second))) >= 8


def without_clock(provider: str, body: Mapping[str, Any]) -> str:
    """The request without the time of day, which always differs."""
    text = json.dumps([static_of(provider, body), body["tools"], messages_of(provider, body)])
    return re.sub(r"current_datetime[^,}]*", "", text)


@pytest.mark.parametrize("provider", BOTH)
async def test_after_an_undo_history_grows_in_a_new_generation(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    program = strata_server.program
    driver = await start_driver(program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor, store = program.compactor, program.store
    for number in range(1, 4):
        for _ in range(4):
            await exchange(driver, number)
        await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    await compactor.undo(driver.tenant_id, driver.conversation_id)
    kept = await store.load_history(driver.tenant_id, driver.conversation_id)
    assert not kept.can_append_segment
    await exchange(driver, 4)
    held = await compactor.compact(driver.tenant_id, driver.conversation_id)
    assert (held.outcome, held.reason) == (CompactionOutcome.UNCHANGED, "undone")
    await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    history = await store.load_history(driver.tenant_id, driver.conversation_id)
    assert history.source.epoch is not None
    assert history.source.epoch.generation == history.newest_generation == 1
    assert [segment.text for segment in history.segments[:-1]] == [segment.text for segment in kept.segments]
    await exchange(driver, 5)
    reasons = [
        outline.reason.value for outline in (await store.list_epochs(driver.tenant_id, driver.conversation_id)).items
    ]
    assert reasons == ["compacted", "compaction_undone", "compacted", "compacted", "compacted"]
    for _ in range(3):
        await compactor.undo(driver.tenant_id, driver.conversation_id)
    with pytest.raises(CompactionNotFound):
        await compactor.undo(driver.tenant_id, driver.conversation_id)
    await exchange(driver, 6)
    assert_all_accepted(emulated[provider].requests())
    assert await assert_rebuilds(driver) == len(emulated[provider].requests())


@pytest.mark.parametrize("provider", BOTH)
async def test_a_concurrent_turn_is_neither_lost_nor_affected(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    program = strata_server.program
    driver = await start_driver(program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor = program.compactor
    for number in range(1, 7):
        await exchange(driver, number)
    reports, ended = await asyncio.gather(
        asyncio.gather(
            *(compactor.compact(driver.tenant_id, driver.conversation_id, force=True) for _ in range(4)),
        ),
        driver.task("Meanwhile?", text_reply("Meanwhile.")),
    )
    assert ended.turn.state is TurnState.COMPLETE
    # One of several compactors moves an exchange, and the others report the same; a compaction that the turn prevents
    # is done afterwards.
    moved = {(report.epoch, report.first_seq) for report in reports if report.outcome is CompactionOutcome.COMPACTED}
    assert len(moved) == len({first_seq for _, first_seq in moved})
    await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    await exchange(driver, 8)
    history = await program.store.load_history(driver.tenant_id, driver.conversation_id)
    covered = [seq for segment in history.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
    assert covered + [turn.seq for turn in history.source.buffered] == [turn.seq for turn in await driver.turns()]
    assert_all_accepted(emulated[provider].requests())


async def test_on_a_prefix_bound_model_the_kept_turns_are_sent_without_thinking_and_the_next_ones_with_it(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    program = strata_server.program
    driver = await start_driver(program, strata_server.tenant.id, emulated, ANTHROPIC, settings=KEEPING)
    for number in range(1, 7):
        await exchange(driver, number)
    report = await program.compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    assert not report.thinking_kept
    assert report.last_seq is not None
    await exchange(driver, 7)
    await exchange(driver, 8)
    newest = (await driver.calls())[-1]
    kept = [
        turn.seq for turn in await driver.turns() if report.last_seq < turn.seq and isinstance(turn, ModelResponseTurn)
    ]
    assert withheld_by(newest) == {"prefix": [seq for seq in kept if seq < newest.turn_seq - 2]}
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_an_erased_conversation_is_not_compacted(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    program = strata_server.program
    driver = await start_driver(program, strata_server.tenant.id, emulated, GEMINI, settings=KEEPING)
    for number in range(1, 5):
        await exchange(driver, number)
    await program.compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    report = await program.store.erase_conversation(driver.tenant_id, driver.conversation_id)
    assert report.rows["segments"] == 1
    for attempt in (program.compactor.compact, program.compactor.undo):
        with pytest.raises(ConversationNotFound):
            await attempt(driver.tenant_id, driver.conversation_id)
