"""What running turns takes, gathered once for a process."""

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
from server.turns.follower import NoFollower, TurnFollower
from server.turns.observer import TurnObserver
from server.turns.stored import OpenFold


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Times and numbers of turns."""

    lease_seconds: float = 30.0
    """How long a process may be silent before another ends its turns."""
    flush_seconds: float = 0.25
    """How often what has arrived is written down."""
    ending_seconds: float = 120.0
    """How long a turn may take to end once its provider has ended."""
    queue_limit: int = 100
    """How many turns may wait for one conversation."""
    queue_seconds: float = 300.0
    """How long one of them waits at most."""


class NoNotifications:
    """Implements `Notifications` for turns that no other process reads or cancels."""

    def watch(self, conversation_id: str, *news: Notification) -> "NoNotifications":  # noqa: ARG002  reason: the port's
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def call_when_notified(self, callback: Callable[[], None]) -> None:
        """Nothing."""

    async def wait(self, limit_seconds: float) -> bool:
        await asyncio.sleep(limit_seconds)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTools:
    """The parts."""

    owner: str
    """What this process is called on the leases that it holds."""
    store: Store
    preparation: PayloadPreparation
    observer: TurnObserver
    folds: Mapping[str, OpenFold]
    """By provider, of all that there are."""
    notifications: Notifications = field(default_factory=NoNotifications)
    limits: TurnLimits = field(default_factory=TurnLimits)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    follower: TurnFollower = field(default_factory=NoFollower)
    """Told of every answer, when it is durable and everybody else has heard of it."""
    call_slots: CallSlots = field(default_factory=CallSlots)
    cache_maintainer: CacheMaintainer | None = None
    """None where nobody keeps explicit caches."""
