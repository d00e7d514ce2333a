"""What a cut costs and saves, in tokens at the price of uncached input.

A request consists of a prefix that the provider may have cached, and the rest. In the append-only order the prefix is
the static layer and the buffer. In the layered order the dynamic block is between them, and belongs to the prefix; if
that changes with each request, the prefix is the static layer alone. Cached tokens cost the read rate, the other tokens
of the prefix cost the write rate, and tokens after the prefix cost 1. A prefix shorter than the model's minimum is not
cached, so its tokens cost 1 too.

Four numbers decide about a cut:

- The *price*: the additional cost of the next exchange, plus the fixed cost of a compaction. It is often negative: an
  expired cache has to be written in any case, and moved tokens leave an uncached buffer.
- The *tail*: the part of the price that does not depend on how much is moved, for writing the dynamic block and the
  kept exchanges again.
- The *saving*: by how much each later call becomes cheaper.
- The *carrying cost*: the savings missed so far, one for each call that has carried the movable exchanges.

A cut is not made if the request after it would be too short to be cached and without the cut will soon be long enough.
A price of zero or less is accepted at once. A positive price is accepted by one of two rules:

- If the usual length of such conversations is unknown: when the carrying cost has reached the price. This is the
  break-even rule of the ski rental problem, which costs at most twice the optimum.
- If it is known: the expected rest of the conversation must save at least the price, and either the carrying cost has
  reached the tail (the economic lot size) or the end is so near that waiting for another exchange gains nothing. A
  conversation that lasts longer than expected is compacted when the carrying cost has reached one and a half times the
  price.

All numbers are derived from the buffer itself, so there is no counter that could be outdated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from server.compaction.state import CompactionState, Exchange
from server.conversation.compaction_policy import CompactionPolicy
from server.providers.model_profile import ModelProfile
from server.providers.pricing import Price

_LONG_LIFETIME_SECONDS: Final = 3_600
_FAMILY_READ: Final = {"gemini-4": 0.05}
_READ: Final = 0.1
_CLAUDE_WRITE: Final = 1.25
_CLAUDE_LONG_WRITE: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The cost of reading and writing the cache, as multiples of an uncached token."""

    read: float
    write: float
    minimum_tokens: int = 0
    assumed: bool = False
    """A price is unknown, and the usual ratio of the family is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """The tokens of a request, without the trigger."""

    static_tokens: int
    dynamic_tokens: int = 0
    """Of a separate dynamic block."""
    buffer_tokens: int
    caches_buffer: bool
    """Whether the provider can cache what follows the static layer."""

    @property
    def total_tokens(self) -> int:
        return self.static_tokens + self.dynamic_tokens + self.buffer_tokens

    @property
    def prefix_tokens(self) -> int:
        """The tokens that the provider can have cached."""
        return self.total_tokens if self.caches_buffer else self.static_tokens


def find_rates(price: Price | None, profile: ModelProfile, lifetime_seconds: float) -> Rates:
    """Return the rates of a model for a cache of this lifetime, or those of its family if a price is unknown."""
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


def estimate_request(prompt: PromptTokens, rates: Rates, *, cached_tokens: int) -> float:
    """Return the cost of one call if the provider has `cached_tokens` of its prefix."""
    prefix = prompt.prefix_tokens
    if prefix < rates.minimum_tokens:
        return float(prompt.total_tokens)
    cached = min(cached_tokens, prefix)
    if cached < rates.minimum_tokens:
        cached = 0
    uncached = prompt.total_tokens - prefix
    return cached * rates.read + (prefix - cached) * rates.write + uncached


_MAX_CARRYING_RATIO: Final = 1.5
_MIN_REMAINDER: Final = 0.25
"""A conversation is always expected to continue for this share of its typical length, or of its length so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The exchanges that move and those that stay."""

    moved: Sequence[Exchange]
    kept: Sequence[Exchange]
    loses_thinking: bool
    """The exchanges that stay are sent without their thinking, because the model is prefix-bound."""

    @property
    def moved_tokens(self) -> int:
        """As they were sent."""
        return sum(exchange.sent_tokens for exchange in self.moved)

    @property
    def segment_tokens(self) -> int:
        """The same exchanges as a transcript."""
        return sum(exchange.segment_tokens for exchange in self.moved)

    @property
    def kept_tokens(self) -> int:
        """As they will be sent."""
        lost = sum(exchange.thinking_tokens for exchange in self.kept) if self.loses_thinking else 0
        return sum(exchange.sent_tokens for exchange in self.kept) - lost


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCost:
    """The price, tail and saving of a cut, see the module."""

    price: float
    tail: float
    saving: float


class CutEstimator:
    """Estimates the cuts of one conversation."""

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
        """When the cache expires; None if it has expired."""

    def estimate(self, cut: Cut, *, is_cold: bool | None = None) -> CutCost:
        """Estimate a cut with the cache as it is, or as if it had expired."""
        cold = self.is_cold if is_cold is None else is_cold
        static, kept_tokens = self._state.static_tokens, cut.kept_tokens
        sent_tokens = sum(exchange.sent_tokens for exchange in cut.kept)
        kept = self._prompt(static, kept_tokens)
        unmoved = self._prompt(static, sent_tokens)
        before = self._prompt(static, sent_tokens + cut.moved_tokens)
        after = self._prompt(static + cut.segment_tokens, kept_tokens)

        def extra_cost(changed: PromptTokens, unchanged: PromptTokens) -> float:
            cached = unchanged.prefix_tokens - self._uncached_answer_tokens()
            return self._cost(changed, 0 if cold else static) - self._cost(unchanged, 0 if cold else cached)

        fixed = self._policy.fixed_cost_tokens
        further_calls = self._calls_per_exchange - 1
        return CutCost(
            price=fixed
            + extra_cost(after, before)
            - further_calls * (self._warm_cost(before) - self._warm_cost(after)),
            tail=fixed + extra_cost(kept, unmoved),
            saving=self._later_cost(before) - self._later_cost(after),
        )

    def delays_caching(self, cut: Cut) -> bool:
        """Return whether the request after the cut is too short to be cached, and without the cut will be long enough
        before the conversation ends.
        """
        state, minimum = self._state, self._rates.minimum_tokens
        after = self._prompt(state.static_tokens + cut.segment_tokens, cut.kept_tokens)
        if not state.caches_buffer or self.is_usually_cold or after.prefix_tokens >= minimum:
            return False
        buffer_tokens = sum(exchange.sent_tokens for exchange in state.exchanges)
        missing = minimum - self._prompt(state.static_tokens, buffer_tokens).prefix_tokens
        remaining = self._remaining_exchanges()
        return remaining is None or missing < remaining * buffer_tokens / len(state.exchanges)

    def is_due(self, cut: Cut, cost: CutCost) -> bool:
        """Return whether to accept a positive price now."""
        carried_cost = self._carrying_cost(cut, cost)
        remaining = self._remaining_exchanges()
        if remaining is None:
            return carried_cost >= cost.price
        if carried_cost >= _MAX_CARRYING_RATIO * cost.price:
            return True
        calls = self._calls_per_exchange
        to_come = cost.saving * remaining * calls
        if to_come - cost.saving * (calls - 1) < cost.price:
            return False
        # The gain of moving one exchange more, against the cost of carrying the others until then.
        another = (to_come - (cost.price - cost.tail)) / len(cut.moved)
        return carried_cost >= cost.tail or another <= cost.saving * calls

    def _carrying_cost(self, cut: Cut, cost: CutCost) -> float:
        exchanges = self._state.exchanges
        keep = self._policy.keep_exchanges
        carried = movable = 0
        for index in range(keep, len(exchanges)):
            carried += exchanges[index].answer_count * movable
            movable += exchanges[index - keep].sent_tokens
        return cost.saving * carried / max(1, cut.moved_tokens)

    def _remaining_exchanges(self) -> float | None:
        typical = self._state.typical_exchange_count
        if typical is None:
            return None
        so_far = self._state.exchange_count
        return max(typical - so_far, _MIN_REMAINDER * max(typical, so_far))

    def _later_cost(self, prompt: PromptTokens) -> float:
        """The average cost of a call. Within an exchange the cache is warm; between exchanges that depends
        on the gaps.
        """
        warm = self._warm_cost(prompt)
        return warm + (self._cost(prompt, 0) - warm) / self._calls_per_exchange if self.is_usually_cold else warm

    def _warm_cost(self, prompt: PromptTokens) -> float:
        return self._cost(prompt, prompt.prefix_tokens)

    def _cost(self, prompt: PromptTokens, cached_tokens: int) -> float:
        return estimate_request(prompt, self._rates, cached_tokens=cached_tokens)

    def _prompt(self, static_tokens: int, buffer_tokens: int) -> PromptTokens:
        return PromptTokens(
            static_tokens=static_tokens,
            dynamic_tokens=self._state.dynamic_tokens,
            buffer_tokens=buffer_tokens,
            caches_buffer=self._state.caches_buffer,
        )

    def _uncached_answer_tokens(self) -> int:
        """The newest answer is not in the cache yet, if the buffer is cached at all."""
        return self._state.exchanges[-1].unsent_tokens if self._state.caches_buffer else 0
