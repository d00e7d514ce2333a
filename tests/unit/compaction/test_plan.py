"""What the planner moves, when, and what it never does."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.compaction.plan import (
    CompactionDecision,
    CompactionReason,
    SkipReason,
    plan_compaction,
    plan_requested_compaction,
)
from server.compaction.state import CompactionState, Exchange
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind
from server.providers.model_profile import PROFILES, ModelProfile, find_profile
from server.providers.pricing import find_price

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
GEMINI = PROFILES["gemini-3.8-flash"]
CLAUDE = PROFILES["claude-opus-4-8"]
BOUND = PROFILES["claude-sonnet-5-5"]
COST = CompactionPolicy()
THRESHOLD = CompactionPolicy(kind=PolicyKind.THRESHOLD)


def exchange(number: int, **changes: Any) -> Exchange:
    """The exchange of the turns 2 x number + 1 and 2 x number + 2: 1,000 tokens, of which 400 are thinking."""
    plain = Exchange(
        first_seq=2 * number + 1,
        last_seq=2 * number + 2,
        sent_tokens=1_000,
        segment_tokens=600,
        thinking_tokens=400,
        answer_count=1,
        unsent_tokens=500,
        is_open=False,
        is_whole=True,
    )
    return replace(plain, **changes)


def state_of(exchanges: int | Sequence[Exchange], **changes: Any) -> CompactionState:
    """The state right after a call."""
    buffered = [exchange(number) for number in range(exchanges)] if isinstance(exchanges, int) else exchanges
    plain = CompactionState(
        exchanges=buffered,
        static_tokens=10_000,
        dynamic_tokens=500,
        caches_buffer=False,
        last_call_at=NOW,
        cache_lifetime_seconds=300,
        exchange_count=len(buffered),
    )
    return replace(plain, **changes)


def decide(
    state: CompactionState,
    profile: ModelProfile = GEMINI,
    policy: CompactionPolicy = COST,
    *,
    later_seconds: float = 0,
) -> CompactionDecision:
    price = find_price(profile.model, NOW, 0)
    return plan_compaction(state, profile, price, policy, NOW + timedelta(seconds=later_seconds))


def after(state: CompactionState, decision: CompactionDecision, profile: ModelProfile) -> CompactionState:
    """The state after the plan was executed."""
    assert decision.plan is not None
    count = decision.plan.exchange_count
    kept = state.exchanges[count:]
    if profile.prefix_bound:
        kept = [replace(one, sent_tokens=one.sent_tokens - one.thinking_tokens, thinking_tokens=0) for one in kept]
    return replace(state, exchanges=kept, static_tokens=state.static_tokens + decision.plan.segment_tokens)


def append_only(exchanges: int | Sequence[Exchange], **changes: Any) -> CompactionState:
    return state_of(exchanges, **{"dynamic_tokens": 0, "caches_buffer": True} | changes)


def test_what_pays_at_once_is_moved_at_once() -> None:
    decision = decide(state_of(6))
    assert decision.plan is not None
    assert (decision.plan.first_seq, decision.plan.last_seq) == (1, 4)
    assert decision.plan.reason is CompactionReason.CARRYING_COST
    assert decision.plan.price_tokens <= 0
    assert decision.plan.saved_tokens_per_call == pytest.approx(2_000 - 0.1 * 1_200)
    assert decision.plan.saved_usd_per_call is not None
    assert float(decision.plan.saved_usd_per_call) == pytest.approx((2_000 - 120) * 0.75e-6)


def test_the_newest_exchanges_stay() -> None:
    assert decide(state_of(4)).skip_reason is SkipReason.NOTHING_TO_MOVE
    decision = decide(state_of(9), policy=CompactionPolicy(keep_exchanges=1))
    assert decision.plan is not None
    assert decision.plan.last_seq == 16


def test_a_cached_buffer_is_kept_until_its_cost_reaches_that_of_moving_it() -> None:
    counts = [count for count in range(5, 60) if decide(append_only(count), CLAUDE).plan is not None]
    first = counts[0]
    waiting = decide(append_only(first - 1), CLAUDE)
    assert waiting.skip_reason is SkipReason.NOT_YET_WORTH_IT
    # Reading costs 0.1, or 0.06 after the move; writing segment and tail costs 1.25, less what it would have cost
    # before.
    moved = 1_000 * (first - 4)
    rent = 0.04 * sum(1_000 * count for count in range(first - 4))
    price = 500 + 1.25 * (0.6 * moved + 4_000) - (0.1 * (moved + 4_000 - 500) + 1.25 * 500)
    assert rent >= price
    assert counts == list(range(first, 60))


def test_with_a_cold_cache_compaction_is_free() -> None:
    state = append_only(6)
    hot = decide(state, CLAUDE)
    assert hot.skip_reason is SkipReason.NOT_YET_WORTH_IT
    assert hot.recheck_at == NOW + timedelta(seconds=300)
    cold = decide(state, CLAUDE, later_seconds=300)
    assert cold.plan is not None
    assert cold.plan.reason is CompactionReason.COLD_CACHE


def test_if_the_cache_is_usually_cold_nothing_is_paid_while_it_is_warm() -> None:
    due = append_only(59)
    assert decide(due, CLAUDE).plan is not None
    waiting = decide(replace(due, typical_gap_seconds=3_600), CLAUDE)
    assert waiting.skip_reason is SkipReason.WAITS_FOR_COLD_CACHE
    assert waiting.recheck_at == NOW + timedelta(seconds=300)


def test_a_conversation_that_is_about_to_end_is_not_compacted() -> None:
    ending = append_only(21, typical_exchange_count=23.0)
    going_on = append_only(21, typical_exchange_count=200.0)
    assert decide(ending, CLAUDE).skip_reason is SkipReason.NOT_YET_WORTH_IT
    assert decide(going_on, CLAUDE).plan is not None


def test_what_saves_nothing_is_not_moved() -> None:
    verbatim = [exchange(number, segment_tokens=1_000) for number in range(40)]
    assert decide(append_only(verbatim), CLAUDE).skip_reason is SkipReason.SAVES_NOTHING


def test_a_prefix_below_the_minimum_is_not_counted_as_cached() -> None:
    """6,000 tokens are cached; after a cut 2,500 would not be, so that each call would cost more."""
    small = [exchange(number, sent_tokens=1_000, segment_tokens=100) for number in range(5)]
    state = append_only(small, static_tokens=1_000)
    assert decide(state, GEMINI, CompactionPolicy(keep_exchanges=1)).skip_reason is SkipReason.SAVES_NOTHING
    assert decide(replace(state, static_tokens=9_000), GEMINI).skip_reason is SkipReason.NOT_YET_WORTH_IT


def test_a_cut_does_not_keep_a_request_below_the_minimum() -> None:
    small = [exchange(number, sent_tokens=450, segment_tokens=300) for number in range(8)]
    below = append_only(small, static_tokens=300, typical_exchange_count=40.0)
    assert decide(below).skip_reason is SkipReason.NOT_YET_WORTH_IT
    assert decide(replace(below, typical_exchange_count=None)).skip_reason is SkipReason.NOT_YET_WORTH_IT
    # With so little to come it is never cached, and without a warm cache nothing is read.
    ending = append_only([replace(one, sent_tokens=350) for one in small], static_tokens=0, typical_exchange_count=8.0)
    assert decide(ending, policy=replace(COST, fixed_cost_tokens=0)).plan is not None
    assert decide(replace(below, typical_gap_seconds=3_600.0), later_seconds=300).plan is not None


def test_calls_in_tool_loops_count_as_calls() -> None:
    busy = [exchange(number, answer_count=8) for number in range(12)]
    assert decide(append_only(12), CLAUDE).plan is None
    assert decide(append_only(busy), CLAUDE).plan is not None


def test_the_threshold_policy_compacts_down_to_its_target() -> None:
    policy = replace(THRESHOLD, max_tokens=8_000, target_tokens=6_000)
    assert decide(state_of(8), policy=policy).skip_reason is SkipReason.BELOW_THRESHOLD
    decision = decide(state_of(9), policy=policy)
    assert decision.plan is not None
    assert decision.plan.reason is CompactionReason.THRESHOLD_TOKENS
    assert decision.plan.exchange_count == 3


def test_the_threshold_policy_also_counts_turns() -> None:
    policy = replace(THRESHOLD, max_turns=12, max_tokens=None)
    assert decide(state_of(6), policy=policy).skip_reason is SkipReason.BELOW_THRESHOLD
    decision = decide(state_of(7), policy=policy)
    assert decision.plan is not None
    assert decision.plan.reason is CompactionReason.THRESHOLD_TURNS
    assert decision.plan.exchange_count == 3


@pytest.mark.parametrize(
    ("newest", "hold"),
    [
        ({"is_open": True, "is_whole": False}, SkipReason.BLOCKED_BY_OPEN_CALL),
        ({"is_whole": False}, SkipReason.EXCHANGE_UNFINISHED),
    ],
)
def test_nothing_is_cut_while_an_exchange_is_running(newest: dict[str, bool], hold: SkipReason) -> None:
    state = state_of([*(exchange(number) for number in range(9)), exchange(9, **newest)])
    price = find_price(GEMINI.model, NOW, 0)
    for policy in (COST, THRESHOLD):
        assert decide(state, policy=policy).skip_reason is hold
        assert plan_requested_compaction(state, GEMINI, price, policy, NOW).skip_reason is hold


def test_a_forced_compaction_moves_everything_that_need_not_stay() -> None:
    decision = plan_requested_compaction(append_only(6), CLAUDE, None, CompactionPolicy(kind=PolicyKind.OFF), NOW)
    assert decision.plan is not None
    assert decision.plan.reason is CompactionReason.REQUESTED
    assert decision.plan.exchange_count == 2


def test_the_policy_none_never_compacts() -> None:
    off = CompactionPolicy(kind=PolicyKind.OFF)
    assert decide(state_of(50), policy=off) == CompactionDecision(skip_reason=SkipReason.SWITCHED_OFF)


def test_a_nearly_full_window_is_compacted_whether_it_pays_or_not() -> None:
    huge = [exchange(number, sent_tokens=100_000, segment_tokens=60_000) for number in range(9)]
    decision = decide(append_only(huge), CLAUDE)
    assert decision.plan is not None
    assert decision.plan.reason is CompactionReason.WINDOW
    assert decision.plan.exchange_count == 5
    assert decision.window_short
    assert not decision.needs_summary


def test_a_summary_is_needed_if_moving_is_not_enough() -> None:
    huge = [exchange(number, sent_tokens=100_000, segment_tokens=99_000) for number in range(9)]
    decision = decide(append_only(huge), CLAUDE)
    assert decision.plan is not None
    assert decision.plan.exchange_count == 8
    assert decision.needs_summary
    alone = decide(append_only(1, static_tokens=900_000), CLAUDE)
    assert alone.plan is None
    assert alone.needs_summary


def test_a_full_window_is_cut_before_an_open_call_only_if_thinking_is_not_prefix_bound() -> None:
    huge = [exchange(number, sent_tokens=100_000, segment_tokens=1_000) for number in range(9)]
    state = append_only([*huge, exchange(9, is_open=True, is_whole=False)])
    free = decide(state, CLAUDE)
    assert free.plan is not None
    assert free.plan.last_seq == 10
    bound = decide(state, BOUND)
    assert bound.plan is None
    assert bound.skip_reason is SkipReason.BLOCKED_BY_OPEN_CALL
    assert bound.window_short


def test_a_prefix_bound_model_loses_the_thinking_of_the_turns_that_stay() -> None:
    state = append_only(8)
    bound = decide(state, BOUND, later_seconds=300)
    free = decide(state, CLAUDE, later_seconds=300)
    assert bound.plan is not None
    assert free.plan is not None
    assert not bound.plan.thinking_kept
    assert free.plan.thinking_kept
    # With a cold cache the four that stay are written without their 1,600 tokens of thinking.
    assert free.plan.price_tokens - bound.plan.price_tokens == pytest.approx(1.25 * 1_600)


def test_an_unknown_price_is_assumed_and_reported() -> None:
    unknown = find_profile("anthropic", "claude-unheard-of")
    decision = plan_compaction(append_only(8), unknown, None, COST, NOW + timedelta(hours=1))
    assert decision.plan is not None
    assert decision.plan.rates_assumed
    assert decision.plan.saved_usd_per_call is None
    known = decide(append_only(8), CLAUDE, later_seconds=3_600)
    assert known.plan is not None
    assert not known.plan.rates_assumed


sizes = st.integers(0, 3_000)
wholes = st.builds(
    lambda sent, segment, thinking, unsent, answers: {
        "sent_tokens": sent + thinking,
        "segment_tokens": segment,
        "thinking_tokens": thinking,
        "unsent_tokens": min(unsent, sent + thinking),
        "answer_count": answers,
    },
    sizes,
    sizes,
    sizes,
    sizes,
    st.integers(0, 9),
)
endings = st.sampled_from([{}, {"is_whole": False}, {"is_open": True, "is_whole": False}])
states = st.builds(
    lambda drawn, ending, **changes: state_of(
        [exchange(place, **(one | (ending if place == len(drawn) - 1 else {}))) for place, one in enumerate(drawn)],
        **changes,
    ),
    st.lists(wholes, max_size=30),
    endings,
    static_tokens=st.integers(0, 1_200_000),
    caches_buffer=st.booleans(),
    last_call_at=st.none() | st.just(NOW) | st.just(NOW - timedelta(hours=1)),
    cache_lifetime_seconds=st.sampled_from([300, 3_600]),
    typical_gap_seconds=st.none() | st.floats(0, 10_000),
    typical_exchange_count=st.none() | st.floats(1, 500),
)
policies = st.builds(
    CompactionPolicy,
    kind=st.sampled_from(PolicyKind),
    keep_exchanges=st.integers(1, 6),
    fixed_cost_tokens=st.sampled_from([0, 500]),
    max_turns=st.none() | st.integers(1, 40),
    max_tokens=st.none() | st.integers(1, 20_000),
    target_tokens=st.integers(0, 20_000),
)
profiles = st.sampled_from([GEMINI, CLAUDE, BOUND, PROFILES["gemini-3.1-flash-lite"]])


@given(state=states, policy=policies, profile=profiles)
def test_any_buffer_gives_a_valid_plan_or_a_reason(
    state: CompactionState, policy: CompactionPolicy, profile: ModelProfile
) -> None:
    decision = decide(state, profile, policy)
    plan = decision.plan
    assert (plan is None) is (decision.skip_reason is not None)
    assert decision.recheck_at is None or decision.recheck_at > NOW
    if plan is None:
        return
    ends = [one.last_seq for one in state.exchanges]
    # Between exchanges, from the oldest on, never the newest, never one that is running or open.
    assert plan.first_seq == state.exchanges[0].first_seq
    assert plan.last_seq == ends[plan.exchange_count - 1]
    assert plan.last_seq < ends[-1]
    kept = [one for one in state.exchanges[plan.exchange_count :] if one.is_whole]
    assert len(kept) >= (1 if plan.reason is CompactionReason.WINDOW else policy.keep_exchanges)
    if not state.exchanges[-1].is_whole:
        assert plan.reason is CompactionReason.WINDOW
        assert not profile.prefix_bound


@given(state=states, policy=policies, profile=profiles, later=st.sampled_from([0, 300, 100_000]))
def test_after_a_plan_was_executed_there_is_nothing_to_plan(
    state: CompactionState, policy: CompactionPolicy, profile: ModelProfile, later: int
) -> None:
    decision = decide(state, profile, policy, later_seconds=later)
    if decision.plan is not None:
        again = decide(after(state, decision, profile), profile, policy, later_seconds=later)
        assert again.plan is None


@given(state=states, policy=policies, profile=profiles, start=st.integers(0, 10**6))
def test_the_first_turn_number_does_not_matter(
    state: CompactionState, policy: CompactionPolicy, profile: ModelProfile, start: int
) -> None:
    moved = replace(
        state,
        exchanges=[
            replace(one, first_seq=one.first_seq + 2 * start, last_seq=one.last_seq + 2 * start)
            for one in state.exchanges
        ],
    )
    here, there = decide(state, profile, policy), decide(moved, profile, policy)
    assert here.skip_reason is there.skip_reason
    assert here.recheck_at == there.recheck_at
    if here.plan is not None and there.plan is not None:
        assert replace(there.plan, first_seq=here.plan.first_seq, last_seq=here.plan.last_seq) == here.plan
