"""When the window is nearly full, the oldest history is summarised or left out, and both can be undone."""

from collections.abc import AsyncIterator
from decimal import Decimal

import pytest

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.epoch import EpochReason
from server.conversation.errors import ProviderNotConfigured, SummaryUnavailable
from server.conversation.store import History
from server.emulator.reply import FaultKind, Reply
from tests.conftest import StrataServer
from tests.support.compaction_driver import build_calls, build_compactor, drive_to_full_window
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    text_reply,
    tool_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed


def build(server: StrataServer, observer: Observed, *, full_share: float = 0.95, keyless: bool = False) -> Compactor:
    calls = build_calls(server.program, keyless=keyless)
    return build_compactor(server.program, observer, calls=calls, full_share=full_share)


@pytest.fixture(params=BOTH)
async def driver(
    strata_server: StrataServer, emulated: EmulatedProviders, request: pytest.FixtureRequest
) -> AsyncIterator[ConversationDriver]:
    driver = await drive_to_full_window(strata_server, emulated, request.param)
    yield driver
    assert_all_accepted(emulated[request.param].requests())


def provider_of(driver: ConversationDriver) -> str:
    return str(driver.emulated.gemini.name if driver.emulated.gemini.requests() else driver.emulated.anthropic.name)


async def history_of(driver: ConversationDriver) -> History:
    return await driver.program.store.load_history(driver.tenant_id, driver.conversation_id)


async def compact(driver: ConversationDriver, compactor: Compactor, *replies: Reply) -> CompactionReport:
    driver.emulated[provider_of(driver)].queue_replies(*replies)
    return await compactor.compact(driver.tenant_id, driver.conversation_id)


async def test_the_oldest_history_is_summarised_and_the_call_is_stored(
    driver: ConversationDriver, strata_server: StrataServer
) -> None:
    before = await history_of(driver)
    report = await compact(driver, build(strata_server, Observed()), text_reply("It was about foxes."))
    assert (report.outcome, report.reason, report.is_blocked) == (CompactionOutcome.SUMMARISED, "window", False)
    after = await history_of(driver)
    first = after.segments[0]
    assert (first.generation, first.first_seq, first.last_seq) == (1, 1, report.last_seq)
    assert first.text == f"[1-{report.last_seq}] summary\n> It was about foxes.\n"
    assert first.summarises is not None
    # What comes after it is unchanged, turn by turn and byte by byte.
    kept = [segment.text for segment in before.segments[first.summarises[1] :]]
    assert [segment.text for segment in after.segments[1 : 1 + len(kept)]] == kept
    covered = [seq for segment in after.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
    turns = await driver.turns()
    assert covered + [turn.seq for turn in after.source.buffered] == [turn.seq for turn in turns]

    assert before.source.epoch is not None
    epochs = (await driver.program.store.list_epochs(driver.tenant_id, driver.conversation_id)).items
    assert epochs[0].reason is EpochReason.SUMMARISED
    [call] = await driver.background_calls()
    assert call.end is not None
    assert b"foxes" in (call.end.raw_response or b"")
    assert call.end.usage.input_tokens > 0
    assert call.end.cost_usd is not None
    assert call.end.cost_usd > Decimal(0)
    [asked] = [r for r in driver.emulated[provider_of(driver)].requests() if "Write a summary" in str(r["body"])]
    assert asked["status"] == 200
    await driver.task("And on?", text_reply("On and on."))
    assert await assert_rebuilds(driver) == len(driver.emulated[provider_of(driver)].requests())


async def test_undoing_a_summary_restores_what_it_summarised(
    driver: ConversationDriver, strata_server: StrataServer
) -> None:
    compactor = build(strata_server, Observed())
    await compact(driver, compactor, text_reply("It was about foxes."))
    summed_up = await history_of(driver)
    undone = await compactor.undo(driver.tenant_id, driver.conversation_id)
    assert undone.first_seq == 1
    after = await history_of(driver)
    assert "about foxes" not in (after.source.static_text or "")
    assert after.source.conversation.buffer_start_seq == summed_up.source.conversation.buffer_start_seq
    assert after.segments[0].first_seq == 1
    assert all(segment.generation == 0 for segment in after.segments)
    await driver.task("And on?", text_reply("On and on."))


@pytest.mark.parametrize(
    "reply",
    [Reply(text=""), tool_reply("Oslo"), None],
    ids=["nothing", "a call", "a fault"],
)
async def test_an_invalid_summary_is_requested_again_while_there_is_room(
    driver: ConversationDriver, strata_server: StrataServer, reply: Reply | None
) -> None:
    emulated, observer = driver.emulated[provider_of(driver)], Observed()
    if reply is None:
        emulated.inject_fault(FaultKind.OVERLOADED)
    with pytest.raises(SummaryUnavailable):
        await compact(driver, build(strata_server, observer), *([] if reply is None else [reply]))
    history = await history_of(driver)
    assert history.newest_generation == 0
    emulated.lines.turns.clear()
    report = await compact(driver, build(strata_server, observer), text_reply("Foxes."))
    assert report.outcome is CompactionOutcome.SUMMARISED


async def test_without_a_summary_a_full_window_loses_its_oldest_history_with_a_warning(
    driver: ConversationDriver, strata_server: StrataServer
) -> None:
    observer = Observed()
    driver.emulated[provider_of(driver)].inject_fault(FaultKind.OVERLOADED)
    report = await compact(driver, build(strata_server, observer, full_share=0.0))
    assert (report.outcome, report.is_blocked) == (CompactionOutcome.OLDEST_LEFT_OUT, True)
    assert observer.blocked == {driver.conversation_id}
    after = await history_of(driver)
    assert after.segments[0].text.startswith(f"[1-{report.last_seq}] left out\n* there was no room")
    await driver.task("And on?", text_reply("On and on."))
    # Nothing is lost: it can be restored.
    await build(strata_server, observer).undo(driver.tenant_id, driver.conversation_id)
    assert "Task 1." in ((await history_of(driver)).source.static_text or "")


async def test_a_process_without_keys_leaves_summaries_to_others(
    driver: ConversationDriver, strata_server: StrataServer
) -> None:
    with pytest.raises(SummaryUnavailable) as caught:
        await compact(driver, build(strata_server, Observed(), keyless=True))
    assert isinstance(caught.value.__cause__, ProviderNotConfigured)


async def test_a_billed_summary_is_not_requested_again(
    driver: ConversationDriver, strata_server: StrataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies when the summary has arrived and before it is used."""
    compactor = build(strata_server, Observed())
    # What is to be moved is moved first, so that both have the same history.
    await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    store = driver.program.store

    async def die(*_: object, **__: object) -> None:
        raise ConnectionAbortedError

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "begin_epoch", die)
        with pytest.raises(ConnectionAbortedError):
            await compact(driver, compactor, text_reply("It was about foxes."))
    asked = len(driver.emulated[provider_of(driver)].requests())
    report = await compact(driver, compactor, text_reply("Never to be heard."))
    assert report.outcome is CompactionOutcome.SUMMARISED
    assert len(driver.emulated[provider_of(driver)].requests()) == asked
    assert "about foxes" in ((await history_of(driver)).source.static_text or "")
    driver.emulated[provider_of(driver)].lines.turns.clear()
