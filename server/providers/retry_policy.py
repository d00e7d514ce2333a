"""The policy for retrying failed provider calls.

A call is retried only before any event of its answer was passed on, only after failures that may be temporary, and only
within the policy's time budget. A `retry_after_seconds` of the provider is honoured up to a limit; if the provider asks
for more, the failure is returned at once, so that the client learns the delay without waiting for it.
"""

from dataclasses import dataclass
from typing import Final

from server.conversation.errors import (
    ProviderDisconnected,
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderOverloaded,
    ProviderRateLimited,
    ProviderTimedOut,
    ProviderUnavailable,
)

_TEMPORARY: Final = (
    ProviderRateLimited,
    ProviderOverloaded,
    ProviderUnavailable,
    ProviderTimedOut,
    ProviderDisconnected,
    ProviderEndedEarly,
    ProviderEmpty,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and for how long a call is retried."""

    attempts: int = 4
    budget_seconds: float = 60.0
    """Maximum duration of all calls and the delays between them, up to the start of the last call."""
    first_delay_seconds: float = 0.5
    """Delays double from this one, unless the provider names one."""
    longest_delay_seconds: float = 8.0
    longest_honoured_seconds: float = 30.0
    """Maximum delay that is honoured if the provider names one."""
    max_continuations: int = 8
    """How often a paused answer is continued within one turn. After that the turn ends as `paused`."""
    rate_limits: "RetryPolicy | None" = None
    """A separate policy for rate limits, which then use up nothing of this one. None: this one applies to them too."""


BATCH_RATE_LIMITS: Final = RetryPolicy(
    attempts=1_000,
    budget_seconds=3_600.0,
    first_delay_seconds=1.0,
    longest_delay_seconds=60.0,
    longest_honoured_seconds=3_600.0,
)
"""The policy of batch work for rate limits: it waits when a turn with a waiting client would fail."""


class RetryBudget:
    """Tracks how much of a policy is left for the attempts at one answer.

    Only calls and the delays between them count, not the time before a call is admitted.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._attempt_count = 0
        self._seconds = 0.0
        self._rate_limits = None if policy.rate_limits is None else RetryBudget(policy.rate_limits)

    def plan(self, failure: ProviderFailed, *, call_seconds: float, events_given: bool, chance: float) -> float | None:
        """The delay before the next attempt, or None to give up. `call_seconds`: duration of the failed call."""
        if self._rate_limits is not None and isinstance(failure, ProviderRateLimited):
            return self._rate_limits.plan(failure, call_seconds=call_seconds, events_given=events_given, chance=chance)
        self._attempt_count += 1
        self._seconds += call_seconds
        delay = plan_retry(
            self._policy,
            failure,
            attempt=self._attempt_count,
            elapsed_seconds=self._seconds,
            events_given=events_given,
            chance=chance,
        )
        self._seconds += delay or 0.0
        return delay


def plan_retry(
    policy: RetryPolicy,
    error: ProviderFailed,
    *,
    attempt: int,
    elapsed_seconds: float,
    events_given: bool,
    chance: float,
) -> float | None:
    """The delay before the next attempt, or None to give up.

    `attempt`: number of the failed attempt, from 1. `chance`, between 0 and 1, is the jitter: a delay of our own is
    shortened by up to a half, the provider's is lengthened by up to a tenth.
    """
    if events_given or attempt >= policy.attempts or not isinstance(error, _TEMPORARY):
        return None
    asked = error.details.get("retry_after_seconds")
    if isinstance(asked, int | float):
        if asked > policy.longest_honoured_seconds:
            return None
        delay = asked * (1 + 0.1 * chance)
    else:
        doubled = policy.first_delay_seconds * 2 ** (attempt - 1)
        delay = min(doubled, policy.longest_delay_seconds) * (1 - 0.5 * chance)
    return delay if elapsed_seconds + delay <= policy.budget_seconds else None
