"""When a failed call is made again.

Only before anything of the answer has been given out: what was heard cannot be unheard. Only for failures that may
pass. Never longer than the budget. The provider's own delay is honoured up to a cap; beyond it the failure is returned,
so that a caller is told "in an hour" at once and not after one.
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

_PASSING: Final = (
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
    """How patient the server is on behalf of a turn."""

    attempts: int = 4
    budget_seconds: float = 60.0
    """From the first call's start to the last one's."""
    first_delay_seconds: float = 0.5
    longest_delay_seconds: float = 8.0
    """Of our own delays, which double."""
    longest_honoured_seconds: float = 30.0
    """Of the provider's."""
    max_continuations: int = 8
    """How often an answer that the provider pauses is continued within one turn. Then the turn ends as `paused`."""


def plan_retry(
    policy: RetryPolicy,
    error: ProviderFailed,
    *,
    attempt: int,
    elapsed_seconds: float,
    events_given: bool,
    chance: float,
) -> float | None:
    """How long to wait before the next attempt, or None to give up.

    `attempt` is the one that failed, from 1. `chance`, between 0 and 1, spreads clients that failed together: a delay
    of our own is shortened by up to a half, the provider's is lengthened by up to a tenth.
    """
    if events_given or attempt >= policy.attempts or not isinstance(error, _PASSING):
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
