"""A compaction that meets a task: all calls of a tool loop belong to one epoch, whichever of the two comes first."""

from collections.abc import Awaitable, Callable
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome
from server.conversation.errors import CompactionNotFound, ConversationBusy
from server.conversation.turn import UserTaskTurn
from server.postgres.store import PostgresStore
from tests.conftest import StrataServer
from tests.support.compaction_driver import build_compactor
from tests.support.conversation_driver import (
    Walk,
    asks,
    assert_all_accepted,
    assert_rebuilds,
    begin_walk,
    tells,
    withheld_by,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed

SETTINGS = {"compaction": {"policy": "off", "keep_exchanges": 1}}


class InterruptedStore(PostgresStore):
    """Runs something else between the compactor's decision and its write, once."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store._database)  # noqa: SLF001  reason: the same database
        self.first: Callable[[], Awaitable[object]] | None = None

    async def begin_epoch(self, *args: Any, **more: Any) -> None:
        first, self.first = self.first, None
        if first is not None:
            await first()
        await super().begin_epoch(*args, **more)


def interruptible(walk: Walk) -> tuple[Compactor, InterruptedStore]:
    store = walk.program.store
    assert isinstance(store, PostgresStore)
    interrupted = InterruptedStore(store)
    return build_compactor(walk.program, Observed(), store=interrupted), interrupted


async def epochs_of_loops(walk: Walk) -> list[list[int]]:
    """For each user task the epochs of its calls."""
    task = 0
    tasks: dict[int, int] = {}
    for turn in await walk.turns():
        task = turn.seq if isinstance(turn, UserTaskTurn) else task
        tasks[turn.seq] = task
    calls = await walk.calls()
    return [[call.start.epoch for call in loop] for _, loop in groupby(calls, key=lambda call: tasks[call.turn_seq])]


async def assert_loops_keep_their_epoch(walk: Walk) -> None:
    """But for the epoch that begins when the provider rejects signatures."""
    rejected = {
        call.start.epoch
        for call in await walk.calls()
        if any(warning["kind"] == "signatures_rejected" for warning in call.start.warnings)
    }
    for loop in await epochs_of_loops(walk):
        assert all(one == other or other in rejected for one, other in pairwise(loop)), loop


@pytest.mark.parametrize("provider", BOTH)
async def test_a_task_that_comes_between_decision_and_write_keeps_its_epoch(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=SETTINGS)
    for number in range(1, 4):
        await walk.task(f"Task {number}.", tells(f"Answer {number}."))
    compactor, store = interruptible(walk)
    store.first = lambda: walk.task("Task 4.", asks("Oslo"))
    report = await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    assert store.first is None
    assert (report.outcome, report.reason) == (CompactionOutcome.UNCHANGED, "blocked_by_open_call")
    await walk.answer(asks("Bergen"))
    await walk.answer(tells("Answer 4."))
    assert (await epochs_of_loops(walk))[-1] == [1, 1, 1]
    assert [withheld_by(call) for call in await walk.calls()] == [{}] * 6
    report = await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    assert report.outcome is CompactionOutcome.COMPACTED
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(walk)


@pytest.mark.parametrize("provider", BOTH)
async def test_a_whole_exchange_between_decision_and_write_does_not_stop_a_compaction(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=SETTINGS)
    for number in range(1, 4):
        await walk.task(f"Task {number}.", tells(f"Answer {number}."))
    compactor, store = interruptible(walk)
    store.first = lambda: walk.task("Task 4.", asks("Oslo"), tells("Answer 4."))
    report = await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    # It decides again: the exchange that has come stays, and the one that would have stayed goes.
    assert (report.outcome, report.last_seq) == (CompactionOutcome.COMPACTED, 6)
    await walk.task("Task 5.", tells("Answer 5."))
    await assert_loops_keep_their_epoch(walk)
    await assert_rebuilds(walk)


async def test_a_compaction_is_not_undone_inside_a_tool_loop(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, BOTH[0], settings=SETTINGS)
    for number in range(1, 4):
        await walk.task(f"Task {number}.", tells(f"Answer {number}."))
    compactor, store = interruptible(walk)
    await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    store.first = lambda: walk.task("Task 4.", asks("Oslo"))
    with pytest.raises(ConversationBusy):
        await compactor.undo(walk.tenant_id, walk.conversation_id)
    assert store.first is None
    await walk.answer(tells("Answer 4."))
    await assert_loops_keep_their_epoch(walk)
    undone = await compactor.undo(walk.tenant_id, walk.conversation_id)
    assert undone.outcome is CompactionOutcome.UNDONE


STEPS = st.sampled_from(["exchange", "task", "answer", "give_up", "compact", "undo", "edit", "reject"])


async def _take(walk: Walk, compactor: Compactor, step: str, number: int) -> None:
    is_open = walk.ended is not None and bool(walk.ended.conversation.pending_calls)
    match step:
        case "exchange" if not is_open:
            await walk.task(f"Task {number}.", asks("Oslo"), asks("Bergen"), tells(f"Answer {number}."))
        case "task" if not is_open:
            await walk.task(f"Task {number}.", asks("Oslo"))
        case "answer" if is_open:
            await walk.answer(asks("Tromsø") if number % 2 else tells(f"Answer {number}."))
        case "give_up" if is_open:
            await walk.task(f"Task {number}.", asks("Oslo"), abandons_calls=True)
        case "compact":
            await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
        case "undo":
            try:
                await compactor.undo(walk.tenant_id, walk.conversation_id)
            except (CompactionNotFound, ConversationBusy):
                return
        case "edit":
            await walk.change(args={"number": number})
        case _:
            # The conversation is not in a state for it.
            return


@settings(max_examples=15)
@given(
    provider=st.sampled_from(BOTH),
    # Each step, and what comes between the decision and the write of a compaction.
    steps=st.lists(st.tuples(STEPS, STEPS), min_size=3, max_size=10),
)
async def test_all_calls_of_a_loop_have_one_epoch(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, steps: list[tuple[str, str]]
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=SETTINGS)
    plain = walk.program.compactor
    compactor, store = interruptible(walk)
    for number in range(1, 3):
        await walk.task(f"Task {number}.", tells(f"Answer {number}."))
    for number, (step, between) in enumerate(steps, start=3):
        if step in {"compact", "undo"}:
            store.first = lambda between=between, number=number: _take(walk, plain, between, 2 * number + 1)
        if step == "reject":
            emulated[provider].state.signer.replace_secret()
        await _take(walk, compactor, step, 2 * number)
        store.first = None
        await assert_loops_keep_their_epoch(walk)
    await assert_rebuilds(walk)
