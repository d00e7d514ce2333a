"""Costs of calls: a table of dated prices, and the sum over the buckets of usage.

Prices are US dollars per million tokens, valid from a date on; a later row of the same model replaces an earlier one
from its own date. The cost of a model without a price is None and never 0, which would look like a saving.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Final

from server.conversation.usage import Usage
from server.providers.model_name import names_in_tables

_MILLION: Final = Decimal(1_000_000)
_FLASH_STORAGE: Final = Decimal(1)
_PRO_STORAGE: Final = Decimal("4.50")
_EVER: Final = date.min


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of one model from a date on."""

    model: str
    valid_from: date = _EVER
    from_prompt_tokens: int = 0
    """The row applies to prompts of at least this size: some models price the whole prompt by its size."""
    fresh_input: Decimal
    cache_read: Decimal | None
    """None if the price is not known."""
    cache_write: Decimal
    """For the shortest lifetime. It is the price of input if the provider does not charge for writing."""
    cache_write_long: Decimal
    """For the long lifetime, one hour."""
    output: Decimal
    """Also the price of reasoning."""
    cache_storage_hour: Decimal | None = None
    """Storage of an explicit cache per million tokens and hour; None if there is none, or its price is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a call, by bucket. The total is None if a bucket with tokens has no price."""

    fresh_input_usd: Decimal | None
    cache_read_usd: Decimal | None
    cache_write_usd: Decimal | None
    output_usd: Decimal | None
    reasoning_usd: Decimal | None

    @property
    def total_usd(self) -> Decimal | None:
        """The sum of the buckets."""
        buckets = (
            self.fresh_input_usd,
            self.cache_read_usd,
            self.cache_write_usd,
            self.output_usd,
            self.reasoning_usd,
        )
        return None if None in buckets else sum((bucket for bucket in buckets if bucket is not None), Decimal(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """One line of the bill of a call."""

    name: str
    token_count: int
    usd_per_million: Decimal | None
    """None if the price is not known."""

    @property
    def usd(self) -> Decimal | None:
        """The cost of the line; 0 without tokens, even if the price is not known."""
        return _times(self.usd_per_million, self.token_count)


def find_price(model: str, at: datetime, prompt_tokens: int) -> Price | None:
    """Find the price of a model at a time for a prompt size. A dated release has the price of its family."""
    day = at.astimezone(UTC).date()
    listed = next((name for name in names_in_tables(model) if name in _PRICED), None)
    rows = [
        price
        for price in PRICES
        if price.model == listed and price.valid_from <= day and price.from_prompt_tokens <= prompt_tokens
    ]
    return max(rows, key=lambda price: (price.valid_from, price.from_prompt_tokens), default=None)


def price_call(model: str, at: datetime, usage: Usage, *, long_write_tokens: int = 0) -> Cost | None:
    """Compute the cost of the usage of one call; None for a model without a price.

    `long_write_tokens` is the part of the written tokens with the long lifetime.
    """
    price = find_price(model, at, usage.input_tokens)
    if price is None:
        return None
    short_write_tokens = usage.cache_write_tokens - long_write_tokens
    return Cost(
        fresh_input_usd=price.fresh_input * usage.fresh_input_tokens / _MILLION,
        cache_read_usd=_times(price.cache_read, usage.cache_read_tokens),
        cache_write_usd=(price.cache_write * short_write_tokens + price.cache_write_long * long_write_tokens)
        / _MILLION,
        output_usd=price.output * usage.output_tokens / _MILLION,
        reasoning_usd=price.output * usage.reasoning_tokens / _MILLION,
    )


def itemise_call(model: str, at: datetime, usage: Usage, *, long_write_tokens: int = 0) -> tuple[CostLine, ...]:
    """Build the bill of one call, which adds up to `price_call`; without prices if the model has none."""
    price = find_price(model, at, usage.input_tokens)
    lines = (
        ("fresh input", usage.fresh_input_tokens, None if price is None else price.fresh_input),
        ("cache read", usage.cache_read_tokens, None if price is None else price.cache_read),
        (
            "cache write",
            usage.cache_write_tokens - long_write_tokens,
            None if price is None else price.cache_write,
        ),
        ("cache write, one hour", long_write_tokens, None if price is None else price.cache_write_long),
        ("output", usage.output_tokens, None if price is None else price.output),
        ("reasoning", usage.reasoning_tokens, None if price is None else price.output),
    )
    return tuple(CostLine(name=name, token_count=count, usd_per_million=usd) for name, count, usd in lines)


def _times(price: Decimal | None, tokens: int) -> Decimal | None:
    if tokens == 0:
        return Decimal(0)
    return None if price is None else price * tokens / _MILLION


def _gemini(
    model: str,
    fresh: str,
    read: str | None,
    output: str,
    *,
    valid_from: date = _EVER,
    starting: int = 0,
) -> Price:
    """Build a price of Gemini. Writing to its cache costs as much as input; explicit caches are billed by the hour."""
    return Price(
        model=model,
        valid_from=valid_from,
        from_prompt_tokens=starting,
        fresh_input=Decimal(fresh),
        cache_read=None if read is None else Decimal(read),
        cache_write=Decimal(fresh),
        cache_write_long=Decimal(fresh),
        output=Decimal(output),
        cache_storage_hour=_PRO_STORAGE if "-pro" in model else _FLASH_STORAGE,
    )


def _claude(model: str, fresh: str, read: str, output: str, *, starting: int = 0) -> Price:
    """Build a price of Claude: writing to its cache costs a quarter more for five minutes, and double for an hour."""
    return Price(
        model=model,
        from_prompt_tokens=starting,
        fresh_input=Decimal(fresh),
        cache_read=Decimal(read),
        cache_write=Decimal(fresh) * Decimal("1.25"),
        cache_write_long=Decimal(fresh) * 2,
        output=Decimal(output),
    )


_DECEMBER: Final = date(2026, 12, 1)
_JANUARY: Final = date(2027, 1, 1)
_TIER: Final = 200_001

PRICES: Final = (
    *(
        price
        for model in ("gemini-4-argon", "gemini-4-carbon")
        for price in (
            _gemini(model, "2", "0.10", "10"),
            _gemini(model, "4", "0.20", "20", valid_from=_DECEMBER),
        )
    ),
    *(
        price
        for model in ("gemini-3.8-flash", "gemini-3.7-flash", "gemini-3.6-flash")
        for price in (
            _gemini(model, "0.75", "0.075", "3.75"),
            _gemini(model, "1.50", "0.15", "7.50", valid_from=_JANUARY),
        )
    ),
    _gemini("gemini-3.5-flash", "1.50", "0.15", "9"),
    _gemini("gemini-3.5-flash-lite", "0.30", "0.03", "2.50"),
    _gemini("gemini-3.1-pro-preview", "2", "0.20", "12"),
    _gemini("gemini-3.1-pro-preview", "4", "0.40", "18", starting=_TIER),
    _gemini("gemini-3.1-flash-lite", "0.25", None, "1.50"),
    _gemini("gemini-3-flash-preview", "0.50", None, "3"),
    _gemini("gemini-2.5-pro", "1.25", "0.125", "10"),
    _gemini("gemini-2.5-pro", "2.50", "0.25", "15", starting=_TIER),
    _gemini("gemini-2.5-flash", "0.30", "0.03", "2.50"),
    _gemini("gemini-2.5-flash-lite", "0.10", "0.01", "0.40"),
    _claude("claude-fable-5-2", "8", "0.20", "40"),
    _claude("claude-fable-5-1", "10", "0.25", "50"),
    _claude("claude-fable-5", "10", "1", "50"),
    _claude("claude-opus-5-5", "4", "0.20", "20"),
    *(_claude(f"claude-opus-{version}", "5", "0.50", "25") for version in ("5", "4-8", "4-7", "4-6", "4-5")),
    _claude("claude-sonnet-5-5", "2", "0.10", "10"),
    _claude("claude-sonnet-5", "2", "0.20", "10"),
    _claude("claude-sonnet-4-6", "3", "0.30", "15"),
    _claude("claude-sonnet-4-5", "3", "0.30", "15"),
    _claude("claude-haiku-5-5", "0.10", "0.01", "0.50"),
    _claude("claude-haiku-5-5", "0.50", "0.05", "2.50", starting=100_001),
    _claude("claude-haiku-4-5", "1", "0.10", "5"),
)
"""As of November 2026. Rows with a later date are announced changes."""
_PRICED: Final = frozenset(price.model for price in PRICES)
