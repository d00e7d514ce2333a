"""Usage: tokens, each counted once.

Providers count differently. Here every token of a call is in exactly one bucket, so buckets can be added and priced
without knowing the provider.

| bucket               | Gemini                                              | Claude                        |
|----------------------|-----------------------------------------------------|-------------------------------|
| fresh_input_tokens   | promptTokenCount - cachedContentTokenCount          | input_tokens                  |
| cache_read_tokens    | cachedContentTokenCount                             | cache_read_input_tokens       |
| cache_write_tokens   | 0                                                   | cache_creation_input_tokens   |
| output_tokens        | candidatesTokenCount                                | output_tokens - thinking      |
| reasoning_tokens     | thoughtsTokenCount                                  | thinking                      |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.conversation.exact_json import Number

MAX_TOKEN_COUNT: Final = 10**9
"""A thousand times more than any call can have. Sums over all calls of a database fit into 64 bits."""
COUNT_FAULT: Final = "token_count_out_of_range"
"""The kind of warning for a reported count that is out of range."""
_MAX_DIGITS: Final = 15
_SHOWN_DIGITS: Final = 40
_MAX_FAULTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The tokens of one call. No bucket contains another; none is negative."""

    fresh_input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """All tokens of the request."""
        return self.fresh_input_tokens + self.cache_read_tokens + self.cache_write_tokens


def read_count(value: object) -> int:
    """Read a provider's count; 0 for a value that is no count.

    The result is never negative and at most `MAX_TOKEN_COUNT`; `find_count_faults` reports what was changed.
    """
    match value:
        case Number() if value.isdecimal():
            return MAX_TOKEN_COUNT if len(value) > _MAX_DIGITS else min(int(value), MAX_TOKEN_COUNT)
        case int() if type(value) is int:
            return min(max(0, value), MAX_TOKEN_COUNT)
        case _:
            return 0


def find_count_faults(reported: Mapping[str, Any], path: str = "") -> tuple[dict[str, str | int], ...]:
    """Return warnings for reported counts that were not used unchanged: not an integer, or out of range."""
    faults: list[dict[str, str | int]] = []
    for name, value in reported.items():
        if isinstance(value, Mapping) and not path:
            faults += find_count_faults(value, f"{name}.")
        elif "token" in name.lower() and not isinstance(value, Mapping | list) and value is not None:
            counted = read_count(value)
            if str(counted) != str(value) or isinstance(value, bool):
                shown = str(value)[:_SHOWN_DIGITS]
                faults.append({"kind": COUNT_FAULT, "name": f"{path}{name}", "reported": shown, "counted": counted})
    return tuple(faults[:_MAX_FAULTS])


def add_usages(usages: Sequence[Usage]) -> Usage:
    """Return the sum by bucket."""
    return Usage(
        fresh_input_tokens=sum(usage.fresh_input_tokens for usage in usages),
        cache_read_tokens=sum(usage.cache_read_tokens for usage in usages),
        cache_write_tokens=sum(usage.cache_write_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
