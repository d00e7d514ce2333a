"""What the compactor knows and what it decides: state, plan, decision. The rules are in `server.compaction.planner`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from server.compaction.exchange import Exchange
from server.conversation.payload import LayerOrder


class CompactionReason(StrEnum):
    """Why exchanges are moved."""

    THRESHOLD_TURNS = "threshold_turns"
    THRESHOLD_TOKENS = "threshold_tokens"
    RENT = "rent"
    """It pays, and has been waited for long enough."""
    COLD_CACHE = "cold_cache"
    """The next call writes everything anyway, so that compacting costs nothing."""
    WINDOW = "window"
    REQUESTED = "requested"


class HoldReason(StrEnum):
    """Why nothing is moved."""

    SWITCHED_OFF = "switched_off"
    NOTHING_TO_MOVE = "nothing_to_move"
    """All exchanges of the buffer are among those that stay."""
    BLOCKED_BY_OPEN_CALL = "blocked_by_open_call"
    EXCHANGE_UNFINISHED = "exchange_unfinished"
    """An answer is still to come."""
    BELOW_THRESHOLD = "below_threshold"
    SAVES_NOTHING = "saves_nothing"
    """Later calls would not be cheaper."""
    NOT_YET_WORTH_IT = "not_yet_worth_it"
    WAITS_FOR_COLD_CACHE = "waits_for_cold_cache"
    """Calls are so far apart that the cache is usually cold, and then it costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionState:
    """All that the decision depends on."""

    exchanges: Sequence[Exchange]
    """Of the buffer, oldest first."""
    static_tokens: int
    """Tools and segments included."""
    dynamic_tokens: int
    order: LayerOrder
    last_call_at: datetime | None
    """When the provider's cache was used last; None where it never was."""
    cache_lifetime_seconds: float
    typical_gap_seconds: float | None = None
    """Between an answer and the next user task of this conversation; None where it is not known."""
    exchange_count: int = 0
    """Of the whole conversation so far, those that were compacted included."""
    typical_exchange_count: float | None = None
    """How long conversations of this kind get; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """Which turns to move, why, and what is expected of it."""

    first_seq: int
    last_seq: int
    exchange_count: int
    moved_tokens: int
    """As they were sent."""
    segment_tokens: int
    reason: CompactionReason
    price_tokens: float
    """What the next exchange costs more, and the fixed cost; negative where it costs less."""
    saved_tokens_per_call: float
    """In tokens at the price of uncached input."""
    saved_usd_per_call: Decimal | None
    """None where the price is not known."""
    thinking_kept: bool
    """False on a prefix-bound model: the turns that stay are sent without their thinking from now on."""
    rates_assumed: bool
    """The price of the model is not known; the usual ratios of its family were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionDecision:
    """A plan, or why there is none."""

    plan: CompactionPlan | None = None
    hold: HoldReason | None = None
    """None where there is a plan."""
    window_short: bool = False
    """The request is near the model's window. Without a plan this is for an operator to see."""
    needs_summary: bool = False
    """Moving exchanges is not enough for the window: segments have to be summarised."""
    ask_again_at: datetime | None = None
    """Where nothing is moved now, but would be when the cache has gone cold."""
