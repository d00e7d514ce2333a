"""The limits of a replay hold over everybody who works on it, whatever the order, and whoever dies."""

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
from tests.support.replay_builders import A_CALL, ReplayRig

FREE = CallSpending(usd=Decimal(0), tokens=0)


async def next_call_at(rig: ReplayRig) -> datetime:
    """When the only replay lets the next call go, by the database's clock."""
    async with rig.database.connection() as connection:
        at = await connection.fetchval("SELECT coalesce(next_call_at, clock_timestamp()) FROM replays")
    assert isinstance(at, datetime)
    return at


async def test_a_call_is_set_aside_by_its_estimate_and_counts_as_what_it_came_to(rig: ReplayRig) -> None:
    made = await rig.begin(budget_usd=Decimal(1), budget_tokens=1000)
    claimed = await rig.claim(made)
    reservation = uuid4()
    for _ in range(2):
        permission = await rig.replays.reserve_call(claimed.lease, reservation, provider="gemini", estimate=A_CALL)
        assert permission == Granted()
    held = await rig.load(made)
    assert (held.reserved_usd, held.reserved_tokens, held.spent_tokens) == (Decimal("0.10"), 100, 0)
    for _ in range(2):
        spending = CallSpending(usd=Decimal("0.07"), tokens=70)
        await rig.replays.settle_call(claimed.lease, reservation, spending)
    settled = await rig.load(made)
    assert (settled.reserved_usd, settled.spent_usd, settled.spent_tokens) == (Decimal(0), Decimal("0.07"), 70)
    item = await rig.replays.load_item(None, made.id, 1)
    assert (item.spent_usd, item.spent_tokens, item.lost_count) == (Decimal("0.07"), 70, 0)


async def test_a_call_whose_process_died_counts_by_its_estimate_whatever_it_says_later(rig: ReplayRig) -> None:
    made = await rig.begin()
    dead = await rig.claim(made, lease_seconds=0)
    reservation = uuid4()
    await rig.replays.reserve_call(dead.lease, reservation, provider="gemini", estimate=A_CALL)
    heir = await rig.claim(made)
    assert (heir.was_lost, heir.item.lost_count) == (True, 1)
    await rig.replays.settle_call(dead.lease, reservation, CallSpending(usd=Decimal(5), tokens=5))
    lost = await rig.load(made)
    assert (lost.reserved_usd, lost.spent_usd, lost.spent_tokens) == (Decimal(0), A_CALL.usd, A_CALL.tokens)


async def test_calls_that_may_still_turn_out_cheaper_are_waited_for(rig: ReplayRig) -> None:
    made = await rig.begin(2, budget_tokens=150)
    first, second = await rig.claim(made), await rig.claim(made)
    reservation = uuid4()
    await rig.replays.reserve_call(first.lease, reservation, provider="gemini", estimate=A_CALL)
    assert isinstance(await rig.reserve(second.lease), Wait)
    await rig.replays.settle_call(first.lease, reservation, CallSpending(usd=None, tokens=50))
    assert await rig.reserve(second.lease) == Granted()
    await rig.replays.end_item(second.lease, ItemState.DONE)
    # A call that was never settled has come to its estimate when its item ends.
    assert await rig.reserve(first.lease) == Stopped(state=ReplayState.STOPPED_BY_BUDGET)


async def test_what_a_dead_process_had_on_its_way_is_not_waited_for(rig: ReplayRig) -> None:
    """Nobody may be left to claim its item: all others wait."""
    made = await rig.begin(3, budget_tokens=250)
    first, dead = await rig.claim(made), await rig.claim(made)
    assert await rig.reserve(dead.lease) == Granted()
    reservation = uuid4()
    await rig.replays.reserve_call(first.lease, reservation, provider="gemini", estimate=A_CALL)
    second = await rig.claim(made)
    assert isinstance(await rig.reserve(second.lease), Wait)
    await rig.replays.renew_lease(dead.lease, lease_seconds=0)
    assert isinstance(await rig.reserve(second.lease), Wait)
    now = await rig.load(made)
    assert (now.spent_tokens, now.reserved_tokens) == (100, 100)
    await rig.replays.settle_call(first.lease, reservation, CallSpending(usd=None, tokens=60))
    assert await rig.reserve(second.lease) == Stopped(state=ReplayState.STOPPED_BY_BUDGET)


async def test_money_needs_a_price(rig: ReplayRig) -> None:
    made = await rig.begin(budget_usd=Decimal(1))
    claimed = await rig.claim(made)
    with pytest.raises(PriceUnknown):
        await rig.reserve(claimed.lease, CallEstimate(usd=None, tokens=1))
    assert (await rig.load(made)).state is ReplayState.RUNNING


async def test_a_provider_that_asked_for_patience_is_left_alone_by_all_replays(rig: ReplayRig) -> None:
    ids = await rig.record()
    leases = [(await rig.claim(await rig.begin(ids=ids))).lease for _ in range(2)]
    await rig.replays.pause_provider("gemini", 30)
    await rig.replays.pause_provider("gemini", 1)
    for lease in leases:
        permission = await rig.reserve(lease)
        assert isinstance(permission, Wait)
        assert 20 < permission.seconds <= 30
        assert await rig.reserve(lease, provider="anthropic") == Granted()


async def test_calls_leave_no_closer_together_than_the_minutes_share(rig: ReplayRig) -> None:
    made = await rig.begin(4, parallelism=4, calls_per_minute=600)
    leases = [(await rig.claim(made)).lease for _ in range(4)]
    began_at = await next_call_at(rig)
    moments: set[datetime] = set()

    async def call(lease: ItemLease) -> None:
        for _ in range(3):
            reservation = uuid4()
            while True:
                permission = await rig.replays.reserve_call(
                    lease, reservation, provider="gemini", estimate=CallEstimate(usd=None, tokens=1)
                )
                if isinstance(permission, Granted):
                    break
                assert isinstance(permission, Wait)
                # Nobody is told to wait for longer than until the next call may leave.
                assert 0 < permission.seconds <= 0.1
                await asyncio.sleep(permission.seconds)
            moments.add(await next_call_at(rig))
            await rig.replays.settle_call(lease, reservation, FREE)

    await asyncio.gather(*(call(lease) for lease in leases))
    # What one reads may be what a later call has left, but each of these moments is the share after some call.
    share, ordered = timedelta(seconds=0.1), sorted(moments)
    assert all(later - earlier >= share for earlier, later in pairwise(ordered))
    assert ordered[-1] - began_at >= 12 * share


async def test_new_limits_do_not_let_the_next_call_leave_before_its_time(rig: ReplayRig) -> None:
    made = await rig.begin(calls_per_minute=1)
    claimed = await rig.claim(made)
    assert await rig.reserve(claimed.lease) == Granted()
    for calls_per_minute, least in ((1, 50), (2, 20), (4, 5)):
        limits = ReplayLimits(calls_per_minute=calls_per_minute)
        await rig.replays.continue_replay(None, made.id, actor=OPERATOR, limits=limits)
        permission = await rig.reserve(claimed.lease)
        assert isinstance(permission, Wait)
        assert least < permission.seconds <= 60 / calls_per_minute
    await rig.replays.continue_replay(None, made.id, actor=OPERATOR, limits=ReplayLimits())
    assert await rig.reserve(claimed.lease) == Granted()


async def test_the_budget_holds_while_many_spend_it_at_once(rig: ReplayRig) -> None:
    made = await rig.begin(6, parallelism=6, budget_usd=Decimal("1.05"), budget_tokens=100_000)
    highest = Decimal(0)

    async def work(owner: str) -> None:
        nonlocal highest
        claimed = await rig.claim(made, owner=owner)
        while True:
            reservation = uuid4()
            permission = await rig.replays.reserve_call(claimed.lease, reservation, provider="gemini", estimate=A_CALL)
            now = await rig.load(made)
            highest = max(highest, now.spent_usd + now.reserved_usd)
            if isinstance(permission, Stopped):
                await rig.replays.release_item(claimed.lease)
                return
            if isinstance(permission, Wait):
                # Others will settle; nothing is gained by waiting for as long as that would take a provider.
                await asyncio.sleep(0)
                continue
            await rig.replays.settle_call(claimed.lease, reservation, CallSpending(usd=Decimal("0.09"), tokens=90))

    await asyncio.gather(*(work(f"worker {number}") for number in range(6)))
    ended = await rig.load(made)
    assert highest <= Decimal("1.05")
    # As much of it was spent as could be: one more call might have been too much.
    assert Decimal("0.95") < ended.spent_usd <= Decimal("1.05")
    assert (ended.state, ended.reserved_usd) == (ReplayState.STOPPED_BY_BUDGET, Decimal(0))
    assert ended.item_counts[ItemState.SKIPPED] == 6


class Model:
    """What the sums have to be."""

    def __init__(self) -> None:
        self.claimed: list[ClaimedItem] = []
        self.dead: set[int] = set()
        self.open: dict[int, tuple[UUID, CallEstimate]] = {}
        self.spent = 0

    def lose(self, number: int) -> None:
        if number in self.open:
            self.spent += self.open.pop(number)[1].tokens

    def make_room(self, number: int, tokens: int) -> None:
        """What the dead had on their way is over where it stands in the way."""
        self.lose(number)
        if self.spent + sum(estimate.tokens for _, estimate in self.open.values()) + tokens > 100:
            for dead in self.dead:
                self.lose(dead)

    def stop(self) -> None:
        """The budget is spent: items that nobody runs are over."""
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
    rig: ReplayRig, steps: list[tuple[str, int, int]]
) -> None:
    ids = await rig.record(4)
    made = await rig.begin(ids=ids, parallelism=4, budget_tokens=100)
    model = Model()
    for step, choice, tokens in steps:
        await take_step(rig, made, model, step, choice, tokens)
        now = await rig.load(made)
        reserved = sum(estimate.tokens for _, estimate in model.open.values())
        assert (now.spent_tokens, now.reserved_tokens) == (model.spent, reserved), step
        assert now.spent_tokens + now.reserved_tokens <= 100
        assert sum(now.item_counts.values()) <= now.item_count


async def take_step(rig: ReplayRig, made: Replay, model: Model, step: str, choice: int, tokens: int) -> None:
    state = (await rig.load(made)).state
    if step == "claim":
        claimed = await rig.find(made)
        if claimed is not None:
            assert state is ReplayState.RUNNING
            model.lose(claimed.item.number)
            model.claimed = [held for held in model.claimed if held.item.number != claimed.item.number]
            model.claimed.append(claimed)
            model.dead.discard(claimed.item.number)
        return
    if step in {"pause", "continue"}:
        if state in {ReplayState.RUNNING, ReplayState.PAUSED}:
            change = rig.replays.pause_replay if step == "pause" else rig.replays.continue_replay
            if step == "pause" or model.spent < 100:
                await change(None, made.id, actor=OPERATOR)
        return
    if model.claimed:
        held = model.claimed[choice % len(model.claimed)]
        if step == "reserve" and state is ReplayState.RUNNING:
            model.make_room(held.item.number, tokens)
        await take_item_step(rig, model, held, step, tokens)
        if state is ReplayState.RUNNING and (await rig.load(made)).state is ReplayState.STOPPED_BY_BUDGET:
            model.stop()


async def take_item_step(rig: ReplayRig, model: Model, held: ClaimedItem, step: str, tokens: int) -> None:
    number, lease = held.item.number, held.lease
    if step == "reserve":
        reservation, estimate = uuid4(), CallEstimate(usd=None, tokens=tokens)
        model.lose(number)
        permission: CallPermission = await rig.replays.reserve_call(
            lease, reservation, provider="gemini", estimate=estimate
        )
        if isinstance(permission, Granted):
            model.open[number] = (reservation, estimate)
    elif step == "settle" and number in model.open:
        reservation, estimate = model.open.pop(number)
        came_to = min(tokens, estimate.tokens)
        await rig.replays.settle_call(lease, reservation, CallSpending(usd=None, tokens=came_to))
        model.spent += came_to
    elif step == "die":
        await rig.replays.renew_lease(lease, lease_seconds=0)
        model.dead.add(number)
    elif step in {"release", "end", "erase"}:
        model.lose(number)
        model.claimed.remove(held)
        if step == "release":
            await rig.replays.release_item(lease)
        elif step == "end":
            await rig.replays.end_item(lease, ItemState.DONE)
        else:
            await rig.store.erase_conversation(rig.tenant.id, held.item.conversation_id)
            with pytest.raises(LeaseLost):
                await rig.reserve(lease)
