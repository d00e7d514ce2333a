"""How patient a replay is with a provider.

Nobody sits in front of it, so it waits where a turn would have to fail: being told to wait is no failure, and costs
nothing of the patience that there is with failures.
"""

from typing import Final

from server.conversation.errors import ProviderFailed, ProviderRateLimited
from server.providers.retry_policy import RetryPolicy, plan_retry

_WITH_LIMITS: Final = RetryPolicy(
    attempts=1_000,
    budget_seconds=3_600.0,
    first_delay_seconds=1.0,
    longest_delay_seconds=60.0,
    longest_honoured_seconds=3_600.0,
)


class RetryAllowance:
    """What is left of it for one question, attempt after attempt.

    Only calls and the pauses between them take of it, and not the time in which no call may leave.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        """`policy`: for failures of all other kinds."""
        self._with_failures = _Left(policy)
        self._with_limits = _Left(_WITH_LIMITS)

    def plan(self, failure: ProviderFailed, *, call_seconds: float, chance: float) -> float | None:
        """How long to wait before another attempt; None where none follows. `call_seconds`: how long this one took."""
        left = self._with_limits if isinstance(failure, ProviderRateLimited) else self._with_failures
        return left.plan(failure, call_seconds, chance)


class _Left:
    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._attempt_count = 0
        self._seconds = 0.0

    def plan(self, failure: ProviderFailed, call_seconds: float, chance: float) -> float | None:
        self._attempt_count += 1
        self._seconds += call_seconds
        delay = plan_retry(
            self._policy,
            failure,
            attempt=self._attempt_count,
            elapsed_seconds=self._seconds,
            events_given=False,
            chance=chance,
        )
        self._seconds += delay or 0.0
        return delay
