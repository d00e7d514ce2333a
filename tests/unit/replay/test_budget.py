"""Whether the next call of a replay may leave."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import PriceUnknown
from server.replay.rerun.budget import Standing, is_in_the_way, is_spent, next_call_after, plan_call
from server.replay.rerun.replay import CallEstimate, Granted, ReplayLimits, ReplayState, Stopped, Wait

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
A_CALL = CallEstimate(usd=Decimal(1), tokens=10)


def standing(**changes: Any) -> Standing:
    values: dict[str, Any] = {
        "state": ReplayState.RUNNING,
        "limits": ReplayLimits(),
        "spent_usd": Decimal(0),
        "spent_tokens": 0,
        "reserved_usd": Decimal(0),
        "reserved_tokens": 0,
        "next_call_at": None,
        "held_until": None,
        "now": NOW,
    }
    return Standing(**values | changes)


@pytest.mark.parametrize("state", [state for state in ReplayState if state is not ReplayState.RUNNING])
def test_nothing_leaves_a_replay_that_does_not_run(state: ReplayState) -> None:
    assert plan_call(standing(state=state), A_CALL) == Stopped(state=state)


def test_the_last_call_that_fits_leaves_and_the_next_one_ends_it() -> None:
    limits = ReplayLimits(budget_tokens=20, budget_usd=Decimal(2))
    assert plan_call(standing(limits=limits, spent_tokens=10, spent_usd=Decimal(1)), A_CALL) == Granted()
    spent = Stopped(state=ReplayState.STOPPED_BY_BUDGET)
    assert plan_call(standing(limits=limits, spent_tokens=11), A_CALL) == spent
    assert plan_call(standing(limits=limits, spent_usd=Decimal("1.01")), A_CALL) == spent
    assert is_spent(limits, Decimal(2), 0)
    assert not is_spent(limits, Decimal("1.99"), 19)


def test_what_is_on_its_way_is_waited_for() -> None:
    limits = ReplayLimits(budget_tokens=20)
    assert isinstance(plan_call(standing(limits=limits, spent_tokens=5, reserved_tokens=6), A_CALL), Wait)
    assert is_in_the_way(standing(limits=limits, spent_tokens=5, reserved_tokens=6), A_CALL)
    assert not is_in_the_way(standing(limits=limits, spent_tokens=5, reserved_tokens=5), A_CALL)
    assert not is_in_the_way(standing(limits=limits, spent_tokens=11, reserved_tokens=5), A_CALL)


def test_a_budget_in_money_needs_a_price() -> None:
    unpriced = CallEstimate(usd=None, tokens=1)
    with pytest.raises(PriceUnknown):
        plan_call(standing(limits=ReplayLimits(budget_usd=Decimal(1))), unpriced)
    assert plan_call(standing(limits=ReplayLimits(budget_tokens=1)), unpriced) == Granted()


def test_the_later_of_the_two_clocks_is_waited_for() -> None:
    soon, later = NOW + timedelta(seconds=1), NOW + timedelta(seconds=5)
    assert plan_call(standing(next_call_at=soon, held_until=later), A_CALL) == Wait(seconds=5)
    assert plan_call(standing(next_call_at=later, held_until=NOW), A_CALL) == Wait(seconds=5)
    assert plan_call(standing(next_call_at=NOW, held_until=None), A_CALL) == Granted()
    assert next_call_after(ReplayLimits(calls_per_minute=120), NOW) == NOW + timedelta(seconds=0.5)
    assert next_call_after(ReplayLimits(), NOW) is None


AMOUNTS = st.integers(0, 50)


@given(
    budget=AMOUNTS,
    steps=st.lists(st.tuples(AMOUNTS, AMOUNTS, st.booleans()), max_size=40),
)
def test_no_order_of_calls_carries_spending_over_the_budget(budget: int, steps: list[tuple[int, int, bool]]) -> None:
    """As long as no call turns out dearer than its estimate."""
    spent, open_calls = 0, list[int]()
    for estimate, came_to, settles in steps:
        if settles and open_calls:
            spent += min(came_to, open_calls.pop())
        else:
            limits = ReplayLimits(budget_tokens=budget, budget_usd=Decimal(budget))
            reserved = sum(open_calls)
            now = standing(
                limits=limits,
                spent_tokens=spent,
                reserved_tokens=reserved,
                spent_usd=Decimal(spent),
                reserved_usd=Decimal(reserved),
            )
            permission = plan_call(now, CallEstimate(usd=Decimal(estimate), tokens=estimate))
            if isinstance(permission, Granted):
                open_calls.append(estimate)
            elif isinstance(permission, Stopped):
                assert spent + estimate > budget
        assert spent + sum(open_calls) <= budget
