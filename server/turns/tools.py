"""The collaborators and limits that service, runner, queue, checkpoints and recovery of a process share."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from server.caching.maintainer import CacheMaintainer
from server.conversation.notifications import Notification, Notifications
from server.conversation.store import Store
from server.payload.preparation import PayloadPreparation
from server.providers.call_slots import CallSlots
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.turns.observer import NoFollower, TurnFollower, TurnObserver
from server.turns.stored import OpenFold


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits of turns."""

    lease_seconds: float = 30.0
    """After this time without a heartbeat, another process may end the turn."""
    flush_seconds: float = 0.25
    """The interval of checkpoints."""
    ending_seconds: float = 120.0
    """How long a turn may take to end after its provider has ended."""
    queue_limit: int = 100
    """The maximum number of turns that wait for one conversation."""
    queue_seconds: float = 300.0
    """How long a turn waits at most."""


class NoNotifications:
    """Implements `Notifications` for turns that no other process reads or cancels."""

    def watch(self, conversation_id: str, *news: Notification) -> "NoNotifications":  # noqa: ARG002  reason: the port's
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def call_when_notified(self, callback: Callable[[], None]) -> None:
        """Do nothing."""

    async def wait(self, limit_seconds: float) -> bool:
        await asyncio.sleep(limit_seconds)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTools:
    """See the module. Built once for a process."""

    owner: str
    """The name of this process on its leases."""
    store: Store
    preparation: PayloadPreparation
    observer: TurnObserver
    folds: Mapping[str, OpenFold]
    """By provider; of all providers, also of those without a key."""
    notifications: Notifications = field(default_factory=NoNotifications)
    limits: TurnLimits = field(default_factory=TurnLimits)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    follower: TurnFollower = field(default_factory=NoFollower)
    """Notified of every answer, after its last event was sent."""
    call_slots: CallSlots = field(default_factory=CallSlots)
    cache_maintainer: CacheMaintainer | None = None
    """None if this process maintains no explicit caches."""
