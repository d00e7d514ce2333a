"""What a job is, without a word about the queue that carries it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

Work: TypeAlias = Callable[[bytes], Awaitable[None]]
"""The work itself, given the payload that it was queued with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kind of work that any worker can do.

    The work must be repeatable: it is done once as a rule, and again where a worker died over it or lost its database.
    It may be cancelled at any await. `Unavailable` postpones it; any other error ends it, and what it had to say goes
    to the log and not into the queue's tables, which no erasure reaches.
    """

    name: str
    """What the queue calls it. Rows in the database carry it: it is never renamed."""
    run: Work
    cron: str | None = None
    """When it is queued by itself, with an empty payload: minute, hour, day, month, weekday in UTC, then if need be
    seconds. A time that passed without any worker is made up for by the next one that starts, and so is the first."""
