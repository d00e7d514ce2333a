"""How patient a replay is with a provider."""

from typing import Any

import pytest

from server.conversation.errors import (
    ProviderDisconnected,
    ProviderFailed,
    ProviderOverloaded,
    ProviderQuotaExceeded,
    ProviderRateLimited,
)
from server.providers.retry_policy import RetryPolicy
from server.replay.rerun.retries import RetryAllowance

POLICY = RetryPolicy(attempts=3, budget_seconds=60)


def plan(retry_allowance: RetryAllowance, failure: ProviderFailed, *, call_seconds: float = 1.0) -> float | None:
    return retry_allowance.plan(failure, call_seconds=call_seconds, chance=0.0)


@pytest.mark.parametrize("details", [{"retry_after_seconds": 45}, {"retry_after_seconds": 600}, {}])
def test_being_told_to_wait_is_waited_for_and_costs_none_of_the_other_attempts(details: dict[str, Any]) -> None:
    retry_allowance = RetryAllowance(POLICY)
    waits = [plan(retry_allowance, ProviderRateLimited(**details)) for _ in range(5)]
    assert waits == [details.get("retry_after_seconds", 2.0**time) for time in range(5)]
    assert [plan(retry_allowance, ProviderOverloaded()) is None for _ in range(3)] == [False, False, True]


def test_it_ends_after_an_hour_of_waiting() -> None:
    retry_allowance = RetryAllowance(POLICY)
    limited = ProviderRateLimited(retry_after_seconds=1000)
    assert [plan(retry_allowance, limited) is None for _ in range(4)] == [False, False, False, True]
    assert plan(RetryAllowance(POLICY), ProviderRateLimited(retry_after_seconds=7200)) is None


def test_other_failures_have_what_the_policy_gives_them() -> None:
    assert plan(RetryAllowance(POLICY), ProviderQuotaExceeded()) is None
    assert plan(RetryAllowance(POLICY), ProviderDisconnected(), call_seconds=60) is None
    assert plan(RetryAllowance(POLICY), ProviderOverloaded(retry_after_seconds=45)) is None
