"""When an explicit cache is created and when it is used."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.caching.explicit_policy import (
    CacheSettings,
    Demand,
    ExplicitChoice,
    choose_cache,
    is_worthwhile,
    needs_renewal,
    storage_usd_per_hour,
    supports_cache,
)
from server.conversation.cache_register import CacheKey, RegisteredCache
from server.conversation.payload import LayerOrder
from server.providers.model_profile import find_profile
from server.providers.pricing import find_price

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
PRO = find_profile("gemini", "gemini-3.1-pro-preview")
PRICE = find_price(PRO.model, NOW, 0)
KEY = CacheKey(provider="gemini", account="a", model=PRO.model, prefix_hash=b"p")
AUTO = CacheSettings()
ON = CacheSettings(explicit=ExplicitChoice.ON)


def cache(*, seconds_left: float = 1000, key: CacheKey = KEY) -> RegisteredCache:
    expires_at = NOW + timedelta(seconds=seconds_left)
    return RegisteredCache(id=uuid4(), key=key, name="cachedContents/1", token_count=5_000, expires_at=expires_at)


def demand(**changes: object) -> Demand:
    values: dict[str, object] = {
        "static_tokens": 5_000,
        "calls_last_hour": 10,
        "observed_calls": 10,
        "implicit_share": Decimal(0),
    }
    return Demand(**values | changes)  # type: ignore[arg-type]  # reason: the test names the fields that it changes


def wants(settings: CacheSettings, asked: Demand, *, ttl_seconds: int = 3600) -> bool:
    return is_worthwhile(settings, asked, PRO, PRICE, ttl_seconds=ttl_seconds)


@pytest.mark.parametrize(
    ("provider", "model", "order", "explicit", "expected"),
    [
        ("gemini", "gemini-3.8-flash", LayerOrder.LAYERED, "auto", True),
        ("gemini", "gemini-3.8-flash", LayerOrder.LAYERED, "off", False),
        ("gemini", "gemini-3.8-flash", LayerOrder.APPEND_ONLY, "on", False),
        ("gemini", "gemini-4-argon", LayerOrder.LAYERED, "auto", False),
        ("anthropic", "claude-opus-5", LayerOrder.LAYERED, "auto", False),
    ],
)
def test_explicit_caches_are_for_models_that_support_them_if_only_the_static_text_repeats(
    *, provider: str, model: str, order: LayerOrder, explicit: str, expected: bool
) -> None:
    settings = CacheSettings(explicit=ExplicitChoice(explicit))
    assert supports_cache(find_profile(provider, model), order, settings) is expected


def test_a_cache_is_used_for_its_own_prefix_while_it_lives() -> None:
    good = cache()
    assert choose_cache(good, KEY, NOW) is good
    assert choose_cache(None, KEY, NOW) is None
    assert choose_cache(cache(seconds_left=29), KEY, NOW) is None
    for other in (
        replace(KEY, provider="x"),
        replace(KEY, account="x"),
        replace(KEY, model="x"),
        replace(KEY, prefix_hash=b"x"),
    ):
        assert choose_cache(good, other, NOW) is None


def test_a_cache_has_to_pay_for_its_storage_unless_it_is_required() -> None:
    """For a million tokens, ten calls save 10 x 1.80; creating the cache costs 2.00 and an hour of storage 4.50."""
    assert wants(AUTO, demand())
    assert wants(AUTO, demand(calls_last_hour=4))
    assert not wants(AUTO, demand(calls_last_hour=3))
    assert wants(ON, demand(calls_last_hour=0, observed_calls=0))


def test_no_explicit_cache_is_paid_for_if_implicit_caching_works() -> None:
    assert wants(AUTO, demand(implicit_share=Decimal("0.6")))
    assert not wants(AUTO, demand(implicit_share=Decimal("0.7")))
    assert not wants(AUTO, demand(implicit_share=Decimal(1), calls_last_hour=10_000))
    # An explicit cache would keep the buffer from being read.
    assert not wants(AUTO, demand(implicit_share=Decimal(3), calls_last_hour=10_000))


def test_nothing_is_decided_before_the_implicit_cache_was_observed() -> None:
    assert not wants(AUTO, demand(observed_calls=2))


def test_a_text_below_the_minimum_is_never_cached() -> None:
    assert not wants(ON, demand(static_tokens=4_095))
    assert wants(ON, demand(static_tokens=4_096))


def test_without_a_price_no_cache_is_created() -> None:
    assert not is_worthwhile(AUTO, demand(), PRO, None, ttl_seconds=3600)
    assert is_worthwhile(ON, demand(), PRO, None, ttl_seconds=3600)


@given(
    calls=st.integers(0, 100),
    share=st.decimals(0, 1, places=3),
    more=st.integers(0, 50),
    tokens=st.integers(0, 100_000),
)
def test_more_calls_never_make_a_cache_less_wanted(calls: int, share: Decimal, more: int, tokens: int) -> None:
    few = demand(calls_last_hour=calls, implicit_share=share, static_tokens=tokens)
    many = replace(few, calls_last_hour=calls + more)
    assert wants(AUTO, many) or not wants(AUTO, few)


def test_storage_is_summed_over_models_and_an_unknown_price_counts_as_high() -> None:
    assert storage_usd_per_hour({}, NOW) == 0
    kept = {"gemini-3.8-flash": 1_000_000, "gemini-3.1-pro-preview": 500_000, "gemini-9-unheard": 2_000_000}
    assert storage_usd_per_hour(kept, NOW) == Decimal(1) + Decimal("2.25") + Decimal(9)


def test_a_cache_is_extended_after_half_of_its_lifetime() -> None:
    assert needs_renewal(cache(seconds_left=299), NOW, ttl_seconds=600)
    assert not needs_renewal(cache(seconds_left=301), NOW, ttl_seconds=600)
