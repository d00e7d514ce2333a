"""The budget of a replay: how much a call may cost at most, and whether it may be sent now. Pure decisions.

The estimate of a call is reserved before the call is sent. It is rather too high than too low, because a call that
costs more than its estimate exceeds the budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.call import Call
from server.conversation.errors import PriceUnknown
from server.conversation.usage import Usage
from server.providers.model_profile import find_profile
from server.providers.pricing import price_call
from server.replay.rerun.replay import CallEstimate, CallPermission, Granted, ReplayLimits, ReplayState, Stopped, Wait

_SETTLING_SECONDS: Final = 1.0
"""How long to wait for open calls, which may cost less than their estimates."""
_MINUTE: Final = timedelta(minutes=1)
_MIN_OUTPUT_TOKENS: Final = 1_024
_MARGIN: Final = 1.25
"""Other models split the same text into more tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The state of a replay when a call is about to be sent."""

    state: ReplayState
    limits: ReplayLimits
    spent_usd: Decimal
    spent_tokens: int
    reserved_usd: Decimal
    reserved_tokens: int
    next_call_at: datetime | None
    """None if no call was sent yet, or if there is no limit."""
    held_until: datetime | None
    """When the provider accepts calls again, if it has limited the rate."""
    now: datetime


def plan_call(budget: BudgetState, estimate: CallEstimate) -> CallPermission:
    """Decide whether a call may be sent.

    The spending and the reservations together never exceed the budget, unless a call costs more than its estimate.
    `Stopped` with `STOPPED_BY_BUDGET` is returned while the stored state is still `running`: the caller changes it.
    Raises `PriceUnknown` if the budget is in dollars and the estimate has no price.
    """
    if budget.state is not ReplayState.RUNNING:
        return Stopped(state=budget.state)
    if estimate.usd is None and budget.limits.budget_usd is not None:
        raise PriceUnknown
    if not _suffices(budget, estimate, with_reserved=False):
        return Stopped(state=ReplayState.STOPPED_BY_BUDGET)
    if not _suffices(budget, estimate, with_reserved=True):
        return Wait(seconds=_SETTLING_SECONDS)
    ready_at = max(filter(None, (budget.held_until, budget.next_call_at)), default=budget.now)
    if ready_at > budget.now:
        return Wait(seconds=(ready_at - budget.now).total_seconds())
    return Granted()


def must_wait_for_open_calls(budget: BudgetState, estimate: CallEstimate) -> bool:
    """Return whether the call fits into the budget, but not together with the estimates of open calls."""
    fits = budget.state is ReplayState.RUNNING and _suffices(budget, estimate, with_reserved=False)
    return fits and not _suffices(budget, estimate, with_reserved=True)


def next_call_after(limits: ReplayLimits, now: datetime) -> datetime | None:
    """Return when the next call may be sent after one that is sent now; None if there is no limit."""
    return None if limits.calls_per_minute is None else now + _MINUTE / limits.calls_per_minute


def is_spent(limits: ReplayLimits, spent_usd: Decimal, spent_tokens: int) -> bool:
    """Return whether the budget has nothing left for any call."""
    return (limits.budget_usd is not None and spent_usd >= limits.budget_usd) or (
        limits.budget_tokens is not None and spent_tokens >= limits.budget_tokens
    )


def estimate_call(provider: str, model: str, input_tokens: int, output_tokens: int) -> CallEstimate:
    """Estimate the maximum of a call: if the model has a cache, the whole input is written to it for the long time."""
    profile = find_profile(provider, model)
    writes = profile.breakpoints > 0
    usage = Usage(
        fresh_input_tokens=0 if writes else input_tokens,
        cache_write_tokens=input_tokens if writes else 0,
        output_tokens=min(output_tokens, profile.output_limit_tokens),
    )
    cost = price_call(model, datetime.now(UTC), usage, long_write_tokens=usage.cache_write_tokens)
    return CallEstimate(usd=None if cost is None else cost.total_usd, tokens=count_tokens(usage))


def estimate_input_tokens(manifest: Sequence[Mapping[str, JsonValue]], recorded: Call | None) -> int | None:
    """Estimate the tokens of a request with these blocks from the tokens per byte of the recorded request.

    Images have far fewer tokens per byte than texts, so the size alone would give a hundred times too much. None if the
    usage of the recorded call is not known.
    """
    if recorded is None or recorded.end is None:
        return None
    length, tokens = _length_of(recorded.start.manifest), recorded.end.usage.input_tokens
    return round(_MARGIN * tokens * _length_of(manifest) / length) if length and tokens else None


def estimate_output_tokens(limit_tokens: int | None, recorded: Usage | None) -> int:
    """Estimate the tokens of an answer: the limit of the settings, or without one twice the recorded usage."""
    doubled = 0 if recorded is None else 2 * (recorded.output_tokens + recorded.reasoning_tokens)
    return limit_tokens or max(_MIN_OUTPUT_TOKENS, doubled)


def count_tokens(usage: Usage) -> int:
    """Return the tokens of all buckets."""
    return usage.input_tokens + usage.output_tokens + usage.reasoning_tokens


def _length_of(manifest: Sequence[Mapping[str, JsonValue]]) -> int:
    return sum(entry["length"] for entry in manifest)


def _suffices(budget: BudgetState, estimate: CallEstimate, *, with_reserved: bool) -> bool:
    limits = budget.limits
    usd = budget.spent_usd + (estimate.usd or Decimal(0))
    tokens = budget.spent_tokens + estimate.tokens
    if with_reserved:
        usd += budget.reserved_usd
        tokens += budget.reserved_tokens
    return (limits.budget_usd is None or usd <= limits.budget_usd) and (
        limits.budget_tokens is None or tokens <= limits.budget_tokens
    )
