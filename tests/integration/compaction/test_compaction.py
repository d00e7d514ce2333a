"""Compacting conversations on strict providers: nothing is refused, nothing is lost, and all of it can be undone."""

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
    Walk,
    asks,
    assert_all_accepted,
    assert_rebuilds,
    begin_walk,
    messages_of,
    signatures_in,
    tells,
    withheld_by,
)
from tests.support.emulators import BOTH, EmulatedProviders

KEEPING = {"compaction": {"policy": "off", "keep_exchanges": 2}}
"""Nothing is compacted but by request."""


def static_of(provider: str, body: Mapping[str, Any]) -> str:
    parts = body["systemInstruction"]["parts"] if provider == GEMINI else body["system"]
    return "".join(part["text"] for part in parts)


async def exchange(walk: Walk, number: int) -> None:
    replies = [tells(f"Answer {number}.")]
    if number % 3 == 0:
        replies.insert(0, asks("Oslo", "Bergen"))
    ended = await walk.task(f"Task {number}.", *replies, picture=number % 5 == 0)
    assert ended.turn.state is TurnState.COMPLETE


@pytest.mark.parametrize("provider", BOTH)
async def test_a_conversation_that_is_compacted_again_and_again_goes_on(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor = strata_server.program.compactor
    statics: list[str] = []
    for number in range(1, 25):
        await exchange(walk, number)
        if number % 4 == 0:
            report = await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
            assert report.outcome is CompactionOutcome.COMPACTED
            history = await strata_server.program.store.load_history(walk.tenant_id, walk.conversation_id)
            statics.append(history.source.static_text or "")
            covered = [seq for segment in history.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
            buffered = [turn.seq for turn in history.source.buffered]
            assert covered + buffered == [turn.seq for turn in await walk.turns()]
    requests = emulated[provider].requests()
    assert_all_accepted(requests)
    for before, after in pairwise(statics):
        assert after.startswith(before)
    last = requests[-1]["body"]
    assert static_of(provider, last) == statics[-2]
    assert "Task 1." in static_of(provider, last)
    assert "That is easy." not in static_of(provider, last)
    assert "I have to know" not in static_of(provider, last)
    assert await assert_rebuilds(walk) == len(requests)


@pytest.mark.parametrize("provider", BOTH)
async def test_what_is_undone_is_sent_as_before(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    """Two copies of one conversation; one is compacted and undone. Their next requests are the same."""
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor = strata_server.program.compactor
    for number in range(1, 9):
        await exchange(walk, number)
    assert walk.ended is not None
    copy = await walk.fork(walk.ended.turn.seq)
    await compactor.compact(walk.tenant_id, copy.conversation_id, force=True)
    undone = await compactor.undo(walk.tenant_id, copy.conversation_id)
    assert (undone.outcome, undone.first_seq, undone.last_seq) == (CompactionOutcome.UNDONE, 1, undone.last_seq)
    for one in (walk, copy):
        await one.task("And now?", tells("Now this."))
    first, second = (request["body"] for request in emulated[provider].requests()[-2:])
    assert without_clock(provider, first) == without_clock(provider, second)
    assert_all_accepted(emulated[provider].requests())
    # Signatures that were withheld for a while are sent again.
    assert len(signatures_in(messages_of(provider, second))) >= 8


def without_clock(provider: str, body: Mapping[str, Any]) -> str:
    """The request but for the time of day, which nobody can make equal."""
    text = json.dumps([static_of(provider, body), body["tools"], messages_of(provider, body)])
    return re.sub(r"current_datetime[^,}]*", "", text)


@pytest.mark.parametrize("provider", BOTH)
async def test_after_an_undo_history_grows_in_a_new_generation(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    program = strata_server.program
    walk = await begin_walk(program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor, store = program.compactor, program.store
    for number in range(1, 4):
        for _ in range(4):
            await exchange(walk, number)
        await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    await compactor.undo(walk.tenant_id, walk.conversation_id)
    kept = await store.load_history(walk.tenant_id, walk.conversation_id)
    assert not kept.can_append_segment
    await exchange(walk, 4)
    held = await compactor.compact(walk.tenant_id, walk.conversation_id)
    assert (held.outcome, held.reason) == (CompactionOutcome.UNCHANGED, "undone")
    await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    history = await store.load_history(walk.tenant_id, walk.conversation_id)
    assert history.source.epoch is not None
    assert history.source.epoch.generation == history.newest_generation == 1
    assert [segment.text for segment in history.segments[:-1]] == [segment.text for segment in kept.segments]
    await exchange(walk, 5)
    reasons = [
        outline.reason.value for outline in (await store.list_epochs(walk.tenant_id, walk.conversation_id)).items
    ]
    assert reasons == ["compacted", "compaction_undone", "compacted", "compacted", "compacted"]
    for _ in range(3):
        await compactor.undo(walk.tenant_id, walk.conversation_id)
    with pytest.raises(CompactionNotFound):
        await compactor.undo(walk.tenant_id, walk.conversation_id)
    await exchange(walk, 6)
    assert_all_accepted(emulated[provider].requests())
    assert await assert_rebuilds(walk) == len(emulated[provider].requests())


@pytest.mark.parametrize("provider", BOTH)
async def test_a_turn_that_runs_meanwhile_is_neither_lost_nor_disturbed(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    program = strata_server.program
    walk = await begin_walk(program, strata_server.tenant.id, emulated, provider, settings=KEEPING)
    compactor = program.compactor
    for number in range(1, 7):
        await exchange(walk, number)
    reports, ended = await asyncio.gather(
        asyncio.gather(
            *(compactor.compact(walk.tenant_id, walk.conversation_id, force=True) for _ in range(4)),
        ),
        walk.task("Meanwhile?", tells("Meanwhile.")),
    )
    assert ended.turn.state is TurnState.COMPLETE
    # Of several compactors one moves an exchange, and who comes to the very same is told the same; what the turn stops
    # is done afterwards.
    moved = {(report.epoch, report.first_seq) for report in reports if report.outcome is CompactionOutcome.COMPACTED}
    assert len(moved) == len({first_seq for _, first_seq in moved})
    await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    await exchange(walk, 8)
    history = await program.store.load_history(walk.tenant_id, walk.conversation_id)
    covered = [seq for segment in history.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
    assert covered + [turn.seq for turn in history.source.buffered] == [turn.seq for turn in await walk.turns()]
    assert_all_accepted(emulated[provider].requests())


async def test_on_a_prefix_bound_model_the_kept_turns_go_without_thinking_and_the_next_ones_with_it(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    program = strata_server.program
    walk = await begin_walk(program, strata_server.tenant.id, emulated, ANTHROPIC, settings=KEEPING)
    for number in range(1, 7):
        await exchange(walk, number)
    report = await program.compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    assert not report.thinking_kept
    assert report.last_seq is not None
    await exchange(walk, 7)
    await exchange(walk, 8)
    newest = (await walk.calls())[-1]
    kept = [
        turn.seq for turn in await walk.turns() if report.last_seq < turn.seq and isinstance(turn, ModelResponseTurn)
    ]
    assert withheld_by(newest) == {"prefix": [seq for seq in kept if seq < newest.turn_seq - 2]}
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_an_erased_conversation_is_not_compacted(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    program = strata_server.program
    walk = await begin_walk(program, strata_server.tenant.id, emulated, GEMINI, settings=KEEPING)
    for number in range(1, 5):
        await exchange(walk, number)
    await program.compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    report = await program.store.erase_conversation(walk.tenant_id, walk.conversation_id)
    assert report.rows["segments"] == 1
    for attempt in (program.compactor.compact, program.compactor.undo):
        with pytest.raises(ConversationNotFound):
            await attempt(walk.tenant_id, walk.conversation_id)
