"""Signed summaries on strict providers: the turns that stay keep their thinking, and nothing is lost with the rest."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.app.wiring import Program
from server.compaction.background_call import BackgroundCalls
from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome
from server.compaction.signed_summary import SignedSummariser
from server.compaction.summary import Summariser
from server.conversation.assistant import Instructions
from server.conversation.epoch import EpochReason
from server.conversation.errors import CompactionNotFound, SummaryUnavailable
from server.conversation.store import History, Store
from server.conversation.turn import TurnState
from server.emulator.reply import FaultKind
from server.payload.shared_caches import StaticTextCache
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from server.providers.choice import ANTHROPIC, GEMINI
from server.providers.model_profile import find_profile
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    Walk,
    asks,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    begin_walk,
    messages_of,
    signatures_in,
    tells,
    withheld_by,
)
from tests.support.emulators import EmulatedProviders
from tests.support.fakes.compaction_observer import Observed

SIGNING = {"compaction": {"policy": "off", "keep_exchanges": 2, "signed": True}}
"""Nothing is compacted but by request."""
MODELS = ("claude-fable-5-2", "claude-sonnet-5-5")


async def begin(server: StrataServer, emulated: EmulatedProviders, model: str = MODELS[0], **changes: Any) -> Walk:
    values = {"settings": SIGNING, "model": model} | changes
    return await begin_walk(server.program, server.tenant.id, emulated, ANTHROPIC, **values)


async def exchange(walk: Walk, number: int) -> None:
    replies = [tells(f"Answer {number}.")]
    if number % 3 == 0:
        replies.insert(0, asks("Oslo", "Bergen"))
    ended = await walk.task(f"Task {number}.", *replies, picture=number % 5 == 0)
    assert ended.turn.state is TurnState.COMPLETE


async def compact(walk: Walk, **options: Any) -> Any:
    return await walk.program.compactor.compact(walk.tenant_id, walk.conversation_id, force=True, **options)


async def look(walk: Walk) -> History:
    return await walk.program.store.load_history(walk.tenant_id, walk.conversation_id)


async def assert_nothing_is_lost(walk: Walk) -> None:
    """Every turn is told in a segment, in the signed summary, or in the buffer: in one of them, and in order."""
    history = await look(walk)
    covered = [seq for segment in history.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
    epoch = history.source.epoch
    if epoch is not None and epoch.signed_summary is not None:
        covered += range(epoch.signed_summary.start_seq, epoch.buffer_start_seq)
    assert covered + [turn.seq for turn in history.source.buffered] == [turn.seq for turn in await walk.turns()]


def signed_summary_of(body: Mapping[str, Any]) -> Any:
    first = messages_of(ANTHROPIC, body)[0]
    return first["content"][0] if first["role"] == "assistant" else None


@pytest.mark.parametrize("model", MODELS)
async def test_a_conversation_that_is_signed_again_and_again_keeps_the_thinking_of_what_stays(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, model)
    statics = set()
    for number in range(1, 25):
        await exchange(walk, number)
        if number % 4 == 0:
            report = await compact(walk)
            assert (report.outcome, report.thinking_kept) == (CompactionOutcome.SIGNED, True)
            history = await look(walk)
            assert history.segments == ()
            statics.add(history.source.static_text)
            await assert_nothing_is_lost(walk)
    assert len(statics) == 1
    requests = emulated[ANTHROPIC].requests()
    assert_all_accepted(requests)
    calls = await walk.calls()
    assert_no_break(calls)
    assert [withheld_by(call) for call in calls] == [{}] * len(calls)
    asked, signing = (request["body"] for request in requests[-2:])
    assert signing["compaction"] == {"type": "summarize"}
    assert signed_summary_of(asked) == signed_summary_of(signing)
    # All that stayed with the last cut but one, and what came since: the newest exchange waits for its second answer.
    assert len(signatures_in(messages_of(ANTHROPIC, asked)[1:])) == 7
    assert await assert_rebuilds(walk) == len(requests)
    assert len(await walk.background_calls()) == 6


async def test_only_what_was_made_behind_a_block_is_withheld_when_it_is_undone(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    compactor = walk.program.compactor
    starts = [(await look(walk)).source.conversation.buffer_start_seq]
    for number in range(1, 9):
        await exchange(walk, number)
        if number in {4, 7}:
            behind_first = [turn.seq for turn in (await look(walk)).source.buffered if turn.prefix_hash is not None]
            await compact(walk)
            starts.append((await look(walk)).source.conversation.buffer_start_seq)
    first = await compactor.undo(walk.tenant_id, walk.conversation_id)
    assert (first.outcome, first.first_seq, first.last_seq) == (CompactionOutcome.UNDONE, starts[1], starts[2] - 1)
    epoch = (await look(walk)).source.epoch
    assert epoch is not None
    assert epoch.signed_summary is not None
    await exchange(walk, 9)
    # What was made behind the block that is gone is withheld; what was made behind the first one keeps its thinking.
    withheld = withheld_by((await walk.calls())[-1])
    assert set(withheld) == {"prefix"}
    assert min(withheld["prefix"]) > behind_first[-1]
    sent = messages_of(ANTHROPIC, emulated[ANTHROPIC].requests()[-1]["body"])[1:]
    assert len(signatures_in(sent)) >= len([seq for seq in behind_first if seq >= starts[1]])
    await compactor.undo(walk.tenant_id, walk.conversation_id)
    await exchange(walk, 10)
    history = await look(walk)
    assert history.source.epoch is not None
    assert (history.source.epoch.signed_summary, history.source.epoch.buffer_start_seq) == (None, 1)
    # What was said before there was any block goes with its thinking again.
    made_behind_none = {turn.seq for turn in await walk.turns() if turn.seq < starts[1] + 4}
    assert not made_behind_none & set(withheld_by((await walk.calls())[-1])["prefix"])
    with pytest.raises(CompactionNotFound):
        await compactor.undo(walk.tenant_id, walk.conversation_id)
    await compact(walk)
    await exchange(walk, 11)
    await compact(walk)
    await exchange(walk, 12)
    await assert_nothing_is_lost(walk)
    requests = emulated[ANTHROPIC].requests()
    assert_all_accepted(requests)
    assert_no_break(await walk.calls())
    assert await assert_rebuilds(walk) == len(requests)


async def test_a_fork_goes_on_with_the_block_or_without_it_as_its_last_turn_did(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 7):
        await exchange(walk, number)
        if number == 4:
            await compact(walk)
    for at_seq, opens in ((4, False), (walk.ended.turn.seq if walk.ended else 0, True)):
        fork = await walk.fork(at_seq)
        await exchange(fork, 7)
        assert (signed_summary_of(emulated[ANTHROPIC].requests()[-1]["body"]) is not None) is opens
        assert withheld_by((await fork.calls())[-1]) == {}
        assert (await compact(fork)).outcome is CompactionOutcome.SIGNED
        await exchange(fork, 8)
        await assert_nothing_is_lost(fork)
        await assert_rebuilds(fork)
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_a_block_becomes_text_of_the_history_where_another_model_goes_on(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 6):
        await exchange(walk, number)
    await compact(walk)
    await exchange(walk, 6)
    epoch = (await look(walk)).source.epoch
    assert epoch is not None
    assert epoch.signed_summary is not None
    told = epoch.signed_summary
    assert "The user began with" in told.text
    await walk.switch(GEMINI, settings=SIGNING)
    await exchange(walk, 7)
    history = await look(walk)
    assert [(segment.first_seq, segment.last_seq, segment.text) for segment in history.segments] == [
        (told.start_seq, epoch.buffer_start_seq - 1, told.text)
    ]
    await assert_nothing_is_lost(walk)
    # Where no summaries are signed the wish has no effect.
    assert (await compact(walk)).outcome is CompactionOutcome.COMPACTED
    await walk.switch(ANTHROPIC, MODELS[0], settings=SIGNING)
    await exchange(walk, 8)
    await exchange(walk, 9)
    await exchange(walk, 10)
    assert (await compact(walk)).outcome is CompactionOutcome.SIGNED
    await exchange(walk, 11)
    await assert_nothing_is_lost(walk)
    assert len((await look(walk)).segments) == 2
    for provider in (ANTHROPIC, GEMINI):
        assert_all_accepted(emulated[provider].requests())
    assert_no_break(await walk.calls())
    sent = sum(len(emulated[provider].requests()) for provider in (ANTHROPIC, GEMINI))
    assert await assert_rebuilds(walk) == sent


async def test_a_change_that_the_provider_does_not_see_leaves_the_block_where_it_is(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 6):
        await exchange(walk, number)
    await compact(walk)
    await exchange(walk, 6)
    before = signed_summary_of(emulated[ANTHROPIC].requests()[-1]["body"])
    unsigned = {"compaction": {"policy": "off", "keep_exchanges": 2}, "max_output_tokens": 2000}
    await walk.switch(ANTHROPIC, MODELS[0], settings=unsigned)
    await exchange(walk, 7)
    assert signed_summary_of(emulated[ANTHROPIC].requests()[-1]["body"]) == before
    calls = await walk.calls()
    assert withheld_by(calls[-1]) == {}
    assert_no_break(calls)
    # Nobody wants it signed any more: the block goes into the history with what is moved.
    report = await compact(walk)
    assert (report.outcome, report.first_seq) == (CompactionOutcome.COMPACTED, 1)
    await exchange(walk, 8)
    history = await look(walk)
    assert "The user began with" in history.segments[0].text
    await assert_nothing_is_lost(walk)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    assert await assert_rebuilds(walk) == len(emulated[ANTHROPIC].requests())


@pytest.mark.parametrize("model", ["claude-haiku-4-5", "claude-opus-5"])
async def test_the_wish_has_an_effect_where_the_model_signs(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, model)
    for number in range(1, 5):
        await exchange(walk, number)
    signs = find_profile(ANTHROPIC, model).signs_compaction
    assert (await compact(walk, dry_run=True)).outcome.value == ("signed" if signs else "compacted")
    assert (await compact(walk)).outcome.value == ("signed" if signs else "compacted")
    await exchange(walk, 5)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_nothing_is_lost(walk)


def build_signing(program: Program, store: Store | None = None) -> Compactor:
    """One of another process, which gives up at the first failure."""
    used = store or program.store
    calls = BackgroundCalls(used, program.providers.by_name, retry_policy=RetryPolicy(attempts=1))
    renderer = program.compactor._renderer  # noqa: SLF001  reason: there is no need for a second one
    return Compactor(
        store=used,
        renderer=renderer,
        summariser=Summariser(calls, renderer),
        observer=Observed(),
        texts=StaticTextCache(),
        estimate=TokenEstimate(),
        signed_summariser=SignedSummariser(used, calls),
    )


@pytest.mark.parametrize("kind", [FaultKind.OVERLOADED, FaultKind.CUT, FaultKind.INTERNAL])
async def test_without_a_block_nothing_changes_as_long_as_there_is_room(
    strata_server: StrataServer, emulated: EmulatedProviders, kind: FaultKind
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(walk, number)
    before = await look(walk)
    emulated[ANTHROPIC].fails(kind)
    compactor = build_signing(walk.program)
    with pytest.raises(SummaryUnavailable):
        await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    assert await look(walk) == before
    report = await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    assert report.outcome is CompactionOutcome.SIGNED
    failed, signed = await walk.background_calls()
    assert (failed.turn_seq, signed.turn_seq) == (-1, -1)
    assert failed.end is not None
    assert signed.end is not None
    assert (failed.end.error_code is None, signed.end.error_code) == (False, None)
    assert (signed.end.cost_usd or 0) > 0
    assert await assert_rebuilds(walk) == len(emulated[ANTHROPIC].requests())


async def test_without_a_block_a_segment_is_written_when_the_window_runs_short(
    strata_server: StrataServer, emulated: EmulatedProviders, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1, "window_share": 0.0005, "signed": True}
    walk = await begin(strata_server, emulated, settings={"compaction": narrow})
    compactor = build_signing(walk.program)
    for number in range(1, 6):
        await exchange(walk, number)
    signed = await compactor.compact(walk.tenant_id, walk.conversation_id)
    assert (signed.outcome, signed.is_window_short) == (CompactionOutcome.SIGNED, True)
    for number in range(6, 9):
        await exchange(walk, number)
    emulated[ANTHROPIC].fails(FaultKind.OVERLOADED)
    with caplog.at_level(logging.WARNING, logger="strata.compaction"):
        report = await compactor.compact(walk.tenant_id, walk.conversation_id)
    assert report.is_window_short
    assert (report.first_seq, report.thinking_kept) == (1, False)
    assert "compaction.signed_unavailable" in [record.message for record in caplog.records]
    page = await walk.program.store.list_epochs(walk.tenant_id, walk.conversation_id)
    assert [outline.reason for outline in page.items] == [EpochReason.COMPACTED_UNSIGNED, EpochReason.SIGNED]
    [segment] = (await look(walk)).segments
    assert "The user began with" in segment.text
    assert "Task 7." in segment.text
    await exchange(walk, 9)
    await assert_nothing_is_lost(walk)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    assert await assert_rebuilds(walk) == len(emulated[ANTHROPIC].requests())


class MortalStore(PostgresStore):
    """Dies before its first epoch."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store._database)  # noqa: SLF001  reason: the same database

    async def begin_epoch(self, *args: Any, **more: Any) -> None:
        del args, more
        raise Died


class Died(Exception):
    """The worker is gone."""


async def test_a_block_is_paid_for_once_whoever_dies_and_whatever_is_said_meanwhile(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(walk, number)
    store = walk.program.store
    assert isinstance(store, PostgresStore)
    with pytest.raises(Died):
        await build_signing(walk.program, MortalStore(store)).compact(walk.tenant_id, walk.conversation_id, force=True)
    await exchange(walk, 5)
    asked = len(emulated[ANTHROPIC].requests())
    report = await build_signing(walk.program).compact(walk.tenant_id, walk.conversation_id, force=True)
    assert report.outcome is CompactionOutcome.SIGNED
    assert len(emulated[ANTHROPIC].requests()) == asked
    assert len(await walk.background_calls()) == 1
    await exchange(walk, 6)
    await assert_nothing_is_lost(walk)
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_a_block_that_the_provider_refuses_costs_one_call_and_not_the_turn(
    strata_server: StrataServer, emulated: EmulatedProviders, database: Database
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(walk, number)
    await compact(walk)
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE epochs SET signed_summary ="
            " convert_to(replace(convert_from(signed_summary, 'UTF8'), 'began', 'started'), 'UTF8')"
            " WHERE signed_summary IS NOT NULL"
        )
    await exchange(walk, 5)
    failed, made = [call for call in await walk.calls() if call.turn_seq == (await walk.calls())[-1].turn_seq]
    assert (failed.end and failed.end.error_code, made.end and made.end.error_code) == ("summary_rejected", None)
    await exchange(walk, 6)
    await exchange(walk, 7)
    page = await walk.program.store.list_epochs(walk.tenant_id, walk.conversation_id)
    assert [outline.reason for outline in page.items] == [EpochReason.SUMMARY_INLINED, EpochReason.SIGNED]
    await assert_nothing_is_lost(walk)
    assert (await compact(walk)).outcome is CompactionOutcome.SIGNED
    await exchange(walk, 8)
    refused = [request["status"] for request in emulated[ANTHROPIC].requests() if request["status"] != 200]
    assert refused == [400]


async def test_a_turn_and_other_compactors_at_the_same_time_disturb_nothing(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 7):
        await exchange(walk, number)
    outcomes, ended = await asyncio.gather(
        asyncio.gather(*(compact(walk) for _ in range(3)), return_exceptions=True),
        walk.task("Meanwhile?", tells("Meanwhile.")),
    )
    assert ended.turn.state is TurnState.COMPLETE
    # Who finds that another one has asked already leaves it to that one.
    assert [type(found) for found in outcomes if isinstance(found, BaseException)] in (
        [],
        [SummaryUnavailable],
        [SummaryUnavailable] * 2,
    )
    await compact(walk)
    await exchange(walk, 8)
    await assert_nothing_is_lost(walk)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    assert [withheld_by(call) for call in await walk.calls()] == [{}] * len(await walk.calls())


async def test_what_comes_of_it_is_listed_and_erased(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(walk, number)
    report = await compact(walk)
    [outline] = (await walk.program.store.list_epochs(walk.tenant_id, walk.conversation_id)).items
    assert outline.last_segment is not None
    assert (outline.reason, outline.segment_count) == (EpochReason.SIGNED, 0)
    assert (outline.last_segment.first_seq, outline.last_segment.last_seq) == (1, report.last_seq)
    assert outline.last_segment.token_count == report.segment_tokens
    erased = await walk.program.store.erase_conversation(walk.tenant_id, walk.conversation_id)
    assert erased.rows["epochs"] == 2


async def test_the_call_behind_a_new_block_says_why_its_cache_missed(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    story = "The quick brown fox jumps over the lazy dog. " * 60
    walk = await begin(strata_server, emulated, instructions=Instructions(roles=story, procedure="", constraints=""))
    for number in range(1, 6):
        await walk.task(f"Task {number}. {story}", tells(f"Answer {number}."))
    await compact(walk)
    [signing] = await walk.background_calls()
    # It was asked behind what the conversation has just said.
    assert signing.end is not None
    assert signing.end.usage.cache_read_tokens > signing.end.usage.fresh_input_tokens
    await walk.task("Task 6.", tells("Answer 6."))
    first = (await walk.calls())[-1]
    assert first.end is not None
    assert first.end.cache_miss_reason == "epoch_began"
    assert first.end.usage.cache_read_tokens > 0
    await walk.task("Task 7.", tells("Answer 7."))
    second = (await walk.calls())[-1]
    assert second.end is not None
    assert second.end.cache_miss_reason is None


STEPS = st.lists(
    st.sampled_from(["say", "ask tools", "break off", "sign", "undo", "toggle", "edit", "gemini", "claude", "fork"]),
    min_size=4,
    max_size=12,
)


@settings(max_examples=8, deadline=None)
@given(steps=STEPS)
async def test_whatever_is_done_nothing_is_refused_and_nothing_is_lost(
    strata_server: StrataServer, emulated: EmulatedProviders, steps: list[str]
) -> None:
    walk = await begin(strata_server, emulated)
    refused = {name: len(emulated[name].requests()) for name in (ANTHROPIC, GEMINI)}
    plan = Plan()
    for number, step in enumerate(["say", "say", "ask tools", "sign", *steps, "sign", "say"], start=1):
        walk = await take(walk, step, number, plan)
        await assert_nothing_is_lost(walk)
    for name, count in refused.items():
        assert_all_accepted(emulated[name].requests()[count:])
    assert_no_break(await walk.calls())
    await assert_rebuilds(walk)


@dataclass(slots=True)
class Plan:
    """What the assistant is like at the moment."""

    provider: str = ANTHROPIC
    signed: bool = True
    edits: int = 0


async def take(walk: Walk, step: str, number: int, plan: Plan) -> Walk:
    match step:
        case "say":
            await walk.task(f"Task {number}.", tells(f"Answer {number}."))
        case "ask tools":
            await walk.task(f"Task {number}.", asks("Oslo", "Bergen"), tells(f"Answer {number}."))
        case "break off":
            await walk.fail(f"Task {number}.", tells("One two three four."), after_chunks=number % 5)
        case "sign":
            await compact(walk)
        case "undo":
            with suppress(CompactionNotFound):
                await walk.program.compactor.undo(walk.tenant_id, walk.conversation_id)
        case "fork":
            assert walk.ended is not None
            ended, walk = walk.ended, await walk.fork(walk.ended.turn.seq)
            walk.ended = ended
        case _:
            await change(walk, step, plan)
    return walk


async def change(walk: Walk, step: str, plan: Plan) -> None:
    match step:
        case "toggle":
            plan.signed = not plan.signed
        case "edit":
            plan.edits += 1
        case "gemini":
            plan.provider = GEMINI
        case "claude":
            plan.provider = ANTHROPIC
        case _:
            raise AssertionError(step)
    await walk.switch(
        plan.provider,
        MODELS[0] if plan.provider == ANTHROPIC else None,
        settings={"compaction": {"policy": "off", "keep_exchanges": 1, "signed": plan.signed}},
        instructions=Instructions(roles=f"You help, in way {plan.edits}.", procedure="", constraints=""),
    )
