"""The port for news between processes: something happened to a conversation, look again.

An announcement carries no data and may be lost, doubled or late; whoever waits for one looks at the store after every
wait, however it ended. What is announced was durable before.
"""

from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self


class Notification(StrEnum):
    """What happened."""

    GROWN = "grown"
    """More of a running answer can be read."""
    ENDED = "ended"
    """A turn has ended: its answer can be read and the conversation is free."""
    CANCELLING = "cancelling"
    """Somebody wants the running turn to stop."""


class Watch(Protocol):
    """Somebody's eye on one conversation, from entering to leaving the block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def wait(self, limit_seconds: float) -> bool:
        """Until there is news since the last wait (or since entering), or the time is over. Whether there was news."""
        ...


class Notifications(Protocol):
    """What this process hears of."""

    def watch(self, conversation_id: str, *news: Notification) -> Watch:
        """An eye for these kinds of news alone. Entering it reads nothing."""
        ...
