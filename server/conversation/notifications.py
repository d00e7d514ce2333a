"""The port for notifications between processes: a conversation has changed.

A notification carries no data and may be lost, duplicated or late. A waiter reads the store after every wait, however
it ended. Changes are durable before they are announced.
"""

from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self


class Notification(StrEnum):
    """What happened."""

    GROWN = "grown"
    """More of a running answer can be read. Announced only while it is requested from the store."""
    ENDED = "ended"
    """A turn has ended: its answer can be read, and the next input is accepted."""
    CANCELLING = "cancelling"
    """A cancellation of the running turn was requested."""


class Watch(Protocol):
    """A subscription to one conversation, active inside its `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def call_when_notified(self, callback: Callable[[], None]) -> None:
        """Set a callback for notifications, for a caller that does not wait yet."""
        ...

    async def wait(self, limit_seconds: float) -> bool:
        """Wait for a notification since the last wait (or since entering). Returns False after `limit_seconds` without
        one.
        """
        ...


class Notifications(Protocol):
    """The notifications that this process receives."""

    def watch(self, conversation_id: str, *kinds: Notification) -> Watch:
        """Subscribe to these kinds of notifications. Entering does no I/O."""
        ...
