"""What a request costs, and what a buffer costs that is carried along: the sums behind the compactor.

The unit is one uncached input token of the model. Of a request the provider may have cached a prefix: the static layer
in the layered order, static and buffer in the append-only one. What it knows is read at the price of reading, the rest
of the prefix is written at the price of writing, what stands behind the prefix costs 1. A prefix shorter than the
model's minimum is not cached, so it costs 1 too.
"""

from dataclasses import dataclass
from typing import Final

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


def cost_of(load: Load, rates: Rates, *, known_tokens: int) -> float:
    """What the load costs in one call of whose prefix the provider knows so many tokens."""
    prefix = load.prefix_tokens
    if prefix < rates.minimum_tokens:
        return float(load.static_tokens + load.buffer_tokens)
    known = min(known_tokens, prefix)
    if known < rates.minimum_tokens:
        known = 0
    behind = load.static_tokens + load.buffer_tokens - prefix
    return known * rates.read + (prefix - known) * rates.write + behind
