"""Signed summaries on strict providers: the turns that stay keep their thinking, and nothing of the rest is lost."""

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
    ConversationDriver,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    messages_of,
    signatures_in,
    start_driver,
    text_reply,
    tool_reply,
    withheld_by,
)
from tests.support.emulators import EmulatedProviders
from tests.support.fakes.compaction_observer import Observed

SIGNING = {"compaction": {"policy": "off", "keep_exchanges": 2, "signed": True}}
"""Compacts only on request."""
MODELS = ("claude-fable-5-2", "claude-sonnet-5-5")


async def begin(
    server: StrataServer, emulated: EmulatedProviders, model: str = MODELS[0], **changes: Any
) -> ConversationDriver:
    values = {"settings": SIGNING, "model": model} | changes
    return await start_driver(server.program, server.tenant.id, emulated, ANTHROPIC, **values)


async def exchange(driver: ConversationDriver, number: int) -> None:
    replies = [text_reply(f"Answer {number}.")]
    if number % 3 == 0:
        replies.insert(0, tool_reply("Oslo", "Bergen"))
    ended = await driver.task(f"Task {number}.", *replies, picture=number % 5 == 0)
    assert ended.turn.state is TurnState.COMPLETE


async def compact(driver: ConversationDriver, **options: Any) -> Any:
    return await driver.program.compactor.compact(driver.tenant_id, driver.conversation_id, force=True, **options)


async def look(driver: ConversationDriver) -> History:
    return await driver.program.store.load_history(driver.tenant_id, driver.conversation_id)


async def assert_nothing_is_lost(driver: ConversationDriver) -> None:
    """Every turn is in exactly one segment, the signed summary or the buffer, in order."""
    history = await look(driver)
    covered = [seq for segment in history.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
    epoch = history.source.epoch
    if epoch is not None and epoch.signed_summary is not None:
        covered += range(epoch.signed_summary.start_seq, epoch.buffer_start_seq)
    assert covered + [turn.seq for turn in history.source.buffered] == [turn.seq for turn in await driver.turns()]


def signed_summary_of(body: Mapping[str, Any]) -> Any:
    first = messages_of(ANTHROPIC, body)[0]
    return first["content"][0] if first["role"] == "assistant" else None


@pytest.mark.parametrize("model", MODELS)
async def test_a_repeatedly_summarised_conversation_keeps_the_thinking_of_the_turns_that_stay(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, model)
    statics = set()
    for number in range(1, 25):
        await exchange(driver, number)
        if number % 4 == 0:
            report = await compact(driver)
            assert (report.outcome, report.thinking_kept) == (CompactionOutcome.SIGNED, True)
            history = await look(driver)
            assert history.segments == ()
            statics.add(history.source.static_text)
            await assert_nothing_is_lost(driver)
    assert len(statics) == 1
    requests = emulated[ANTHROPIC].requests()
    assert_all_accepted(requests)
    calls = await driver.calls()
    assert_no_break(calls)
    assert [withheld_by(call) for call in calls] == [{}] * len(calls)
    asked, signing = (request["body"] for request in requests[-2:])
    assert signing["compaction"] == {"type": "summarize"}
    assert signed_summary_of(asked) == signed_summary_of(signing)
    # Everything that stayed at the last cut but one, and what came since: the newest exchange waits for its second
    # answer.
    assert len(signatures_in(messages_of(ANTHROPIC, asked)[1:])) == 7
    assert await assert_rebuilds(driver) == len(requests)
    assert len(await driver.background_calls()) == 6


async def test_after_an_undo_only_turns_after_the_removed_summary_are_withheld(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    compactor = driver.program.compactor
    starts = [(await look(driver)).source.conversation.buffer_start_seq]
    for number in range(1, 9):
        await exchange(driver, number)
        if number in {4, 7}:
            behind_first = [turn.seq for turn in (await look(driver)).source.buffered if turn.prefix_hash is not None]
            await compact(driver)
            starts.append((await look(driver)).source.conversation.buffer_start_seq)
    first = await compactor.undo(driver.tenant_id, driver.conversation_id)
    assert (first.outcome, first.first_seq, first.last_seq) == (CompactionOutcome.UNDONE, starts[1], starts[2] - 1)
    epoch = (await look(driver)).source.epoch
    assert epoch is not None
    assert epoch.signed_summary is not None
    await exchange(driver, 9)
    # Turns after the removed summary are withheld; turns after the first summary keep their thinking.
    withheld = withheld_by((await driver.calls())[-1])
    assert set(withheld) == {"prefix"}
    assert min(withheld["prefix"]) > behind_first[-1]
    sent = messages_of(ANTHROPIC, emulated[ANTHROPIC].requests()[-1]["body"])[1:]
    assert len(signatures_in(sent)) >= len([seq for seq in behind_first if seq >= starts[1]])
    await compactor.undo(driver.tenant_id, driver.conversation_id)
    await exchange(driver, 10)
    history = await look(driver)
    assert history.source.epoch is not None
    assert (history.source.epoch.signed_summary, history.source.epoch.buffer_start_seq) == (None, 1)
    # Turns from before any summary are sent with their thinking again.
    made_behind_none = {turn.seq for turn in await driver.turns() if turn.seq < starts[1] + 4}
    assert not made_behind_none & set(withheld_by((await driver.calls())[-1])["prefix"])
    with pytest.raises(CompactionNotFound):
        await compactor.undo(driver.tenant_id, driver.conversation_id)
    await compact(driver)
    await exchange(driver, 11)
    await compact(driver)
    await exchange(driver, 12)
    await assert_nothing_is_lost(driver)
    requests = emulated[ANTHROPIC].requests()
    assert_all_accepted(requests)
    assert_no_break(await driver.calls())
    assert await assert_rebuilds(driver) == len(requests)


async def test_a_fork_continues_with_or_without_the_summary_as_its_last_turn_did(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 7):
        await exchange(driver, number)
        if number == 4:
            await compact(driver)
    for at_seq, opens in ((4, False), (driver.ended.turn.seq if driver.ended else 0, True)):
        fork = await driver.fork(at_seq)
        await exchange(fork, 7)
        assert (signed_summary_of(emulated[ANTHROPIC].requests()[-1]["body"]) is not None) is opens
        assert withheld_by((await fork.calls())[-1]) == {}
        assert (await compact(fork)).outcome is CompactionOutcome.SIGNED
        await exchange(fork, 8)
        await assert_nothing_is_lost(fork)
        await assert_rebuilds(fork)
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_a_signed_summary_becomes_text_of_the_history_if_another_model_continues(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 6):
        await exchange(driver, number)
    await compact(driver)
    await exchange(driver, 6)
    epoch = (await look(driver)).source.epoch
    assert epoch is not None
    assert epoch.signed_summary is not None
    signed = epoch.signed_summary
    assert "The user began with" in signed.text
    await driver.switch(GEMINI, settings=SIGNING)
    await exchange(driver, 7)
    history = await look(driver)
    assert [(segment.first_seq, segment.last_seq, segment.text) for segment in history.segments] == [
        (signed.start_seq, epoch.buffer_start_seq - 1, signed.text)
    ]
    await assert_nothing_is_lost(driver)
    # If the model has no signed summaries, the setting has no effect.
    assert (await compact(driver)).outcome is CompactionOutcome.COMPACTED
    await driver.switch(ANTHROPIC, MODELS[0], settings=SIGNING)
    await exchange(driver, 8)
    await exchange(driver, 9)
    await exchange(driver, 10)
    assert (await compact(driver)).outcome is CompactionOutcome.SIGNED
    await exchange(driver, 11)
    await assert_nothing_is_lost(driver)
    assert len((await look(driver)).segments) == 2
    for provider in (ANTHROPIC, GEMINI):
        assert_all_accepted(emulated[provider].requests())
    assert_no_break(await driver.calls())
    sent = sum(len(emulated[provider].requests()) for provider in (ANTHROPIC, GEMINI))
    assert await assert_rebuilds(driver) == sent


async def test_a_change_that_the_provider_does_not_see_keeps_the_summary(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 6):
        await exchange(driver, number)
    await compact(driver)
    await exchange(driver, 6)
    before = signed_summary_of(emulated[ANTHROPIC].requests()[-1]["body"])
    unsigned = {"compaction": {"policy": "off", "keep_exchanges": 2}, "max_output_tokens": 2000}
    await driver.switch(ANTHROPIC, MODELS[0], settings=unsigned)
    await exchange(driver, 7)
    assert signed_summary_of(emulated[ANTHROPIC].requests()[-1]["body"]) == before
    calls = await driver.calls()
    assert withheld_by(calls[-1]) == {}
    assert_no_break(calls)
    # The setting is switched off: the summary becomes part of the history with what is moved.
    report = await compact(driver)
    assert (report.outcome, report.first_seq) == (CompactionOutcome.COMPACTED, 1)
    await exchange(driver, 8)
    history = await look(driver)
    assert "The user began with" in history.segments[0].text
    await assert_nothing_is_lost(driver)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    assert await assert_rebuilds(driver) == len(emulated[ANTHROPIC].requests())


@pytest.mark.parametrize("model", ["claude-haiku-4-5", "claude-opus-5"])
async def test_the_setting_takes_effect_if_the_model_signs_summaries(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, model)
    for number in range(1, 5):
        await exchange(driver, number)
    signs = find_profile(ANTHROPIC, model).signs_compaction
    assert (await compact(driver, dry_run=True)).outcome.value == ("signed" if signs else "compacted")
    assert (await compact(driver)).outcome.value == ("signed" if signs else "compacted")
    await exchange(driver, 5)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_nothing_is_lost(driver)


def build_signing(program: Program, store: Store | None = None) -> Compactor:
    """A compactor of another process, which does not retry."""
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
async def test_without_a_summary_nothing_changes_while_there_is_room(
    strata_server: StrataServer, emulated: EmulatedProviders, kind: FaultKind
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(driver, number)
    before = await look(driver)
    emulated[ANTHROPIC].inject_fault(kind)
    compactor = build_signing(driver.program)
    with pytest.raises(SummaryUnavailable):
        await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    assert await look(driver) == before
    report = await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    assert report.outcome is CompactionOutcome.SIGNED
    failed, signed = await driver.background_calls()
    assert (failed.turn_seq, signed.turn_seq) == (-1, -1)
    assert failed.end is not None
    assert signed.end is not None
    assert (failed.end.error_code is None, signed.end.error_code) == (False, None)
    assert (signed.end.cost_usd or 0) > 0
    assert await assert_rebuilds(driver) == len(emulated[ANTHROPIC].requests())


async def test_without_a_summary_a_segment_is_written_when_the_window_is_nearly_full(
    strata_server: StrataServer, emulated: EmulatedProviders, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1, "window_share": 0.0005, "signed": True}
    driver = await begin(strata_server, emulated, settings={"compaction": narrow})
    compactor = build_signing(driver.program)
    for number in range(1, 6):
        await exchange(driver, number)
    signed = await compactor.compact(driver.tenant_id, driver.conversation_id)
    assert (signed.outcome, signed.is_window_short) == (CompactionOutcome.SIGNED, True)
    for number in range(6, 9):
        await exchange(driver, number)
    emulated[ANTHROPIC].inject_fault(FaultKind.OVERLOADED)
    with caplog.at_level(logging.WARNING, logger="strata.compaction"):
        report = await compactor.compact(driver.tenant_id, driver.conversation_id)
    assert report.is_window_short
    assert (report.first_seq, report.thinking_kept) == (1, False)
    assert "compaction.signed_unavailable" in [record.message for record in caplog.records]
    page = await driver.program.store.list_epochs(driver.tenant_id, driver.conversation_id)
    assert [outline.reason for outline in page.items] == [EpochReason.COMPACTED_UNSIGNED, EpochReason.SIGNED]
    [segment] = (await look(driver)).segments
    assert "The user began with" in segment.text
    assert "Task 7." in segment.text
    await exchange(driver, 9)
    await assert_nothing_is_lost(driver)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    assert await assert_rebuilds(driver) == len(emulated[ANTHROPIC].requests())


class MortalStore(PostgresStore):
    """Dies before its first epoch."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store._database)  # noqa: SLF001  reason: the same database

    async def begin_epoch(self, *args: Any, **more: Any) -> None:
        del args, more
        raise Died


class Died(Exception):
    """The worker has died."""


async def test_a_summary_is_billed_once_after_deaths_and_concurrent_turns(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(driver, number)
    store = driver.program.store
    assert isinstance(store, PostgresStore)
    with pytest.raises(Died):
        await build_signing(driver.program, MortalStore(store)).compact(
            driver.tenant_id, driver.conversation_id, force=True
        )
    await exchange(driver, 5)
    asked = len(emulated[ANTHROPIC].requests())
    report = await build_signing(driver.program).compact(driver.tenant_id, driver.conversation_id, force=True)
    assert report.outcome is CompactionOutcome.SIGNED
    assert len(emulated[ANTHROPIC].requests()) == asked
    assert len(await driver.background_calls()) == 1
    await exchange(driver, 6)
    await assert_nothing_is_lost(driver)
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_a_summary_that_the_provider_rejects_costs_one_call_and_not_the_turn(
    strata_server: StrataServer, emulated: EmulatedProviders, database: Database
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(driver, number)
    await compact(driver)
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE epochs SET signed_summary ="
            " convert_to(replace(convert_from(signed_summary, 'UTF8'), 'began', 'started'), 'UTF8')"
            " WHERE signed_summary IS NOT NULL"
        )
    await exchange(driver, 5)
    failed, made = [call for call in await driver.calls() if call.turn_seq == (await driver.calls())[-1].turn_seq]
    assert (failed.end and failed.end.error_code, made.end and made.end.error_code) == ("summary_rejected", None)
    await exchange(driver, 6)
    await exchange(driver, 7)
    page = await driver.program.store.list_epochs(driver.tenant_id, driver.conversation_id)
    assert [outline.reason for outline in page.items] == [EpochReason.SUMMARY_INLINED, EpochReason.SIGNED]
    await assert_nothing_is_lost(driver)
    assert (await compact(driver)).outcome is CompactionOutcome.SIGNED
    await exchange(driver, 8)
    refused = [request["status"] for request in emulated[ANTHROPIC].requests() if request["status"] != 200]
    assert refused == [400]


async def test_concurrent_turns_and_compactors_do_not_interfere(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 7):
        await exchange(driver, number)
    outcomes, ended = await asyncio.gather(
        asyncio.gather(*(compact(driver) for _ in range(3)), return_exceptions=True),
        driver.task("Meanwhile?", text_reply("Meanwhile.")),
    )
    assert ended.turn.state is TurnState.COMPLETE
    # A compactor that finds a running request leaves it to the other one.
    assert [type(found) for found in outcomes if isinstance(found, BaseException)] in (
        [],
        [SummaryUnavailable],
        [SummaryUnavailable] * 2,
    )
    await compact(driver)
    await exchange(driver, 8)
    await assert_nothing_is_lost(driver)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    assert [withheld_by(call) for call in await driver.calls()] == [{}] * len(await driver.calls())


async def test_a_signed_summary_is_listed_and_erased(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated)
    for number in range(1, 5):
        await exchange(driver, number)
    report = await compact(driver)
    [outline] = (await driver.program.store.list_epochs(driver.tenant_id, driver.conversation_id)).items
    assert outline.last_segment is not None
    assert (outline.reason, outline.segment_count) == (EpochReason.SIGNED, 0)
    assert (outline.last_segment.first_seq, outline.last_segment.last_seq) == (1, report.last_seq)
    assert outline.last_segment.token_count == report.segment_tokens
    erased = await driver.program.store.erase_conversation(driver.tenant_id, driver.conversation_id)
    assert erased.rows["epochs"] == 2


async def test_the_call_after_a_new_summary_has_the_reason_of_its_cache_miss(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    story = "The quick brown fox jumps over the lazy dog. " * 60
    driver = await begin(strata_server, emulated, instructions=Instructions(roles=story, procedure="", constraints=""))
    for number in range(1, 6):
        await driver.task(f"Task {number}. {story}", text_reply(f"Answer {number}."))
    await compact(driver)
    [signing] = await driver.background_calls()
    # It was requested with the current prefix of the conversation.
    assert signing.end is not None
    assert signing.end.usage.cache_read_tokens > signing.end.usage.fresh_input_tokens
    await driver.task("Task 6.", text_reply("Answer 6."))
    first = (await driver.calls())[-1]
    assert first.end is not None
    assert first.end.cache_miss_reason == "epoch_began"
    assert first.end.usage.cache_read_tokens > 0
    await driver.task("Task 7.", text_reply("Answer 7."))
    second = (await driver.calls())[-1]
    assert second.end is not None
    assert second.end.cache_miss_reason is None


STEPS = st.lists(
    st.sampled_from(["say", "ask tools", "break off", "sign", "undo", "toggle", "edit", "gemini", "claude", "fork"]),
    min_size=4,
    max_size=12,
)


@settings(max_examples=8, deadline=None)
@given(steps=STEPS)
async def test_in_any_sequence_nothing_is_refused_and_nothing_is_lost(
    strata_server: StrataServer, emulated: EmulatedProviders, steps: list[str]
) -> None:
    driver = await begin(strata_server, emulated)
    refused = {name: len(emulated[name].requests()) for name in (ANTHROPIC, GEMINI)}
    plan = Plan()
    for number, step in enumerate(["say", "say", "ask tools", "sign", *steps, "sign", "say"], start=1):
        driver = await take(driver, step, number, plan)
        await assert_nothing_is_lost(driver)
    for name, count in refused.items():
        assert_all_accepted(emulated[name].requests()[count:])
    assert_no_break(await driver.calls())
    await assert_rebuilds(driver)


@dataclass(slots=True)
class Plan:
    """The current assistant."""

    provider: str = ANTHROPIC
    signed: bool = True
    edits: int = 0


async def take(driver: ConversationDriver, step: str, number: int, plan: Plan) -> ConversationDriver:
    match step:
        case "say":
            await driver.task(f"Task {number}.", text_reply(f"Answer {number}."))
        case "ask tools":
            await driver.task(f"Task {number}.", tool_reply("Oslo", "Bergen"), text_reply(f"Answer {number}."))
        case "break off":
            await driver.fail(f"Task {number}.", text_reply("One two three four."), after_chunks=number % 5)
        case "sign":
            await compact(driver)
        case "undo":
            with suppress(CompactionNotFound):
                await driver.program.compactor.undo(driver.tenant_id, driver.conversation_id)
        case "fork":
            assert driver.ended is not None
            ended, driver = driver.ended, await driver.fork(driver.ended.turn.seq)
            driver.ended = ended
        case _:
            await change(driver, step, plan)
    return driver


async def change(driver: ConversationDriver, step: str, plan: Plan) -> None:
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
    await driver.switch(
        plan.provider,
        MODELS[0] if plan.provider == ANTHROPIC else None,
        settings={"compaction": {"policy": "off", "keep_exchanges": 1, "signed": plan.signed}},
        instructions=Instructions(roles=f"You help, in way {plan.edits}.", procedure="", constraints=""),
    )
