"""How long a client tries again.

Only what cannot do harm is repeated: a request that never left, one that may be repeated by its nature or its
idempotency key, and one that the server refused with the word that waiting helps.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from server.web.client.errors import ClientError, ServerUnreachable, StrataProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """The time between attempts doubles, and shrinks by chance so that many clients do not come back at once."""

    seconds: float = 60.0
    """From the first failure on, without anything new. 0: nothing is tried again."""
    first_wait_seconds: float = 0.25
    longest_wait_seconds: float = 8.0


OnRetry: TypeAlias = Callable[[ClientError, float], None]
"""Told why something is tried again, and in how many seconds."""


def never_mind(_error: ClientError, _wait_seconds: float) -> None:
    """For those who need not know."""


class Waiting:
    """The attempts at one thing. Anything new starts the time afresh: see `progressed`."""

    __slots__ = ("_deadline", "_on_retry", "_retry_budget", "_wait_seconds")

    def __init__(self, retry_budget: RetryBudget, on_retry: OnRetry) -> None:
        self._retry_budget = retry_budget
        self._on_retry = on_retry
        self._deadline: float | None = None
        self._wait_seconds = retry_budget.first_wait_seconds

    def progressed(self) -> None:
        self._deadline = None
        self._wait_seconds = self._retry_budget.first_wait_seconds

    async def wait_after(self, error: ClientError, *, repeatable: bool) -> None:
        """Comes back when it is time for the next attempt; raises the error where there is none."""
        least = _min_wait(error, repeatable=repeatable)
        if least is None:
            raise error
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._retry_budget.seconds
        wait = max(least, self._wait_seconds * random.uniform(0.5, 1))  # noqa: S311  reason: spreads load, keeps no secret
        if now + wait > self._deadline:
            raise error
        self._wait_seconds = min(self._wait_seconds * 2, self._retry_budget.longest_wait_seconds)
        self._on_retry(error, wait)
        await asyncio.sleep(wait)


def _min_wait(error: ClientError, *, repeatable: bool) -> float | None:
    """None where the same request must not be sent again."""
    match error:
        case ServerUnreachable():
            return 0.0 if repeatable or not error.sent else None
        case StrataProblem():
            return error.retry_after_seconds
        case _:
            return None
