"""Whether an explicit cache is worth its storage, and whether a request can use one.

An explicit cache is guaranteed and charged by the hour. An implicit cache is free and not guaranteed. An explicit cache
covers only the static text and tools, and a request that names one reads nothing else from the implicit cache. So it is
used only in the layered order, and there only if the implicit cache reads less: that covers the buffer too while the
dynamic block does not change. In the append-only order the implicit cache always grows with the conversation.
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
"""A cache that expires sooner is not used, because the request may arrive too late."""
_MIN_OBSERVED_CALLS: Final = 3
"""Nothing is decided before the implicit cache was observed in this number of calls."""


class ExplicitChoice(StrEnum):
    """The assistant's setting for explicit caches."""

    AUTO = "auto"
    """If they pay off."""
    ON = "on"
    """Whenever possible, within the budget."""
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The member `cache` of an assistant's settings."""

    explicit: ExplicitChoice = ExplicitChoice.AUTO
    ttl_seconds: int | None = None
    """None for the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The observed requests that a cache would serve."""

    static_tokens: int
    calls_last_hour: int
    observed_calls: int
    """Calls whose implicit cache read was observed."""
    implicit_share: Decimal
    """What they read from the implicit cache, as a share of the static text. Above 1 if they read the buffer too, which
    they would not do with an explicit cache."""


def supports_cache(profile: ModelProfile, order: LayerOrder, settings: CacheSettings) -> bool:
    """Return whether explicit caches can be used for such requests."""
    return profile.explicit_caches and order is LayerOrder.LAYERED and settings.explicit is not ExplicitChoice.OFF


def choose_cache(cache: RegisteredCache | None, key: CacheKey, now: datetime) -> RegisteredCache | None:
    """Return the cache if it is for exactly this prefix and does not expire too soon."""
    if cache is None or cache.key != key:
        return None
    return cache if (cache.expires_at - now).total_seconds() > _MARGIN_SECONDS else None


def is_worthwhile(
    settings: CacheSettings, demand: Demand, profile: ModelProfile, price: Price | None, *, ttl_seconds: int
) -> bool:
    """Return whether to create a cache. For `auto`, the calls of the last hour, if repeated, must save its creation and
    storage.
    """
    if demand.static_tokens < profile.cache_minimum_tokens:
        return False
    if settings.explicit is ExplicitChoice.ON:
        return True
    if price is None or price.cache_read is None or price.cache_storage_hour is None:
        return False
    if demand.observed_calls < _MIN_OBSERVED_CALLS:
        return False
    savings = demand.calls_last_hour * (1 - demand.implicit_share) * (price.fresh_input - price.cache_read)
    # Creating it costs the input of one call. It lives for its lifetime, which every use renews.
    costs = price.cache_storage_hour + price.fresh_input * _HOUR / max(ttl_seconds, _HOUR)
    return savings > costs


def storage_usd_per_hour(token_counts: Mapping[str, int], at: datetime) -> Decimal:
    """Return the cost of storing these numbers of tokens, by model. The highest known price is used for a model without
    one.
    """
    return sum(((_storage_price(model, at) * tokens / _MILLION) for model, tokens in token_counts.items()), Decimal(0))


def needs_renewal(cache: RegisteredCache, now: datetime, *, ttl_seconds: int) -> bool:
    """Return whether less than half of its lifetime is left."""
    return (cache.expires_at - now).total_seconds() < ttl_seconds / 2


_MAX_STORAGE_PRICE: Final = Decimal("4.50")


def _storage_price(model: str, at: datetime) -> Decimal:
    price = find_price(model, at, 0)
    return _MAX_STORAGE_PRICE if price is None or price.cache_storage_hour is None else price.cache_storage_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The decision for one payload."""

    payload: Payload
    """As it is sent."""
    expectation: CacheExpectation
    key: CacheKey
    """The key of an explicit cache for it."""
    settings: CacheSettings
    supports_cache: bool
    """Whether an explicit cache could cover its static text and tools."""
    cache: RegisteredCache | None
    """The explicit cache that it uses."""
