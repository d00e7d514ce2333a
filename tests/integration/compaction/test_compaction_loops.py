"""A compaction concurrent with a task: all calls of a tool loop belong to one epoch, in any order of events."""

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
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    start_driver,
    text_reply,
    tool_reply,
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


def interruptible(driver: ConversationDriver) -> tuple[Compactor, InterruptedStore]:
    store = driver.program.store
    assert isinstance(store, PostgresStore)
    interrupted = InterruptedStore(store)
    return build_compactor(driver.program, Observed(), store=interrupted), interrupted


async def epochs_of_loops(driver: ConversationDriver) -> list[list[int]]:
    """The epochs of the calls of each user task."""
    task = 0
    tasks: dict[int, int] = {}
    for turn in await driver.turns():
        task = turn.seq if isinstance(turn, UserTaskTurn) else task
        tasks[turn.seq] = task
    calls = await driver.calls()
    return [[call.start.epoch for call in loop] for _, loop in groupby(calls, key=lambda call: tasks[call.turn_seq])]


async def assert_loops_keep_their_epoch(driver: ConversationDriver) -> None:
    """Except for the epoch that begins when the provider rejects signatures."""
    rejected = {
        call.start.epoch
        for call in await driver.calls()
        if any(warning["kind"] == "signatures_rejected" for warning in call.start.warnings)
    }
    for loop in await epochs_of_loops(driver):
        assert all(one == other or other in rejected for one, other in pairwise(loop)), loop


@pytest.mark.parametrize("provider", BOTH)
async def test_a_task_between_decision_and_write_keeps_its_epoch(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=SETTINGS)
    for number in range(1, 4):
        await driver.task(f"Task {number}.", text_reply(f"Answer {number}."))
    compactor, store = interruptible(driver)
    store.first = lambda: driver.task("Task 4.", tool_reply("Oslo"))
    report = await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    assert store.first is None
    assert (report.outcome, report.reason) == (CompactionOutcome.UNCHANGED, "blocked_by_open_call")
    await driver.answer(tool_reply("Bergen"))
    await driver.answer(text_reply("Answer 4."))
    assert (await epochs_of_loops(driver))[-1] == [1, 1, 1]
    assert [withheld_by(call) for call in await driver.calls()] == [{}] * 6
    report = await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    assert report.outcome is CompactionOutcome.COMPACTED
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("provider", BOTH)
async def test_an_exchange_between_decision_and_write_does_not_prevent_a_compaction(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=SETTINGS)
    for number in range(1, 4):
        await driver.task(f"Task {number}.", text_reply(f"Answer {number}."))
    compactor, store = interruptible(driver)
    store.first = lambda: driver.task("Task 4.", tool_reply("Oslo"), text_reply("Answer 4."))
    report = await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    # It decides again: the new exchange stays, and the one that would have stayed is moved.
    assert (report.outcome, report.last_seq) == (CompactionOutcome.COMPACTED, 6)
    await driver.task("Task 5.", text_reply("Answer 5."))
    await assert_loops_keep_their_epoch(driver)
    await assert_rebuilds(driver)


async def test_a_compaction_is_not_undone_inside_a_tool_loop(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, BOTH[0], settings=SETTINGS)
    for number in range(1, 4):
        await driver.task(f"Task {number}.", text_reply(f"Answer {number}."))
    compactor, store = interruptible(driver)
    await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    store.first = lambda: driver.task("Task 4.", tool_reply("Oslo"))
    with pytest.raises(ConversationBusy):
        await compactor.undo(driver.tenant_id, driver.conversation_id)
    assert store.first is None
    await driver.answer(text_reply("Answer 4."))
    await assert_loops_keep_their_epoch(driver)
    undone = await compactor.undo(driver.tenant_id, driver.conversation_id)
    assert undone.outcome is CompactionOutcome.UNDONE


STEPS = st.sampled_from(["exchange", "task", "answer", "give_up", "compact", "undo", "edit", "reject"])


async def _take(driver: ConversationDriver, compactor: Compactor, step: str, number: int) -> None:
    is_open = driver.ended is not None and bool(driver.ended.conversation.pending_calls)
    match step:
        case "exchange" if not is_open:
            await driver.task(
                f"Task {number}.", tool_reply("Oslo"), tool_reply("Bergen"), text_reply(f"Answer {number}.")
            )
        case "task" if not is_open:
            await driver.task(f"Task {number}.", tool_reply("Oslo"))
        case "answer" if is_open:
            await driver.answer(tool_reply("Tromsø") if number % 2 else text_reply(f"Answer {number}."))
        case "give_up" if is_open:
            await driver.task(f"Task {number}.", tool_reply("Oslo"), abandons_calls=True)
        case "compact":
            await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
        case "undo":
            try:
                await compactor.undo(driver.tenant_id, driver.conversation_id)
            except (CompactionNotFound, ConversationBusy):
                return
        case "edit":
            await driver.change(args={"number": number})
        case _:
            # The state of the conversation does not allow it.
            return


@settings(max_examples=15)
@given(
    provider=st.sampled_from(BOTH),
    # Each step, and what happens between the decision and the write of a compaction.
    steps=st.lists(st.tuples(STEPS, STEPS), min_size=3, max_size=10),
)
async def test_all_calls_of_a_loop_have_one_epoch(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, steps: list[tuple[str, str]]
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=SETTINGS)
    plain = driver.program.compactor
    compactor, store = interruptible(driver)
    for number in range(1, 3):
        await driver.task(f"Task {number}.", text_reply(f"Answer {number}."))
    for number, (step, between) in enumerate(steps, start=3):
        if step in {"compact", "undo"}:
            store.first = lambda between=between, number=number: _take(driver, plain, between, 2 * number + 1)
        if step == "reject":
            emulated[provider].state.signer.replace_secret()
        await _take(driver, compactor, step, 2 * number)
        store.first = None
        await assert_loops_keep_their_epoch(driver)
    await assert_rebuilds(driver)
