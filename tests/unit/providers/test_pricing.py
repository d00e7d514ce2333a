"""Costs come from a dated table, bucket by bucket, and an unknown price is not guessed."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.usage import Usage
from server.providers.pricing import PRICES, find_price, itemise_call, price_call

NOW = datetime(2026, 11, 16, tzinfo=UTC)
ALL = Usage(
    fresh_input_tokens=1_000_000,
    cache_read_tokens=1_000_000,
    cache_write_tokens=1_000_000,
    output_tokens=1_000_000,
    reasoning_tokens=1_000_000,
)
SMALL = Usage(fresh_input_tokens=1000, output_tokens=10)


def test_each_bucket_has_its_own_price() -> None:
    cost = price_call("claude-opus-5-5", NOW, ALL, long_write_tokens=400_000)
    assert cost is not None
    assert cost.fresh_input_usd == 4
    assert cost.cache_read_usd == Decimal("0.20")
    assert cost.cache_write_usd == Decimal("0.6") * 5 + Decimal("0.4") * 8
    assert cost.output_usd == cost.reasoning_usd == 20
    assert cost.total_usd == Decimal("50.4")


def test_the_cost_of_an_unknown_model_is_unknown() -> None:
    assert price_call("gpt-9", NOW, SMALL) is None


def test_a_bucket_without_a_price_matters_only_if_it_has_tokens() -> None:
    cost = price_call("gemini-3.1-flash-lite", NOW, SMALL)
    assert cost is not None
    assert cost.total_usd == Decimal("0.000265")
    read = price_call("gemini-3.1-flash-lite", NOW, Usage(cache_read_tokens=5))
    assert read is not None
    assert (read.cache_read_usd, read.total_usd) == (None, None)


@pytest.mark.parametrize(
    ("moment", "dollars"),
    [
        (datetime(2026, 11, 30, 23, 59, tzinfo=UTC), 2),
        (datetime(2026, 12, 1, tzinfo=UTC), 4),
        # The first of December in the east is still November in the time zone of the prices.
        (datetime(2026, 12, 1, 1, tzinfo=timezone(timedelta(hours=9))), 2),
    ],
)
def test_a_price_changes_on_its_day(moment: datetime, dollars: int) -> None:
    price = find_price("gemini-4-argon", moment, 10)
    assert price is not None
    assert price.fresh_input == dollars


def test_a_large_prompt_is_priced_as_a_whole() -> None:
    for tokens, dollars in ((200_000, 2), (200_001, 4)):
        price = find_price("gemini-3.1-pro-preview", NOW, tokens)
        assert price is not None
        assert price.fresh_input == dollars


@given(st.sampled_from([price.model for price in PRICES if price.cache_read is not None]), st.integers(0, 10**6))
def test_a_cache_read_is_never_more_expensive_than_fresh_input(model: str, tokens: int) -> None:
    fresh = price_call(model, NOW, Usage(fresh_input_tokens=tokens))
    read = price_call(model, NOW, Usage(cache_read_tokens=tokens))
    assert fresh is not None
    assert read is not None
    assert fresh.total_usd is not None
    assert read.total_usd is not None
    assert 0 <= read.total_usd <= fresh.total_usd


@given(
    st.sampled_from([*(price.model for price in PRICES), "unheard-of"]),
    st.tuples(*[st.integers(0, 300_000)] * 5),
    st.integers(0, 300_000),
)
def test_the_parts_of_a_bill_add_up_to_the_cost_of_the_call(
    model: str, counts: tuple[int, ...], long_writes: int
) -> None:
    fresh, read, write, output, reasoning = counts
    usage = Usage(
        fresh_input_tokens=fresh,
        cache_read_tokens=read,
        cache_write_tokens=write + long_writes,
        output_tokens=output,
        reasoning_tokens=reasoning,
    )
    bill = itemise_call(model, NOW, usage, long_write_tokens=long_writes)
    cost = price_call(model, NOW, usage, long_write_tokens=long_writes)

    assert sum(line.token_count for line in bill) == sum(counts) + long_writes
    if cost is None:
        assert all(line.usd_per_million is None for line in bill)
        return
    lines = [line.usd for line in bill]
    assert cost.total_usd == (None if None in lines else sum(usd for usd in lines if usd is not None))
