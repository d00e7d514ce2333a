"""How much a call of a replay may cost, and whether it may be sent."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.call import Call
from server.conversation.errors import PriceUnknown
from server.conversation.usage import Usage
from server.replay.rerun.budget import (
    BudgetState,
    estimate_call,
    estimate_input_tokens,
    estimate_output_tokens,
    is_spent,
    must_wait_for_open_calls,
    next_call_after,
    plan_call,
)
from server.replay.rerun.replay import CallEstimate, Granted, ReplayLimits, ReplayState, Stopped, Wait
from tests.support.builders import call_end, call_start

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
A_CALL = CallEstimate(usd=Decimal(1), tokens=10)


def budget_state(**changes: Any) -> BudgetState:
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
    return BudgetState(**values | changes)


@pytest.mark.parametrize("state", [state for state in ReplayState if state is not ReplayState.RUNNING])
def test_nothing_leaves_a_replay_that_does_not_run(state: ReplayState) -> None:
    assert plan_call(budget_state(state=state), A_CALL) == Stopped(state=state)


def test_the_last_call_within_the_budget_is_sent_and_the_next_one_ends_the_replay() -> None:
    limits = ReplayLimits(budget_tokens=20, budget_usd=Decimal(2))
    assert plan_call(budget_state(limits=limits, spent_tokens=10, spent_usd=Decimal(1)), A_CALL) == Granted()
    spent = Stopped(state=ReplayState.STOPPED_BY_BUDGET)
    assert plan_call(budget_state(limits=limits, spent_tokens=11), A_CALL) == spent
    assert plan_call(budget_state(limits=limits, spent_usd=Decimal("1.01")), A_CALL) == spent
    assert is_spent(limits, Decimal(2), 0)
    assert not is_spent(limits, Decimal("1.99"), 19)


def test_running_calls_are_waited_for() -> None:
    limits = ReplayLimits(budget_tokens=20)
    assert isinstance(plan_call(budget_state(limits=limits, spent_tokens=5, reserved_tokens=6), A_CALL), Wait)
    assert must_wait_for_open_calls(budget_state(limits=limits, spent_tokens=5, reserved_tokens=6), A_CALL)
    assert not must_wait_for_open_calls(budget_state(limits=limits, spent_tokens=5, reserved_tokens=5), A_CALL)
    assert not must_wait_for_open_calls(budget_state(limits=limits, spent_tokens=11, reserved_tokens=5), A_CALL)


def test_a_budget_in_money_needs_a_price() -> None:
    unpriced = CallEstimate(usd=None, tokens=1)
    with pytest.raises(PriceUnknown):
        plan_call(budget_state(limits=ReplayLimits(budget_usd=Decimal(1))), unpriced)
    assert plan_call(budget_state(limits=ReplayLimits(budget_tokens=1)), unpriced) == Granted()


def test_the_later_of_the_two_limits_is_waited_for() -> None:
    soon, later = NOW + timedelta(seconds=1), NOW + timedelta(seconds=5)
    assert plan_call(budget_state(next_call_at=soon, held_until=later), A_CALL) == Wait(seconds=5)
    assert plan_call(budget_state(next_call_at=later, held_until=NOW), A_CALL) == Wait(seconds=5)
    assert plan_call(budget_state(next_call_at=NOW, held_until=None), A_CALL) == Granted()
    assert next_call_after(ReplayLimits(calls_per_minute=120), NOW) == NOW + timedelta(seconds=0.5)
    assert next_call_after(ReplayLimits(), NOW) is None


AMOUNTS = st.integers(0, 50)


@given(
    budget=AMOUNTS,
    steps=st.lists(st.tuples(AMOUNTS, AMOUNTS, st.booleans()), max_size=40),
)
def test_no_order_of_calls_exceeds_the_budget(budget: int, steps: list[tuple[int, int, bool]]) -> None:
    """Unless a call costs more than its estimate."""
    spent, open_calls = 0, list[int]()
    for estimate, came_to, settles in steps:
        if settles and open_calls:
            spent += min(came_to, open_calls.pop())
        else:
            limits = ReplayLimits(budget_tokens=budget, budget_usd=Decimal(budget))
            reserved = sum(open_calls)
            now = budget_state(
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


MANIFEST = ({"length": 1_000_000}, {"length": 3_000_000})
"""Most of it images."""


def recorded(tokens: int) -> Call:
    usage = Usage(fresh_input_tokens=tokens, output_tokens=300, reasoning_tokens=400)
    return Call(turn_seq=2, start=call_start(manifest=MANIFEST), end=call_end(usage=usage))


def test_a_request_is_taken_for_as_many_tokens_for_each_byte_as_the_recorded_one_had() -> None:
    assert estimate_input_tokens(MANIFEST, recorded(2_000)) == 2_500
    assert estimate_input_tokens(({"length": 8_000_000},), recorded(2_000)) == 5_000
    for unknown in (None, recorded(0), Call(turn_seq=2, start=call_start(manifest=()), end=call_end())):
        assert estimate_input_tokens(MANIFEST, unknown) is None


def test_an_answer_is_as_long_as_it_may_be_or_twice_the_recorded_one() -> None:
    end = recorded(1).end
    assert end is not None
    assert estimate_output_tokens(100, end.usage) == 100
    assert estimate_output_tokens(None, end.usage) == 1_400
    assert estimate_output_tokens(None, None) == 1_024


def test_all_that_is_sent_is_written_to_a_cache_where_the_model_has_one() -> None:
    claude = estimate_call("anthropic", "claude-haiku-4-5", 1_000_000, 1_000)
    # 1 dollar a million, twice that for writing what lives long, and 5 for what is said.
    assert (claude.usd, claude.tokens) == (Decimal("2.005"), 1_001_000)
    assert estimate_call("gemini", "gemini-99", 10, 10).usd is None
