"""Whether an explicit cache is worth its storage, and whether one may be used.

An explicit cache is guaranteed and paid for by the hour; an implicit one is free and comes when it likes. The explicit
one freezes the discount at the static text, so it is only for requests whose static text is all that repeats: in the
append-only order the implicit cache grows with the conversation, and an explicit one would stand in its way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.caching.expectation import CacheExpectation
from server.conversation.cache_register import CacheKey, RegisteredCache
from server.conversation.payload import LayerOrder, Payload
from server.providers.model_profile import ModelProfile
from server.providers.pricing import Price, find_price

DEFAULT_TTL_SECONDS: Final = 3600
_MILLION: Final = Decimal(1_000_000)
_HOUR: Final = 3600
_MARGIN_SECONDS: Final = 30
"""A cache this close to its end is left alone: the request may arrive after it."""
_FEWEST_CALLS: Final = 3
"""Before so many calls have told what the implicit cache is worth, nothing is decided."""


class ExplicitChoice(StrEnum):
    """What an assistant's settings say about explicit caches."""

    AUTO = "auto"
    """Where they pay."""
    ON = "on"
    """Wherever they can be had, within the budget."""
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The member `cache` of an assistant's settings."""

    explicit: ExplicitChoice = ExplicitChoice.AUTO
    ttl_seconds: int | None = None
    """None leaves it to Strata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is known of the requests that a cache would serve."""

    static_tokens: int
    calls_last_hour: int
    observed_calls: int
    """Those whose share of the implicit cache was seen."""
    implicit_share: Decimal
    """How much of the static text the implicit cache gave them, from 0 to 1."""


def may_have_cache(profile: ModelProfile, order: LayerOrder, settings: CacheSettings) -> bool:
    """Whether explicit caches are for such requests at all."""
    return profile.explicit_caches and order is LayerOrder.LAYERED and settings.explicit is not ExplicitChoice.OFF


def choose_cache(cache: RegisteredCache | None, key: CacheKey, now: datetime) -> RegisteredCache | None:
    """The cache, where it stands for the very prefix that is asked with and still has some time."""
    if cache is None or cache.key != key:
        return None
    return cache if (cache.expires_at - now).total_seconds() > _MARGIN_SECONDS else None


def wants_cache(
    settings: CacheSettings, demand: Demand, profile: ModelProfile, price: Price | None, *, ttl_seconds: int
) -> bool:
    """Whether to make one. For `auto` the calls of the last hour, come again, have to pay for making and storing it."""
    if demand.static_tokens < profile.cache_minimum_tokens:
        return False
    if settings.explicit is ExplicitChoice.ON:
        return True
    if price is None or price.cache_read is None or price.cache_storage_hour is None:
        return False
    if demand.observed_calls < _FEWEST_CALLS:
        return False
    saved = demand.calls_last_hour * (1 - demand.implicit_share) * (price.fresh_input - price.cache_read)
    # Making it is a call's input; it lasts for its time to live, which use prolongs.
    paid = price.cache_storage_hour + price.fresh_input * _HOUR / max(ttl_seconds, _HOUR)
    return saved > paid


def storage_usd_per_hour(token_counts: Mapping[str, int], at: datetime) -> Decimal:
    """What it costs to keep so many tokens, by model. A model without a price of storage counts as the dearest."""
    return sum(((_storage_price(model, at) * tokens / _MILLION) for model, tokens in token_counts.items()), Decimal(0))


def needs_prolonging(cache: RegisteredCache, now: datetime, *, ttl_seconds: int) -> bool:
    """Whether less than half of its time is left."""
    return (cache.expires_at - now).total_seconds() < ttl_seconds / 2


_DEAREST: Final = Decimal("4.50")


def _storage_price(model: str, at: datetime) -> Decimal:
    price = find_price(model, at, 0)
    return _DEAREST if price is None or price.cache_storage_hour is None else price.cache_storage_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What was decided for one payload."""

    payload: Payload
    """As it leaves."""
    expectation: CacheExpectation
    key: CacheKey
    """What an explicit cache for it would be found by."""
    settings: CacheSettings
    may_have_cache: bool
    """Whether an explicit cache could stand for its static text and tools."""
    cache: RegisteredCache | None
    """The one that does."""
