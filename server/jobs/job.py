"""What a job is, independent of the queue."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kind of work that any worker can do.

    The work must be safe to repeat: it is repeated if a worker dies or loses its database. It may be cancelled at any
    await. `Unavailable` postpones it. Any other error ends it; the error's text goes to the log and not into the
    queue's tables, which erasing a conversation does not reach.
    """

    name: str
    """The entrypoint in the queue. Stored rows contain it, so it must never be renamed."""
    run: Callable[[bytes], Awaitable[None]]
    """The work, called with the payload that the job was queued with."""
    cron: str | None = None
    """When to queue the job automatically, with an empty payload: minute, hour, day, month, weekday (UTC) and, if
    given, seconds. A time that passed while no worker ran is made up for when the next worker starts."""
