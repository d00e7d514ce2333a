"""What a request costs, and what a buffer costs that is carried along: the sums behind the compactor.

The unit is one uncached input token of the model. Of a request the provider may have cached a prefix: the static layer
in the layered order, static and buffer in the append-only one. What it knows is read at the price of reading, the rest
of the prefix is written at the price of writing, what stands behind the prefix costs 1. A prefix shorter than the
model's minimum is not cached, so it costs 1 too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from server.compaction.state import CompactionState, Exchange
from server.conversation.compaction_policy import CompactionPolicy
from server.conversation.payload import LayerOrder
from server.providers.model_profile import ModelProfile
from server.providers.pricing import Price

_LONG_LIFETIME_SECONDS: Final = 3_600
_FAMILY_READ: Final = {"gemini-4": 0.05}
_READ: Final = 0.1
_CLAUDE_WRITE: Final = 1.25
_CLAUDE_LONG_WRITE: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What reading and writing the cache costs, as multiples of an uncached token."""

    read: float
    write: float
    minimum_tokens: int = 0
    assumed: bool = False
    """Some price is not known: these are the usual ratios of the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The tokens of a request that compaction can change. The trigger and a dynamic layer of its own are not here."""

    order: LayerOrder
    static_tokens: int
    buffer_tokens: int

    @property
    def prefix_tokens(self) -> int:
        """What the provider can have cached of it."""
        buffered = self.buffer_tokens if self.order is LayerOrder.APPEND_ONLY else 0
        return self.static_tokens + buffered


def find_rates(price: Price | None, profile: ModelProfile, lifetime_seconds: float) -> Rates:
    """The rates of a model for a cache of this lifetime; those of its family where a price is not known."""
    is_long = lifetime_seconds >= _LONG_LIFETIME_SECONDS
    read = _FAMILY_READ.get(profile.family, _READ)
    write = 1.0
    if profile.breakpoints:
        write = _CLAUDE_LONG_WRITE if is_long else _CLAUDE_WRITE
    if price is not None and price.fresh_input > 0:
        write = float((price.cache_write_long if is_long else price.cache_write) / price.fresh_input)
        if price.cache_read is not None:
            read = float(price.cache_read / price.fresh_input)
    return Rates(
        read=read,
        write=write,
        minimum_tokens=profile.cache_minimum_tokens,
        assumed=price is None or price.cache_read is None,
    )


def request_cost(load: Load, rates: Rates, *, known_tokens: int) -> float:
    """What the load costs in one call of whose prefix the provider knows so many tokens."""
    prefix = load.prefix_tokens
    if prefix < rates.minimum_tokens:
        return float(load.static_tokens + load.buffer_tokens)
    known = min(known_tokens, prefix)
    if known < rates.minimum_tokens:
        known = 0
    behind = load.static_tokens + load.buffer_tokens - prefix
    return known * rates.read + (prefix - known) * rates.write + behind


_PATIENCE: Final = 1.5
_MIN_REMAINDER: Final = 0.25
"""Of the typical length, or of the length so far: what a conversation is always expected to go on for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Between the exchanges that move and those that stay."""

    moved: Sequence[Exchange]
    kept: Sequence[Exchange]
    loses_thinking: bool
    """What stays is sent without its thinking: the model is prefix-bound."""

    @property
    def moved_tokens(self) -> int:
        """As they were sent."""
        return sum(exchange.sent_tokens for exchange in self.moved)

    @property
    def segment_tokens(self) -> int:
        """The same as a transcript."""
        return sum(exchange.segment_tokens for exchange in self.moved)

    @property
    def kept_tokens(self) -> int:
        """As they will be sent."""
        lost = sum(exchange.thinking_tokens for exchange in self.kept) if self.loses_thinking else 0
        return sum(exchange.sent_tokens for exchange in self.kept) - lost


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """See the module for what they are."""

    price: float
    tail: float
    saving: float


class CutCosts:
    """Weighs the cuts of one state."""

    def __init__(self, state: CompactionState, rates: Rates, policy: CompactionPolicy, now: datetime) -> None:
        self._state = state
        self._rates = rates
        self._policy = policy
        calls = sum(exchange.answer_count for exchange in state.exchanges)
        self._calls_per_exchange = max(1.0, calls / max(1, len(state.exchanges)))
        last = state.last_call_at
        lifetime = timedelta(seconds=state.cache_lifetime_seconds)
        gap = state.typical_gap_seconds
        self.is_cold = last is None or now - last >= lifetime
        self.is_usually_cold = gap is not None and gap >= state.cache_lifetime_seconds
        self.cold_at = None if last is None or self.is_cold else last + lifetime
        """When the cache will be cold; None where it is."""

    def estimate(self, cut: Cut, *, is_cold: bool | None = None) -> CutCost:
        """As things are, or as they would be with a cold cache."""
        cold = self.is_cold if is_cold is None else is_cold
        static, kept_tokens = self._state.static_tokens, cut.kept_tokens
        sent_tokens = sum(exchange.sent_tokens for exchange in cut.kept)
        kept = self._load(static, kept_tokens)
        unmoved = self._load(static, sent_tokens)
        before = self._load(static, sent_tokens + cut.moved_tokens)
        after = self._load(static + cut.segment_tokens, kept_tokens)

        def more(changed: Load, unchanged: Load) -> float:
            known = unchanged.prefix_tokens - self._unsent_tokens()
            return self._cost(changed, 0 if cold else static) - self._cost(unchanged, 0 if cold else known)

        fixed = self._policy.fixed_cost_tokens
        further_calls = self._calls_per_exchange - 1
        return CutCost(
            price=fixed + more(after, before) - further_calls * (self._warm(before) - self._warm(after)),
            tail=fixed + more(kept, unmoved),
            saving=self._later(before) - self._later(after),
        )

    def is_due(self, cut: Cut, cost: CutCost) -> bool:
        """Whether to pay a positive price now."""
        rent = self._rent(cut, cost)
        remaining = self._remaining_exchanges()
        if remaining is None:
            return rent >= cost.price
        if rent >= _PATIENCE * cost.price:
            return True
        calls = self._calls_per_exchange
        to_come = cost.saving * remaining * calls
        if to_come - cost.saving * (calls - 1) < cost.price:
            return False
        # One exchange more to move: what it would save to the end and cost to write, against carrying the others.
        another = (to_come - (cost.price - cost.tail)) / len(cut.moved)
        return rent >= cost.tail or another <= cost.saving * calls

    def _rent(self, cut: Cut, cost: CutCost) -> float:
        exchanges = self._state.exchanges
        keep = self._policy.keep_exchanges
        carried = movable = 0
        for place in range(keep, len(exchanges)):
            carried += exchanges[place].answer_count * movable
            movable += exchanges[place - keep].sent_tokens
        return cost.saving * carried / max(1, cut.moved_tokens)

    def _remaining_exchanges(self) -> float | None:
        typical = self._state.typical_exchange_count
        if typical is None:
            return None
        so_far = self._state.exchange_count
        return max(typical - so_far, _MIN_REMAINDER * max(typical, so_far))

    def _later(self, load: Load) -> float:
        """One call in the mean: within an exchange the cache is warm, between exchanges it depends on the gaps."""
        warm = self._warm(load)
        return warm + (self._cost(load, 0) - warm) / self._calls_per_exchange if self.is_usually_cold else warm

    def _warm(self, load: Load) -> float:
        return self._cost(load, load.prefix_tokens)

    def _cost(self, load: Load, known_tokens: int) -> float:
        return request_cost(load, self._rates, known_tokens=known_tokens)

    def _load(self, static_tokens: int, buffer_tokens: int) -> Load:
        return Load(order=self._state.order, static_tokens=static_tokens, buffer_tokens=buffer_tokens)

    def _unsent_tokens(self) -> int:
        """The newest answer is not in the cache yet, where the buffer is cached at all."""
        return self._state.exchanges[-1].unsent_tokens if self._state.order is LayerOrder.APPEND_ONLY else 0
