"""Retries are rare, bounded, and never repeat what a client has received."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import (
    ProviderDisconnected,
    ProviderFailed,
    ProviderOverloaded,
    ProviderQuotaExceeded,
    ProviderRateLimited,
    every_error,
)
from server.providers.retry_policy import BATCH_RATE_LIMITS, RetryBudget, RetryPolicy, plan_retry

POLICY = RetryPolicy()
FAILURES = list(every_error(ProviderFailed))
HOPELESS = {
    "provider_not_configured",
    "provider_quota_exceeded",
    "provider_malformed",
    "provider_call_malformed",
    "call_limit_reached",
    "provider_rejected",
    "provider_authentication",
    "context_too_long",
    "signature_rejected",
    "answer_rejected",
    "prefix_mismatch",
    "summary_rejected",
    "cache_gone",
}


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.code)
def test_only_transient_failures_are_retried(kind: type[ProviderFailed]) -> None:
    delay = plan_retry(POLICY, kind(), attempt=1, elapsed_seconds=0, events_given=False, chance=0)
    assert (delay is None) is (kind.code in HOPELESS)


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.code)
def test_nothing_is_retried_after_the_first_event(kind: type[ProviderFailed]) -> None:
    assert plan_retry(POLICY, kind(), attempt=1, elapsed_seconds=0, events_given=True, chance=0) is None


def test_delays_double_up_to_the_maximum() -> None:
    patient = RetryPolicy(attempts=100, budget_seconds=10**6)
    delays = [
        plan_retry(patient, ProviderOverloaded(), attempt=n, elapsed_seconds=0, events_given=False, chance=0)
        for n in range(1, 8)
    ]
    assert delays == [0.5, 1, 2, 4, 8, 8, 8]


def test_the_delay_of_the_provider_is_used_up_to_the_maximum() -> None:
    for asked, delay in ((3.0, 3.0), (30.0, 30.0), (30.5, None), (3600.0, None)):
        error = ProviderRateLimited(retry_after_seconds=asked)
        assert plan_retry(POLICY, error, attempt=1, elapsed_seconds=0, events_given=False, chance=0) == delay


@given(
    attempt=st.integers(1, 10),
    elapsed=st.floats(0, 200),
    chance=st.floats(0, 1),
    asked=st.none() | st.floats(0, 100),
)
def test_the_retry_budget_and_the_number_of_attempts_are_limits(
    attempt: int, elapsed: float, chance: float, asked: float | None
) -> None:
    error = ProviderRateLimited() if asked is None else ProviderRateLimited(retry_after_seconds=asked)
    delay = plan_retry(POLICY, error, attempt=attempt, elapsed_seconds=elapsed, events_given=False, chance=chance)
    if delay is not None:
        assert attempt < POLICY.attempts
        assert delay >= 0
        assert elapsed + delay <= POLICY.budget_seconds
        assert asked is None or asked <= delay


BATCH = RetryPolicy(attempts=3, budget_seconds=60, rate_limits=BATCH_RATE_LIMITS)


def plan(budget: RetryBudget, failure: ProviderFailed, *, call_seconds: float = 1.0) -> float | None:
    return budget.plan(failure, call_seconds=call_seconds, events_given=False, chance=0.0)


@pytest.mark.parametrize("details", [{"retry_after_seconds": 45}, {"retry_after_seconds": 600}, {}])
def test_a_batch_waits_for_rate_limits_which_use_up_none_of_its_other_attempts(details: dict[str, Any]) -> None:
    budget = RetryBudget(BATCH)
    waits = [plan(budget, ProviderRateLimited(**details)) for _ in range(5)]
    assert waits == [details.get("retry_after_seconds", 2.0**time) for time in range(5)]
    assert [plan(budget, ProviderOverloaded()) is None for _ in range(3)] == [False, False, True]


def test_a_batch_gives_up_after_an_hour_of_rate_limits() -> None:
    budget = RetryBudget(BATCH)
    limited = ProviderRateLimited(retry_after_seconds=1000)
    assert [plan(budget, limited) is None for _ in range(4)] == [False, False, False, True]
    assert plan(RetryBudget(BATCH), ProviderRateLimited(retry_after_seconds=7200)) is None


def test_a_batch_has_the_attempts_of_its_policy_for_other_failures() -> None:
    assert plan(RetryBudget(BATCH), ProviderQuotaExceeded()) is None
    assert plan(RetryBudget(BATCH), ProviderDisconnected(), call_seconds=60) is None
    assert plan(RetryBudget(BATCH), ProviderOverloaded(retry_after_seconds=45)) is None


def test_without_a_separate_policy_rate_limits_use_up_attempts() -> None:
    budget = RetryBudget(RetryPolicy(attempts=3))
    assert [plan(budget, ProviderRateLimited()) is None for _ in range(3)] == [False, False, True]
