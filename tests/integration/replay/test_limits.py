"""The limits of a replay hold over all its workers, in any order of events, also if workers die."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.audit import OPERATOR
from server.conversation.errors import LeaseLost, PriceUnknown
from server.replay.rerun.replay import (
    CallEstimate,
    CallPermission,
    CallSpending,
    ClaimedItem,
    Granted,
    ItemLease,
    ItemState,
    Replay,
    ReplayLimits,
    ReplayState,
    Stopped,
    Wait,
)
from tests.support.replay_builders import A_CALL, ReplayHarness

FREE = CallSpending(usd=Decimal(0), tokens=0)


async def next_call_at(harness: ReplayHarness) -> datetime:
    """When the only replay allows its next call, by the clock of the database."""
    async with harness.database.connection() as connection:
        at = await connection.fetchval("SELECT coalesce(next_call_at, clock_timestamp()) FROM replays")
    assert isinstance(at, datetime)
    return at


async def test_a_call_reserves_its_estimate_and_counts_with_its_real_cost(harness: ReplayHarness) -> None:
    made = await harness.begin(budget_usd=Decimal(1), budget_tokens=1000)
    claimed = await harness.claim(made)
    reservation = uuid4()
    for _ in range(2):
        permission = await harness.replays.reserve_call(claimed.lease, reservation, provider="gemini", estimate=A_CALL)
        assert permission == Granted()
    held = await harness.load(made)
    assert (held.reserved_usd, held.reserved_tokens, held.spent_tokens) == (Decimal("0.10"), 100, 0)
    for _ in range(2):
        spending = CallSpending(usd=Decimal("0.07"), tokens=70)
        await harness.replays.settle_call(claimed.lease, reservation, spending)
    settled = await harness.load(made)
    assert (settled.reserved_usd, settled.spent_usd, settled.spent_tokens) == (Decimal(0), Decimal("0.07"), 70)
    item = await harness.replays.load_item(None, made.id, 1)
    assert (item.spent_usd, item.spent_tokens, item.lost_count) == (Decimal("0.07"), 70, 0)


async def test_a_call_whose_process_died_counts_with_its_estimate(harness: ReplayHarness) -> None:
    made = await harness.begin()
    dead = await harness.claim(made, lease_seconds=0)
    reservation = uuid4()
    await harness.replays.reserve_call(dead.lease, reservation, provider="gemini", estimate=A_CALL)
    heir = await harness.claim(made)
    assert (heir.was_lost, heir.item.lost_count) == (True, 1)
    await harness.replays.settle_call(dead.lease, reservation, CallSpending(usd=Decimal(5), tokens=5))
    lost = await harness.load(made)
    assert (lost.reserved_usd, lost.spent_usd, lost.spent_tokens) == (Decimal(0), A_CALL.usd, A_CALL.tokens)


async def test_calls_that_may_turn_out_cheaper_are_waited_for(harness: ReplayHarness) -> None:
    made = await harness.begin(2, budget_tokens=150)
    first, second = await harness.claim(made), await harness.claim(made)
    reservation = uuid4()
    await harness.replays.reserve_call(first.lease, reservation, provider="gemini", estimate=A_CALL)
    assert isinstance(await harness.reserve(second.lease), Wait)
    await harness.replays.settle_call(first.lease, reservation, CallSpending(usd=None, tokens=50))
    assert await harness.reserve(second.lease) == Granted()
    await harness.replays.end_item(second.lease, ItemState.DONE)
    # An unsettled call counts with its estimate when its item ends.
    assert await harness.reserve(first.lease) == Stopped(state=ReplayState.STOPPED_BY_BUDGET)


async def test_the_reservation_of_a_dead_process_is_not_waited_for(harness: ReplayHarness) -> None:
    """No process may be left to claim its item: all others wait."""
    made = await harness.begin(3, budget_tokens=250)
    first, dead = await harness.claim(made), await harness.claim(made)
    assert await harness.reserve(dead.lease) == Granted()
    reservation = uuid4()
    await harness.replays.reserve_call(first.lease, reservation, provider="gemini", estimate=A_CALL)
    second = await harness.claim(made)
    assert isinstance(await harness.reserve(second.lease), Wait)
    await harness.replays.renew_lease(dead.lease, lease_seconds=0)
    assert isinstance(await harness.reserve(second.lease), Wait)
    now = await harness.load(made)
    assert (now.spent_tokens, now.reserved_tokens) == (100, 100)
    await harness.replays.settle_call(first.lease, reservation, CallSpending(usd=None, tokens=60))
    assert await harness.reserve(second.lease) == Stopped(state=ReplayState.STOPPED_BY_BUDGET)


async def test_a_budget_in_money_needs_a_price(harness: ReplayHarness) -> None:
    made = await harness.begin(budget_usd=Decimal(1))
    claimed = await harness.claim(made)
    with pytest.raises(PriceUnknown):
        await harness.reserve(claimed.lease, CallEstimate(usd=None, tokens=1))
    assert (await harness.load(made)).state is ReplayState.RUNNING


async def test_a_delay_of_a_provider_applies_to_all_replays(harness: ReplayHarness) -> None:
    ids = await harness.record()
    leases = [(await harness.claim(await harness.begin(ids=ids))).lease for _ in range(2)]
    await harness.replays.pause_provider("gemini", 30)
    await harness.replays.pause_provider("gemini", 1)
    for lease in leases:
        permission = await harness.reserve(lease)
        assert isinstance(permission, Wait)
        assert 20 < permission.seconds <= 30
        assert await harness.reserve(lease, provider="anthropic") == Granted()


async def test_calls_are_spaced_by_their_share_of_a_minute(harness: ReplayHarness) -> None:
    made = await harness.begin(4, parallelism=4, calls_per_minute=600)
    leases = [(await harness.claim(made)).lease for _ in range(4)]
    began_at = await next_call_at(harness)
    moments: set[datetime] = set()

    async def call(lease: ItemLease) -> None:
        for _ in range(3):
            reservation = uuid4()
            while True:
                permission = await harness.replays.reserve_call(
                    lease, reservation, provider="gemini", estimate=CallEstimate(usd=None, tokens=1)
                )
                if isinstance(permission, Granted):
                    break
                assert isinstance(permission, Wait)
                # No process waits longer than until the next call is allowed.
                assert 0 < permission.seconds <= 0.1
                await asyncio.sleep(permission.seconds)
            moments.add(await next_call_at(harness))
            await harness.replays.settle_call(lease, reservation, FREE)

    await asyncio.gather(*(call(lease) for lease in leases))
    # A process may read the time after a later call, but each of these times is the share after some call.
    share, ordered = timedelta(seconds=0.1), sorted(moments)
    assert all(later - earlier >= share for earlier, later in pairwise(ordered))
    assert ordered[-1] - began_at >= 12 * share


async def test_new_limits_do_not_allow_the_next_call_early(harness: ReplayHarness) -> None:
    made = await harness.begin(calls_per_minute=1)
    claimed = await harness.claim(made)
    assert await harness.reserve(claimed.lease) == Granted()
    for calls_per_minute, least in ((1, 50), (2, 20), (4, 5)):
        limits = ReplayLimits(calls_per_minute=calls_per_minute)
        await harness.replays.continue_replay(None, made.id, actor=OPERATOR, limits=limits)
        permission = await harness.reserve(claimed.lease)
        assert isinstance(permission, Wait)
        assert least < permission.seconds <= 60 / calls_per_minute
    await harness.replays.continue_replay(None, made.id, actor=OPERATOR, limits=ReplayLimits())
    assert await harness.reserve(claimed.lease) == Granted()


async def test_the_budget_holds_under_concurrency(harness: ReplayHarness) -> None:
    made = await harness.begin(6, parallelism=6, budget_usd=Decimal("1.05"), budget_tokens=100_000)
    highest = Decimal(0)

    async def work(owner: str) -> None:
        nonlocal highest
        claimed = await harness.claim(made, owner=owner)
        while True:
            reservation = uuid4()
            permission = await harness.replays.reserve_call(
                claimed.lease, reservation, provider="gemini", estimate=A_CALL
            )
            now = await harness.load(made)
            highest = max(highest, now.spent_usd + now.reserved_usd)
            if isinstance(permission, Stopped):
                await harness.replays.release_item(claimed.lease)
                return
            if isinstance(permission, Wait):
                # Others will settle; there is no need to wait as long as a provider would take.
                await asyncio.sleep(0)
                continue
            await harness.replays.settle_call(claimed.lease, reservation, CallSpending(usd=Decimal("0.09"), tokens=90))

    await asyncio.gather(*(work(f"worker {number}") for number in range(6)))
    ended = await harness.load(made)
    assert highest <= Decimal("1.05")
    # It was spent as far as possible: one more call might have exceeded it.
    assert Decimal("0.95") < ended.spent_usd <= Decimal("1.05")
    assert (ended.state, ended.reserved_usd) == (ReplayState.STOPPED_BY_BUDGET, Decimal(0))
    assert ended.item_counts[ItemState.SKIPPED] == 6


class Model:
    """The expected sums."""

    def __init__(self) -> None:
        self.claimed: list[ClaimedItem] = []
        self.dead: set[int] = set()
        self.open: dict[int, tuple[UUID, CallEstimate]] = {}
        self.spent = 0

    def lose(self, number: int) -> None:
        if number in self.open:
            self.spent += self.open.pop(number)[1].tokens

    def make_room(self, number: int, tokens: int) -> None:
        """Reservations of dead processes end if they block others."""
        self.lose(number)
        if self.spent + sum(estimate.tokens for _, estimate in self.open.values()) + tokens > 100:
            for dead in self.dead:
                self.lose(dead)

    def stop(self) -> None:
        """The budget is spent: items that no process runs are ended."""
        for number in self.dead:
            self.lose(number)
        self.claimed = [held for held in self.claimed if held.item.number not in self.dead]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["claim", "claim", "reserve", "reserve", "settle", "die", "release", "end", "erase", "pause", "continue"]
        ),
        st.integers(0, 3),
        st.integers(0, 60),
    ),
    min_size=10,
    max_size=25,
)


@settings(max_examples=15)
@given(steps=STEPS)
async def test_the_sums_are_right_after_every_step_in_any_order(
    harness: ReplayHarness, steps: list[tuple[str, int, int]]
) -> None:
    ids = await harness.record(4)
    made = await harness.begin(ids=ids, parallelism=4, budget_tokens=100)
    model = Model()
    for step, choice, tokens in steps:
        await take_step(harness, made, model, step, choice, tokens)
        now = await harness.load(made)
        reserved = sum(estimate.tokens for _, estimate in model.open.values())
        assert (now.spent_tokens, now.reserved_tokens) == (model.spent, reserved), step
        assert now.spent_tokens + now.reserved_tokens <= 100
        assert sum(now.item_counts.values()) <= now.item_count


async def take_step(harness: ReplayHarness, made: Replay, model: Model, step: str, choice: int, tokens: int) -> None:
    state = (await harness.load(made)).state
    if step == "claim":
        claimed = await harness.find(made)
        if claimed is not None:
            assert state is ReplayState.RUNNING
            model.lose(claimed.item.number)
            model.claimed = [held for held in model.claimed if held.item.number != claimed.item.number]
            model.claimed.append(claimed)
            model.dead.discard(claimed.item.number)
        return
    if step in {"pause", "continue"}:
        if state in {ReplayState.RUNNING, ReplayState.PAUSED}:
            change = harness.replays.pause_replay if step == "pause" else harness.replays.continue_replay
            if step == "pause" or model.spent < 100:
                await change(None, made.id, actor=OPERATOR)
        return
    if model.claimed:
        held = model.claimed[choice % len(model.claimed)]
        if step == "reserve" and state is ReplayState.RUNNING:
            model.make_room(held.item.number, tokens)
        await take_item_step(harness, model, held, step, tokens)
        if state is ReplayState.RUNNING and (await harness.load(made)).state is ReplayState.STOPPED_BY_BUDGET:
            model.stop()


async def take_item_step(harness: ReplayHarness, model: Model, held: ClaimedItem, step: str, tokens: int) -> None:
    number, lease = held.item.number, held.lease
    if step == "reserve":
        reservation, estimate = uuid4(), CallEstimate(usd=None, tokens=tokens)
        model.lose(number)
        permission: CallPermission = await harness.replays.reserve_call(
            lease, reservation, provider="gemini", estimate=estimate
        )
        if isinstance(permission, Granted):
            model.open[number] = (reservation, estimate)
    elif step == "settle" and number in model.open:
        reservation, estimate = model.open.pop(number)
        came_to = min(tokens, estimate.tokens)
        await harness.replays.settle_call(lease, reservation, CallSpending(usd=None, tokens=came_to))
        model.spent += came_to
    elif step == "die":
        await harness.replays.renew_lease(lease, lease_seconds=0)
        model.dead.add(number)
    elif step in {"release", "end", "erase"}:
        model.lose(number)
        model.claimed.remove(held)
        if step == "release":
            await harness.replays.release_item(lease)
        elif step == "end":
            await harness.replays.end_item(lease, ItemState.DONE)
        else:
            await harness.store.erase_conversation(harness.tenant.id, held.item.conversation_id)
            with pytest.raises(LeaseLost):
                await harness.reserve(lease)
