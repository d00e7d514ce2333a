"""Tokens, counted once each.

Providers count differently; here every token of a call is in exactly one bucket, so buckets can be added and priced
without looking at the provider again.

| bucket               | Gemini                                              | Claude                        |
|----------------------|-----------------------------------------------------|-------------------------------|
| fresh_input_tokens   | promptTokenCount - cachedContentTokenCount          | input_tokens                  |
| cache_read_tokens    | cachedContentTokenCount                             | cache_read_input_tokens       |
| cache_write_tokens   | 0                                                   | cache_creation_input_tokens   |
| output_tokens        | candidatesTokenCount                                | output_tokens - thinking      |
| reasoning_tokens     | thoughtsTokenCount                                  | thinking                      |
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one provider call took. No bucket contains another; none is negative."""

    fresh_input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """The provider's total for the request."""
        return self.fresh_input_tokens + self.cache_read_tokens + self.cache_write_tokens


def add_usages(usages: Sequence[Usage]) -> Usage:
    """The sum, bucket by bucket."""
    return Usage(
        fresh_input_tokens=sum(usage.fresh_input_tokens for usage in usages),
        cache_read_tokens=sum(usage.cache_read_tokens for usage in usages),
        cache_write_tokens=sum(usage.cache_write_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
