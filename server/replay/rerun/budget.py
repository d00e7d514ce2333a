"""Whether the next call of a replay may leave: a decision over what is spent, what is on its way, and the clock."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from server.conversation.errors import PriceUnknown
from server.replay.rerun.replay import CallEstimate, CallPermission, Granted, ReplayLimits, ReplayState, Stopped, Wait

_SETTLING_SECONDS: Final = 1.0
"""How long to wait for calls on their way to turn out cheaper than they might have been."""
_MINUTE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A replay at the moment in which a call wants to leave."""

    state: ReplayState
    limits: ReplayLimits
    spent_usd: Decimal
    spent_tokens: int
    reserved_usd: Decimal
    reserved_tokens: int
    next_call_at: datetime | None
    """None: no call has left yet, or there is no limit."""
    held_until: datetime | None
    """Since the provider has asked for patience."""
    now: datetime


def plan_call(standing: Standing, estimate: CallEstimate) -> CallPermission:
    """Raises `PriceUnknown` where the budget is in money and the estimate is not.

    What is spent or on its way never comes to more than the budget, as long as no call turns out dearer than its
    estimate. `Stopped` by the budget is the first word on it: the replay is still called running.
    """
    if standing.state is not ReplayState.RUNNING:
        return Stopped(state=standing.state)
    if estimate.usd is None and standing.limits.budget_usd is not None:
        raise PriceUnknown
    if not _suffices(standing, estimate, with_reserved=False):
        return Stopped(state=ReplayState.STOPPED_BY_BUDGET)
    if not _suffices(standing, estimate, with_reserved=True):
        return Wait(seconds=_SETTLING_SECONDS)
    ready_at = max(filter(None, (standing.held_until, standing.next_call_at)), default=standing.now)
    if ready_at > standing.now:
        return Wait(seconds=(ready_at - standing.now).total_seconds())
    return Granted()


def is_in_the_way(standing: Standing, estimate: CallEstimate) -> bool:
    """Whether the call would fit, were it not for what is on its way."""
    fits = standing.state is ReplayState.RUNNING and _suffices(standing, estimate, with_reserved=False)
    return fits and not _suffices(standing, estimate, with_reserved=True)


def next_call_after(limits: ReplayLimits, now: datetime) -> datetime | None:
    """When the next call may leave after one that leaves now."""
    return None if limits.calls_per_minute is None else now + _MINUTE / limits.calls_per_minute


def is_spent(limits: ReplayLimits, spent_usd: Decimal, spent_tokens: int) -> bool:
    """Whether there is no budget left for any call."""
    return (limits.budget_usd is not None and spent_usd >= limits.budget_usd) or (
        limits.budget_tokens is not None and spent_tokens >= limits.budget_tokens
    )


def _suffices(standing: Standing, estimate: CallEstimate, *, with_reserved: bool) -> bool:
    limits = standing.limits
    usd = standing.spent_usd + (estimate.usd or Decimal(0))
    tokens = standing.spent_tokens + estimate.tokens
    if with_reserved:
        usd += standing.reserved_usd
        tokens += standing.reserved_tokens
    return (limits.budget_usd is None or usd <= limits.budget_usd) and (
        limits.budget_tokens is None or tokens <= limits.budget_tokens
    )
