"""Replays as they are kept: made whole, claimed by one at a time, told to rest, to go on and to stop."""

import asyncio
from collections import Counter
from decimal import Decimal
from uuid import uuid4

import pytest

from server.conversation.audit import OPERATOR, Action, AuditFilter
from server.conversation.block import TextBlock
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import (
    ConversationNotFound,
    CursorInvalid,
    LeaseLost,
    ReplayEnded,
    ReplayNotFound,
    ValidationFailed,
)
from server.conversation.identifiers import REPLAY, new_id
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog
from server.postgres.replay.statements import lock_replay
from server.replay.rerun.replay import (
    CallSpending,
    Candidate,
    Granted,
    ItemState,
    OpenWork,
    ReplayLimits,
    ReplayState,
    Selection,
    Stopped,
)
from server.replay.rerun.result import (
    AssertionResult,
    DivergenceKind,
    JudgeResult,
    Outcome,
    ResultFilter,
    ResultOrder,
)
from tests.support.builders import NASTY, definition
from tests.support.replay_builders import A_CALL, ReplayRig, draft, result


async def test_a_replay_has_an_item_per_conversation_and_repetition_in_their_order(rig: ReplayRig) -> None:
    ids = await rig.record(3)
    asked = draft(candidate=Candidate(model="gemini-2.5-pro", templates={"x.j2": NASTY}), limits={"repetitions": 2})
    made = await rig.replays.create_replay(rig.tenant.id, asked, ids, actor=OPERATOR)

    assert made == await rig.load(made)
    assert (made.state, made.item_count, made.item_counts[ItemState.WAITING]) == (ReplayState.RUNNING, 6, 6)
    assert made.draft.candidate == asked.candidate
    assert made.draft.selection.conversation_ids == ()
    items = (await rig.replays.list_items(rig.tenant.id, made.id)).items
    assert [(item.number, item.repetition, item.conversation_id) for item in items] == [
        (number + 1, number // 3 + 1, ids[number % 3]) for number in range(6)
    ]
    assert await rig.replays.load_item(rig.tenant.id, made.id, 4) == items[3]


async def test_items_and_replays_are_read_in_pages(rig: ReplayRig) -> None:
    ids = await rig.record(3)
    made = [await rig.begin(ids=ids) for _ in range(3)]
    first = await rig.replays.list_replays(rig.tenant.id, limit=2)
    rest = await rig.replays.list_replays(None, limit=2, cursor=first.next_cursor)
    assert [replay.id for replay in (*first.items, *rest.items)] == [replay.id for replay in reversed(made)]
    assert rest.next_cursor is None
    page = await rig.replays.list_items(None, made[0].id, limit=2, state=ItemState.WAITING)
    behind = await rig.replays.list_items(None, made[0].id, limit=2, cursor=page.next_cursor)
    assert [item.number for item in (*page.items, *behind.items)] == [1, 2, 3]
    with pytest.raises(CursorInvalid):
        await rig.replays.list_items(None, made[0].id, cursor="nonsense")


async def test_another_tenant_finds_nothing(rig: ReplayRig, key_ring: PostgresKeyRing) -> None:
    made = await rig.begin()
    claimed = await rig.claim(made)
    await rig.shadow(claimed.lease)
    other = (await key_ring.create_tenant("globex")).id
    assert (await rig.replays.list_replays(other)).items == []
    for attempt in (
        rig.replays.load_replay(other, made.id),
        rig.replays.load_item(other, made.id, 1),
        rig.replays.list_items(other, made.id),
        rig.replays.list_results(other, made.id),
        rig.replays.pause_replay(other, made.id, actor=OPERATOR),
        rig.replays.continue_replay(other, made.id, actor=OPERATOR),
        rig.replays.cancel_replay(other, made.id, actor=OPERATOR),
        rig.replays.erase_replay(other, made.id, actor=OPERATOR),
        rig.replays.load_replay("tenant_nonsense", made.id),
    ):
        with pytest.raises(ReplayNotFound):
            await attempt
    for owner, count in ((rig.tenant.id, 1), (other, 0)):
        assert len(await rig.replays.load_answers(owner, made.id, [(1, 1)])) == count
        assert len(await rig.replays.count_outcomes(owner, made.id, [1])) == count
    with pytest.raises(ConversationNotFound):
        await rig.replays.create_replay(other, draft(), [claimed.item.conversation_id], actor=OPERATOR)
    chosen = Selection(conversation_ids=(claimed.item.conversation_id,))
    with pytest.raises(ConversationNotFound):
        await rig.replays.select_conversations(other, chosen)


async def test_many_claimers_get_each_item_once_and_never_more_than_may_run(rig: ReplayRig) -> None:
    made = await rig.begin(10, parallelism=3)
    running: set[int] = set()
    done: Counter[int] = Counter()
    most = 0

    async def work(owner: str) -> None:
        nonlocal most
        while (await rig.load(made)).state is ReplayState.RUNNING:
            claimed = await rig.find(made, owner=owner)
            if claimed is None:
                continue
            assert claimed.item.number not in running
            running.add(claimed.item.number)
            most = max(most, len(running))
            await asyncio.sleep(0)
            # Before the database knows: from then on another may be claimed.
            running.discard(claimed.item.number)
            await rig.replays.end_item(claimed.lease, ItemState.DONE)
            done[claimed.item.number] += 1

    await asyncio.gather(*(work(f"worker {number}") for number in range(6)))
    assert done == Counter(range(1, 11))
    assert most <= 3
    ended = await rig.load(made)
    assert (ended.state, ended.item_counts[ItemState.DONE]) == (ReplayState.DONE, 10)
    assert ended.ended_at is not None


async def test_no_more_items_run_than_may_and_one_that_ends_makes_room(rig: ReplayRig) -> None:
    made = await rig.begin(4, parallelism=2)
    first, second = await rig.claim(made), await rig.claim(made)
    assert await rig.find(made) is None
    await rig.replays.end_item(first.lease, ItemState.DONE)
    third = await rig.claim(made)
    assert third.item.number == 3
    # Whoever died runs nothing: the slot is free, and the item comes first.
    await rig.replays.renew_lease(second.lease, lease_seconds=0)
    assert (await rig.claim(made)).item.number == second.item.number
    assert await rig.find(made) is None


async def test_an_item_whose_owner_died_is_taken_over_and_the_old_token_is_worth_nothing(rig: ReplayRig) -> None:
    made = await rig.begin(parallelism=1)
    dead = await rig.claim(made, owner="dead", lease_seconds=0)
    shadow = await rig.shadow(dead.lease)
    heir = await rig.claim(made, owner="heir")

    assert heir.item.number == dead.item.number
    assert (heir.item.replay_conversation_id, heir.result_count, heir.item.owner) == (shadow.id, 1, "heir")
    assert await rig.find(made) is None
    for attempt in (
        rig.replays.renew_lease(dead.lease, lease_seconds=60),
        rig.replays.record_result(dead.lease, result(2), []),
        rig.replays.open_replay_conversation(
            dead.lease, rig.tenant.id, definition(), ConversationDraft(assistant_id="")
        ),
        rig.reserve(dead.lease),
        rig.replays.release_item(dead.lease),
        rig.replays.end_item(dead.lease, ItemState.DONE),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    assert len((await rig.replays.list_results(None, made.id)).items) == 1
    again = await rig.replays.open_replay_conversation(
        heir.lease, rig.tenant.id, definition(), ConversationDraft(assistant_id="")
    )
    assert again.id == shadow.id
    await rig.replays.end_item(heir.lease, ItemState.DONE)
    # A repetition after a lost answer.
    await rig.replays.end_item(heir.lease, ItemState.DONE)


async def test_a_lease_that_is_renewed_is_nobody_elses(rig: ReplayRig) -> None:
    made = await rig.begin()
    claimed = await rig.claim(made, lease_seconds=0)
    await rig.replays.renew_lease(claimed.lease, lease_seconds=60)
    assert await rig.find(made) is None
    await rig.replays.release_item(claimed.lease)
    again = await rig.claim(made)
    assert (again.item.number, again.was_lost) == (claimed.item.number, False)


async def test_a_pause_lets_no_other_call_leave_and_is_ended_by_continuing(rig: ReplayRig) -> None:
    made = await rig.begin(2)
    claimed = await rig.claim(made)
    paused = await rig.replays.pause_replay(rig.tenant.id, made.id, actor=OPERATOR)
    assert paused.state is ReplayState.PAUSED
    assert await rig.replays.pause_replay(rig.tenant.id, made.id, actor=OPERATOR) == paused
    assert await rig.reserve(claimed.lease) == Stopped(state=ReplayState.PAUSED)
    assert await rig.find(made) is None
    await rig.replays.release_item(claimed.lease)
    assert await rig.replays.list_open_work() == []

    continued = await rig.replays.continue_replay(rig.tenant.id, made.id, actor=OPERATOR)
    assert (continued.state, continued.item_counts[ItemState.WAITING]) == (ReplayState.RUNNING, 2)
    assert await rig.replays.list_open_work() == [OpenWork(replay_id=made.id, slot_count=2)]
    assert (await rig.claim(made)).item.number == claimed.item.number


async def test_cancelling_ends_what_waits_now_and_what_runs_when_its_call_is_over(rig: ReplayRig) -> None:
    made = await rig.begin(4)
    alive, dead = await rig.claim(made), await rig.claim(made, lease_seconds=0)
    assert await rig.reserve(dead.lease) == Granted()
    cancelled = await rig.replays.cancel_replay(rig.tenant.id, made.id, actor=OPERATOR)
    assert cancelled.item_counts[ItemState.CANCELLED] == 3
    # What the dead one had on its way is lost.
    assert (cancelled.reserved_tokens, cancelled.spent_tokens) == (0, A_CALL.tokens)
    assert await rig.replays.cancel_replay(rig.tenant.id, made.id, actor=OPERATOR) == cancelled
    assert await rig.reserve(alive.lease) == Stopped(state=ReplayState.CANCELLED)
    # The answer that was on its way is not thrown away.
    await rig.replays.record_result(alive.lease, result(), [])
    await rig.replays.release_item(alive.lease)
    with pytest.raises(LeaseLost):
        await rig.replays.renew_lease(dead.lease, lease_seconds=1)
    ended = await rig.load(made)
    assert (ended.state, ended.item_counts[ItemState.CANCELLED]) == (ReplayState.CANCELLED, 4)
    for attempt in (rig.replays.pause_replay, rig.replays.continue_replay):
        with pytest.raises(ReplayEnded):
            await attempt(rig.tenant.id, made.id, actor=OPERATOR)


async def test_items_of_a_cancelled_replay_whose_owners_die_are_ended_by_others(rig: ReplayRig) -> None:
    made = await rig.begin(2)
    first, second = await rig.claim(made), await rig.claim(made)
    assert isinstance(await rig.reserve(first.lease), Granted)
    await rig.replays.cancel_replay(rig.tenant.id, made.id, actor=OPERATOR)
    assert await rig.replays.end_abandoned_items() == 0
    for lease in (first.lease, second.lease):
        await rig.replays.renew_lease(lease, lease_seconds=0)
    assert await rig.replays.end_abandoned_items() == 2
    ended = await rig.load(made)
    assert ended.item_counts[ItemState.CANCELLED] == 2
    assert (ended.reserved_usd, ended.reserved_tokens, ended.spent_tokens) == (Decimal(0), 0, 100)


async def test_a_failed_item_says_why_and_the_replay_is_done_all_the_same(rig: ReplayRig) -> None:
    made = await rig.begin()
    claimed = await rig.claim(made)
    await rig.replays.end_item(claimed.lease, ItemState.FAILED, error_code="provider_not_configured")
    item = await rig.replays.load_item(rig.tenant.id, made.id, 1)
    assert (item.state, item.error_code, item.owner) == (ItemState.FAILED, "provider_not_configured", None)
    assert (await rig.load(made)).state is ReplayState.DONE
    with pytest.raises(ReplayEnded):
        await rig.replays.cancel_replay(None, made.id, actor=OPERATOR)


async def test_open_work_is_where_items_wait_and_not_enough_run(rig: ReplayRig) -> None:
    made = await rig.begin(3, parallelism=2)
    full = await rig.begin(ids=[(await rig.replays.load_item(None, made.id, 1)).conversation_id], parallelism=1)
    await rig.claim(full)
    await rig.claim(made)
    assert await rig.replays.list_open_work() == [OpenWork(replay_id=made.id, slot_count=1)]
    dead = await rig.claim(made, lease_seconds=0)
    assert await rig.replays.list_open_work() == [OpenWork(replay_id=made.id, slot_count=1)]
    assert (await rig.claim(made)).item.number == dead.item.number
    assert await rig.replays.list_open_work() == []
    assert await rig.replays.claim_item(new_id(REPLAY), owner="x", lease_seconds=1) is None


async def test_a_result_is_written_once_and_read_back_whole(rig: ReplayRig) -> None:
    made = await rig.begin()
    claimed = await rig.claim(made)
    written = result(
        outcome=Outcome.DIFFERENT,
        kinds=(DivergenceKind.TEXT, DivergenceKind.STOP_REASON),
        similarity=0.25,
        severity=0.75,
        note=NASTY,
        assertions=(AssertionResult(name="short", passed=False, message=NASTY),),
        judge=JudgeResult(score=0.5, reason=NASTY),
    )
    await rig.replays.record_result(claimed.lease, written, [TextBlock(text=NASTY)])
    await rig.replays.record_result(claimed.lease, result(), [TextBlock(text="another")])

    (stored,) = (await rig.replays.list_results(rig.tenant.id, made.id)).items
    assert (stored.result, stored.number, stored.repetition) == (written, 1, 1)
    said = await rig.replays.load_answers(rig.tenant.id, made.id, [(1, 1), (1, 2)])
    assert {position: exchanged.candidate for position, exchanged in said.items()} == {(1, 1): (TextBlock(text=NASTY),)}
    assert (await rig.replays.load_item(None, made.id, 1)).diverged_at_seq == 2


async def test_a_result_does_not_wait_for_who_decides_about_the_replay(rig: ReplayRig, database: Database) -> None:
    """Whoever holds the replay may want the item next: each would wait for the other."""
    made = await rig.begin()
    claimed = await rig.claim(made)
    async with database.transaction() as connection, asyncio.timeout(20):
        await lock_replay(connection, None, made.id)
        await rig.replays.record_result(claimed.lease, result(), [])
    assert len((await rig.replays.list_results(None, made.id)).items) == 1


async def test_results_come_in_their_order_or_worst_first_and_by_what_they_are(rig: ReplayRig) -> None:
    made = await rig.begin(2)
    severities = {1: (0.0, 0.9, 0.4), 2: (0.9, 0.0, 1.0)}
    for number, worst in severities.items():
        claimed = await rig.claim(made)
        assert claimed.item.number == number
        for position, severity in enumerate(worst, start=1):
            outcome = Outcome.DIFFERENT if severity else Outcome.SAME
            kinds = (DivergenceKind.TEXT,) if severity > 0.5 else ()
            checks = (AssertionResult(name="a", passed=severity < 1),)
            written = result(position, outcome=outcome, severity=severity, kinds=kinds, assertions=checks)
            await rig.replays.record_result(claimed.lease, written, [])

    async def positions(**wanted: object) -> list[tuple[int, int]]:
        found, cursor = [], None
        while True:
            page = await rig.replays.list_results(
                None,
                made.id,
                wanted=ResultFilter(**wanted),  # type: ignore[arg-type]  # reason: as a test says it
                cursor=cursor,
                limit=2,
            )
            found += [(stored.number, stored.result.position) for stored in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return found

    assert await positions() == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    assert await positions(order=ResultOrder.WORST) == [(2, 3), (1, 2), (2, 1), (1, 3), (1, 1), (2, 2)]
    assert await positions(outcome=Outcome.SAME) == [(1, 1), (2, 2)]
    assert await positions(kind=DivergenceKind.TEXT, number=2) == [(2, 1), (2, 3)]
    assert await positions(has_failed_assertion=True, order=ResultOrder.WORST) == [(2, 3)]
    with pytest.raises(CursorInvalid):
        await rig.replays.list_results(None, made.id, cursor="MQ")


async def test_what_is_done_to_a_replay_is_told_in_the_audit_log(rig: ReplayRig, database: Database) -> None:
    made = await rig.begin()
    for step in (rig.replays.pause_replay, rig.replays.continue_replay, rig.replays.cancel_replay):
        await step(rig.tenant.id, made.id, actor=OPERATOR)
    await rig.replays.erase_replay(rig.tenant.id, made.id, actor=OPERATOR)
    entries = (await PostgresAuditLog(database).list_entries(rig.tenant.id, AuditFilter())).items
    assert [(entry.action, entry.object_id) for entry in reversed(entries)] == [
        (action, made.id)
        for action in (
            Action.CREATE_REPLAY,
            Action.PAUSE_REPLAY,
            Action.CONTINUE_REPLAY,
            Action.CANCEL_REPLAY,
            Action.ERASE_REPLAY,
        )
    ]


async def test_going_on_after_the_budget_needs_a_larger_one_and_takes_up_what_was_skipped(rig: ReplayRig) -> None:
    made = await rig.begin(3, budget_tokens=100)
    claimed = await rig.claim(made)
    reservation = uuid4()
    estimate = CallSpending(usd=None, tokens=100)
    assert await rig.reserve(claimed.lease) == Granted()
    await rig.replays.release_item(claimed.lease)
    again = await rig.claim(made)
    stopped = await rig.reserve(again.lease)
    assert stopped == Stopped(state=ReplayState.STOPPED_BY_BUDGET)
    assert (await rig.load(made)).item_counts[ItemState.SKIPPED] == 2
    await rig.replays.release_item(again.lease)
    assert (await rig.load(made)).item_counts[ItemState.SKIPPED] == 3

    with pytest.raises(ValidationFailed):
        await rig.replays.continue_replay(None, made.id, actor=OPERATOR)
    larger = ReplayLimits(budget_usd=Decimal(1), budget_tokens=400)
    continued = await rig.replays.continue_replay(None, made.id, actor=OPERATOR, limits=larger)
    assert (continued.state, continued.draft.limits, continued.ended_at) == (ReplayState.RUNNING, larger, None)
    assert continued.item_counts[ItemState.WAITING] == 3
    once_more = await rig.claim(made)
    assert isinstance(
        await rig.replays.reserve_call(once_more.lease, reservation, provider="gemini", estimate=A_CALL), Granted
    )
    await rig.replays.settle_call(once_more.lease, reservation, estimate)
    assert (await rig.load(made)).unpriced_count == 1
