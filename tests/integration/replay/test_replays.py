"""The replay store: replays are created completely, items are claimed by one process, paused, continued and
cancelled.
"""

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
from tests.support.replay_builders import A_CALL, ReplayHarness, draft, result


async def test_a_replay_has_an_item_per_conversation_and_repetition_in_their_order(harness: ReplayHarness) -> None:
    ids = await harness.record(3)
    asked = draft(candidate=Candidate(model="gemini-2.5-pro", templates={"x.j2": NASTY}), limits={"repetitions": 2})
    made = await harness.replays.create_replay(harness.tenant.id, asked, ids, actor=OPERATOR)

    assert made == await harness.load(made)
    assert (made.state, made.item_count, made.item_counts[ItemState.WAITING]) == (ReplayState.RUNNING, 6, 6)
    assert made.draft.candidate == asked.candidate
    assert made.draft.selection.conversation_ids == ()
    items = (await harness.replays.list_items(harness.tenant.id, made.id)).items
    assert [(item.number, item.repetition, item.conversation_id) for item in items] == [
        (number + 1, number // 3 + 1, ids[number % 3]) for number in range(6)
    ]
    assert await harness.replays.load_item(harness.tenant.id, made.id, 4) == items[3]


async def test_items_and_replays_are_read_in_pages(harness: ReplayHarness) -> None:
    ids = await harness.record(3)
    made = [await harness.begin(ids=ids) for _ in range(3)]
    first = await harness.replays.list_replays(harness.tenant.id, limit=2)
    rest = await harness.replays.list_replays(None, limit=2, cursor=first.next_cursor)
    assert [replay.id for replay in (*first.items, *rest.items)] == [replay.id for replay in reversed(made)]
    assert rest.next_cursor is None
    page = await harness.replays.list_items(None, made[0].id, limit=2, state=ItemState.WAITING)
    behind = await harness.replays.list_items(None, made[0].id, limit=2, cursor=page.next_cursor)
    assert [item.number for item in (*page.items, *behind.items)] == [1, 2, 3]
    with pytest.raises(CursorInvalid):
        await harness.replays.list_items(None, made[0].id, cursor="nonsense")


async def test_another_tenant_finds_nothing(harness: ReplayHarness, key_ring: PostgresKeyRing) -> None:
    made = await harness.begin()
    claimed = await harness.claim(made)
    await harness.replay_conversation(claimed.lease)
    other = (await key_ring.create_tenant("globex")).id
    assert (await harness.replays.list_replays(other)).items == []
    for attempt in (
        harness.replays.load_replay(other, made.id),
        harness.replays.load_item(other, made.id, 1),
        harness.replays.list_items(other, made.id),
        harness.replays.list_results(other, made.id),
        harness.replays.pause_replay(other, made.id, actor=OPERATOR),
        harness.replays.continue_replay(other, made.id, actor=OPERATOR),
        harness.replays.cancel_replay(other, made.id, actor=OPERATOR),
        harness.replays.erase_replay(other, made.id, actor=OPERATOR),
        harness.replays.load_replay("tenant_nonsense", made.id),
    ):
        with pytest.raises(ReplayNotFound):
            await attempt
    for owner, count in ((harness.tenant.id, 1), (other, 0)):
        assert len(await harness.replays.load_answers(owner, made.id, [(1, 1)])) == count
        assert len(await harness.replays.count_outcomes(owner, made.id, [1])) == count
    with pytest.raises(ConversationNotFound):
        await harness.replays.create_replay(other, draft(), [claimed.item.conversation_id], actor=OPERATOR)
    chosen = Selection(conversation_ids=(claimed.item.conversation_id,))
    with pytest.raises(ConversationNotFound):
        await harness.replays.select_conversations(other, chosen)


async def test_concurrent_claims_get_each_item_once_and_never_more_than_the_limit(harness: ReplayHarness) -> None:
    made = await harness.begin(10, parallelism=3)
    running: set[int] = set()
    done: Counter[int] = Counter()
    most = 0

    async def work(owner: str) -> None:
        nonlocal most
        while (await harness.load(made)).state is ReplayState.RUNNING:
            claimed = await harness.find(made, owner=owner)
            if claimed is None:
                continue
            assert claimed.item.number not in running
            running.add(claimed.item.number)
            most = max(most, len(running))
            await asyncio.sleep(0)
            # Before the database is updated: from then on another may be claimed.
            running.discard(claimed.item.number)
            await harness.replays.end_item(claimed.lease, ItemState.DONE)
            done[claimed.item.number] += 1

    await asyncio.gather(*(work(f"worker {number}") for number in range(6)))
    assert done == Counter(range(1, 11))
    assert most <= 3
    ended = await harness.load(made)
    assert (ended.state, ended.item_counts[ItemState.DONE]) == (ReplayState.DONE, 10)
    assert ended.ended_at is not None


async def test_no_more_items_run_than_the_limit_and_an_ended_one_frees_a_place(harness: ReplayHarness) -> None:
    made = await harness.begin(4, parallelism=2)
    first, second = await harness.claim(made), await harness.claim(made)
    assert await harness.find(made) is None
    await harness.replays.end_item(first.lease, ItemState.DONE)
    third = await harness.claim(made)
    assert third.item.number == 3
    # A dead process runs no item: its slot is free, and its item is the next.
    await harness.replays.renew_lease(second.lease, lease_seconds=0)
    assert (await harness.claim(made)).item.number == second.item.number
    assert await harness.find(made) is None


async def test_an_item_whose_owner_died_is_taken_over_and_the_old_token_is_invalid(
    harness: ReplayHarness,
) -> None:
    made = await harness.begin(parallelism=1)
    dead = await harness.claim(made, owner="dead", lease_seconds=0)
    replay_conversation = await harness.replay_conversation(dead.lease)
    heir = await harness.claim(made, owner="heir")

    assert heir.item.number == dead.item.number
    assert (heir.item.replay_conversation_id, heir.result_count, heir.item.owner) == (replay_conversation.id, 1, "heir")
    assert await harness.find(made) is None
    for attempt in (
        harness.replays.renew_lease(dead.lease, lease_seconds=60),
        harness.replays.record_result(dead.lease, result(2), []),
        harness.replays.open_replay_conversation(
            dead.lease, harness.tenant.id, definition(), ConversationDraft(assistant_id="")
        ),
        harness.reserve(dead.lease),
        harness.replays.release_item(dead.lease),
        harness.replays.end_item(dead.lease, ItemState.DONE),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    assert len((await harness.replays.list_results(None, made.id)).items) == 1
    again = await harness.replays.open_replay_conversation(
        heir.lease, harness.tenant.id, definition(), ConversationDraft(assistant_id="")
    )
    assert again.id == replay_conversation.id
    await harness.replays.end_item(heir.lease, ItemState.DONE)
    # A repetition after a lost answer.
    await harness.replays.end_item(heir.lease, ItemState.DONE)


async def test_a_renewed_lease_is_not_taken_over(harness: ReplayHarness) -> None:
    made = await harness.begin()
    claimed = await harness.claim(made, lease_seconds=0)
    await harness.replays.renew_lease(claimed.lease, lease_seconds=60)
    assert await harness.find(made) is None
    await harness.replays.release_item(claimed.lease)
    again = await harness.claim(made)
    assert (again.item.number, again.was_lost) == (claimed.item.number, False)


async def test_a_pause_allows_no_further_call_until_it_is_continued(harness: ReplayHarness) -> None:
    made = await harness.begin(2)
    claimed = await harness.claim(made)
    paused = await harness.replays.pause_replay(harness.tenant.id, made.id, actor=OPERATOR)
    assert paused.state is ReplayState.PAUSED
    assert await harness.replays.pause_replay(harness.tenant.id, made.id, actor=OPERATOR) == paused
    assert await harness.reserve(claimed.lease) == Stopped(state=ReplayState.PAUSED)
    assert await harness.find(made) is None
    await harness.replays.release_item(claimed.lease)
    assert await harness.replays.list_open_work() == []

    continued = await harness.replays.continue_replay(harness.tenant.id, made.id, actor=OPERATOR)
    assert (continued.state, continued.item_counts[ItemState.WAITING]) == (ReplayState.RUNNING, 2)
    assert await harness.replays.list_open_work() == [OpenWork(replay_id=made.id, slot_count=2)]
    assert (await harness.claim(made)).item.number == claimed.item.number


async def test_cancelling_ends_waiting_items_now_and_running_ones_after_their_call(harness: ReplayHarness) -> None:
    made = await harness.begin(4)
    alive, dead = await harness.claim(made), await harness.claim(made, lease_seconds=0)
    assert await harness.reserve(dead.lease) == Granted()
    cancelled = await harness.replays.cancel_replay(harness.tenant.id, made.id, actor=OPERATOR)
    assert cancelled.item_counts[ItemState.CANCELLED] == 3
    # The running call of the dead process is lost.
    assert (cancelled.reserved_tokens, cancelled.spent_tokens) == (0, A_CALL.tokens)
    assert await harness.replays.cancel_replay(harness.tenant.id, made.id, actor=OPERATOR) == cancelled
    assert await harness.reserve(alive.lease) == Stopped(state=ReplayState.CANCELLED)
    # The answer of the running call is not discarded.
    await harness.replays.record_result(alive.lease, result(), [])
    await harness.replays.release_item(alive.lease)
    with pytest.raises(LeaseLost):
        await harness.replays.renew_lease(dead.lease, lease_seconds=1)
    ended = await harness.load(made)
    assert (ended.state, ended.item_counts[ItemState.CANCELLED]) == (ReplayState.CANCELLED, 4)
    for attempt in (harness.replays.pause_replay, harness.replays.continue_replay):
        with pytest.raises(ReplayEnded):
            await attempt(harness.tenant.id, made.id, actor=OPERATOR)


async def test_items_of_a_cancelled_replay_whose_owners_die_are_ended_by_others(harness: ReplayHarness) -> None:
    made = await harness.begin(2)
    first, second = await harness.claim(made), await harness.claim(made)
    assert isinstance(await harness.reserve(first.lease), Granted)
    await harness.replays.cancel_replay(harness.tenant.id, made.id, actor=OPERATOR)
    assert await harness.replays.end_abandoned_items() == 0
    for lease in (first.lease, second.lease):
        await harness.replays.renew_lease(lease, lease_seconds=0)
    assert await harness.replays.end_abandoned_items() == 2
    ended = await harness.load(made)
    assert ended.item_counts[ItemState.CANCELLED] == 2
    assert (ended.reserved_usd, ended.reserved_tokens, ended.spent_tokens) == (Decimal(0), 0, 100)


async def test_a_failed_item_has_its_reason_and_the_replay_is_still_done(harness: ReplayHarness) -> None:
    made = await harness.begin()
    claimed = await harness.claim(made)
    await harness.replays.end_item(claimed.lease, ItemState.FAILED, error_code="provider_not_configured")
    item = await harness.replays.load_item(harness.tenant.id, made.id, 1)
    assert (item.state, item.error_code, item.owner) == (ItemState.FAILED, "provider_not_configured", None)
    assert (await harness.load(made)).state is ReplayState.DONE
    with pytest.raises(ReplayEnded):
        await harness.replays.cancel_replay(None, made.id, actor=OPERATOR)


async def test_replays_with_waiting_items_and_free_places_are_open_work(harness: ReplayHarness) -> None:
    made = await harness.begin(3, parallelism=2)
    full = await harness.begin(ids=[(await harness.replays.load_item(None, made.id, 1)).conversation_id], parallelism=1)
    await harness.claim(full)
    await harness.claim(made)
    assert await harness.replays.list_open_work() == [OpenWork(replay_id=made.id, slot_count=1)]
    dead = await harness.claim(made, lease_seconds=0)
    assert await harness.replays.list_open_work() == [OpenWork(replay_id=made.id, slot_count=1)]
    assert (await harness.claim(made)).item.number == dead.item.number
    assert await harness.replays.list_open_work() == []
    assert await harness.replays.claim_item(new_id(REPLAY), owner="x", lease_seconds=1) is None


async def test_a_result_is_written_once_and_read_back_whole(harness: ReplayHarness) -> None:
    made = await harness.begin()
    claimed = await harness.claim(made)
    written = result(
        outcome=Outcome.DIFFERENT,
        kinds=(DivergenceKind.TEXT, DivergenceKind.STOP_REASON),
        similarity=0.25,
        severity=0.75,
        note=NASTY,
        assertions=(AssertionResult(name="short", passed=False, message=NASTY),),
        judge=JudgeResult(score=0.5, reason=NASTY),
    )
    await harness.replays.record_result(claimed.lease, written, [TextBlock(text=NASTY)])
    await harness.replays.record_result(claimed.lease, result(), [TextBlock(text="another")])

    (stored,) = (await harness.replays.list_results(harness.tenant.id, made.id)).items
    assert (stored.result, stored.number, stored.repetition) == (written, 1, 1)
    answers = await harness.replays.load_answers(harness.tenant.id, made.id, [(1, 1), (1, 2)])
    assert {position: exchanged.candidate for position, exchanged in answers.items()} == {
        (1, 1): (TextBlock(text=NASTY),)
    }
    assert (await harness.replays.load_item(None, made.id, 1)).diverged_at_seq == 2


async def test_storing_a_result_does_not_wait_for_a_lock_on_the_replay(
    harness: ReplayHarness, database: Database
) -> None:
    """A process that locks the replay may lock the item next: each would wait for the other."""
    made = await harness.begin()
    claimed = await harness.claim(made)
    async with database.transaction() as connection, asyncio.timeout(20):
        await lock_replay(connection, None, made.id)
        await harness.replays.record_result(claimed.lease, result(), [])
    assert len((await harness.replays.list_results(None, made.id)).items) == 1


async def test_results_are_sorted_by_position_or_worst_first_and_filtered(harness: ReplayHarness) -> None:
    made = await harness.begin(2)
    severities = {1: (0.0, 0.9, 0.4), 2: (0.9, 0.0, 1.0)}
    for number, worst in severities.items():
        claimed = await harness.claim(made)
        assert claimed.item.number == number
        for position, severity in enumerate(worst, start=1):
            outcome = Outcome.DIFFERENT if severity else Outcome.SAME
            kinds = (DivergenceKind.TEXT,) if severity > 0.5 else ()
            checks = (AssertionResult(name="a", passed=severity < 1),)
            written = result(position, outcome=outcome, severity=severity, kinds=kinds, assertions=checks)
            await harness.replays.record_result(claimed.lease, written, [])

    async def positions(**wanted: object) -> list[tuple[int, int]]:
        found, cursor = [], None
        while True:
            page = await harness.replays.list_results(
                None,
                made.id,
                wanted=ResultFilter(**wanted),  # type: ignore[arg-type]  # reason: the fields of an example
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
        await harness.replays.list_results(None, made.id, cursor="MQ")


async def test_actions_on_a_replay_are_recorded_in_the_audit_log(harness: ReplayHarness, database: Database) -> None:
    made = await harness.begin()
    for step in (harness.replays.pause_replay, harness.replays.continue_replay, harness.replays.cancel_replay):
        await step(harness.tenant.id, made.id, actor=OPERATOR)
    await harness.replays.erase_replay(harness.tenant.id, made.id, actor=OPERATOR)
    entries = (await PostgresAuditLog(database).list_entries(harness.tenant.id, AuditFilter())).items
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


async def test_continuing_after_the_budget_needs_a_larger_one_and_includes_skipped_items(
    harness: ReplayHarness,
) -> None:
    made = await harness.begin(3, budget_tokens=100)
    claimed = await harness.claim(made)
    reservation = uuid4()
    estimate = CallSpending(usd=None, tokens=100)
    assert await harness.reserve(claimed.lease) == Granted()
    await harness.replays.release_item(claimed.lease)
    again = await harness.claim(made)
    stopped = await harness.reserve(again.lease)
    assert stopped == Stopped(state=ReplayState.STOPPED_BY_BUDGET)
    assert (await harness.load(made)).item_counts[ItemState.SKIPPED] == 2
    await harness.replays.release_item(again.lease)
    assert (await harness.load(made)).item_counts[ItemState.SKIPPED] == 3

    with pytest.raises(ValidationFailed):
        await harness.replays.continue_replay(None, made.id, actor=OPERATOR)
    larger = ReplayLimits(budget_usd=Decimal(1), budget_tokens=400)
    continued = await harness.replays.continue_replay(None, made.id, actor=OPERATOR, limits=larger)
    assert (continued.state, continued.draft.limits, continued.ended_at) == (ReplayState.RUNNING, larger, None)
    assert continued.item_counts[ItemState.WAITING] == 3
    once_more = await harness.claim(made)
    assert isinstance(
        await harness.replays.reserve_call(once_more.lease, reservation, provider="gemini", estimate=A_CALL), Granted
    )
    await harness.replays.settle_call(once_more.lease, reservation, estimate)
    assert (await harness.load(made)).unpriced_count == 1
