"""When the window runs short: the oldest history is summed up, or left out, and both can be undone."""

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
from tests.support.compaction_driver import build_calls, build_compactor, walk_far
from tests.support.conversation_driver import Walk, asks, assert_all_accepted, assert_rebuilds, tells
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed


def build(server: StrataServer, observer: Observed, *, full_share: float = 0.95, keyless: bool = False) -> Compactor:
    calls = build_calls(server.program, keyless=keyless)
    return build_compactor(server.program, observer, calls=calls, full_share=full_share)


@pytest.fixture(params=BOTH)
async def walk(
    strata_server: StrataServer, emulated: EmulatedProviders, request: pytest.FixtureRequest
) -> AsyncIterator[Walk]:
    walk = await walk_far(strata_server, emulated, request.param)
    yield walk
    assert_all_accepted(emulated[request.param].requests())


def provider_of(walk: Walk) -> str:
    return str(walk.emulated.gemini.name if walk.emulated.gemini.requests() else walk.emulated.anthropic.name)


async def history_of(walk: Walk) -> History:
    return await walk.program.store.load_history(walk.tenant_id, walk.conversation_id)


async def compact(walk: Walk, compactor: Compactor, *replies: Reply) -> CompactionReport:
    walk.emulated[provider_of(walk)].says(*replies)
    return await compactor.compact(walk.tenant_id, walk.conversation_id)


async def test_the_oldest_history_is_summed_up_and_the_call_is_kept(walk: Walk, strata_server: StrataServer) -> None:
    before = await history_of(walk)
    report = await compact(walk, build(strata_server, Observed()), tells("It was about foxes."))
    assert (report.outcome, report.reason, report.is_blocked) == (CompactionOutcome.SUMMARISED, "window", False)
    after = await history_of(walk)
    first = after.segments[0]
    assert (first.generation, first.first_seq, first.last_seq) == (1, 1, report.last_seq)
    assert first.text == f"[1-{report.last_seq}] summary\n> It was about foxes.\n"
    assert first.summarises is not None
    # What comes after it is as it was, turn for turn and byte for byte.
    kept = [segment.text for segment in before.segments[first.summarises[1] :]]
    assert [segment.text for segment in after.segments[1 : 1 + len(kept)]] == kept
    covered = [seq for segment in after.segments for seq in range(segment.first_seq, segment.last_seq + 1)]
    turns = await walk.turns()
    assert covered + [turn.seq for turn in after.source.buffered] == [turn.seq for turn in turns]

    assert before.source.epoch is not None
    epochs = (await walk.program.store.list_epochs(walk.tenant_id, walk.conversation_id)).items
    assert epochs[0].reason is EpochReason.SUMMARISED
    [call] = await walk.background_calls()
    assert call.end is not None
    assert b"foxes" in (call.end.raw_response or b"")
    assert call.end.usage.input_tokens > 0
    assert call.end.cost_usd is not None
    assert call.end.cost_usd > Decimal(0)
    [asked] = [r for r in walk.emulated[provider_of(walk)].requests() if "Write a summary" in str(r["body"])]
    assert asked["status"] == 200
    await walk.task("And on?", tells("On and on."))
    assert await assert_rebuilds(walk) == len(walk.emulated[provider_of(walk)].requests())


async def test_a_summary_gives_way_to_what_it_summed_up(walk: Walk, strata_server: StrataServer) -> None:
    compactor = build(strata_server, Observed())
    await compact(walk, compactor, tells("It was about foxes."))
    summed_up = await history_of(walk)
    undone = await compactor.undo(walk.tenant_id, walk.conversation_id)
    assert undone.first_seq == 1
    after = await history_of(walk)
    assert "about foxes" not in (after.source.static_text or "")
    assert after.source.conversation.buffer_start_seq == summed_up.source.conversation.buffer_start_seq
    assert after.segments[0].first_seq == 1
    assert all(segment.generation == 0 for segment in after.segments)
    await walk.task("And on?", tells("On and on."))


@pytest.mark.parametrize(
    "reply",
    [Reply(text=""), asks("Oslo"), None],
    ids=["nothing", "a call", "a fault"],
)
async def test_what_is_no_summary_is_tried_again_while_there_is_room(
    walk: Walk, strata_server: StrataServer, reply: Reply | None
) -> None:
    emulated, observer = walk.emulated[provider_of(walk)], Observed()
    if reply is None:
        emulated.fails(FaultKind.OVERLOADED)
    with pytest.raises(SummaryUnavailable):
        await compact(walk, build(strata_server, observer), *([] if reply is None else [reply]))
    history = await history_of(walk)
    assert history.newest_generation == 0
    emulated.lines.turns.clear()
    report = await compact(walk, build(strata_server, observer), tells("Foxes."))
    assert report.outcome is CompactionOutcome.SUMMARISED


async def test_without_a_summary_a_full_window_loses_its_oldest_history_and_says_so(
    walk: Walk, strata_server: StrataServer
) -> None:
    observer = Observed()
    walk.emulated[provider_of(walk)].fails(FaultKind.OVERLOADED)
    report = await compact(walk, build(strata_server, observer, full_share=0.0))
    assert (report.outcome, report.is_blocked) == (CompactionOutcome.OLDEST_LEFT_OUT, True)
    assert observer.blocked == {walk.conversation_id}
    after = await history_of(walk)
    assert after.segments[0].text.startswith(f"[1-{report.last_seq}] left out\n* there was no room")
    await walk.task("And on?", tells("On and on."))
    # Nothing is lost: it can be had back.
    await build(strata_server, observer).undo(walk.tenant_id, walk.conversation_id)
    assert "Task 1." in ((await history_of(walk)).source.static_text or "")


async def test_a_process_without_keys_leaves_summaries_to_others(walk: Walk, strata_server: StrataServer) -> None:
    with pytest.raises(SummaryUnavailable) as caught:
        await compact(walk, build(strata_server, Observed(), keyless=True))
    assert isinstance(caught.value.__cause__, ProviderNotConfigured)


async def test_a_summary_that_was_paid_for_is_not_asked_for_again(
    walk: Walk, strata_server: StrataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies when the summary has come and before it is put to use."""
    compactor = build(strata_server, Observed())
    # What is to be moved is moved first, so that both look at the same history.
    await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    store = walk.program.store

    async def die(*_: object, **__: object) -> None:
        raise ConnectionAbortedError

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "begin_epoch", die)
        with pytest.raises(ConnectionAbortedError):
            await compact(walk, compactor, tells("It was about foxes."))
    asked = len(walk.emulated[provider_of(walk)].requests())
    report = await compact(walk, compactor, tells("Never to be heard."))
    assert report.outcome is CompactionOutcome.SUMMARISED
    assert len(walk.emulated[provider_of(walk)].requests()) == asked
    assert "about foxes" in ((await history_of(walk)).source.static_text or "")
    walk.emulated[provider_of(walk)].lines.turns.clear()
