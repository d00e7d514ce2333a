"""Usage reports: tokens and cost of a tenant's calls, grouped by day, assistant, model or conversation.

Every call counts: each attempt, each summary of a compaction, and calls that failed midway. For a fork, calls copied
from its source do not count. Erased conversations do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.conversation.usage import Usage

ROW_LIMIT: Final = 1000
"""Maximum number of rows of one report."""
TOTAL: Final = "total"
"""The key of the total row."""
DEFAULT_PERIOD: Final = timedelta(days=30)
MAX_PERIOD: Final = timedelta(days=366)
"""A report reads every call of its period."""


class UsageBy(StrEnum):
    """How the rows of a report are grouped."""

    DAY = "day"
    """Days in UTC."""
    ASSISTANT = "assistant"
    MODEL = "model"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The calls of one day, assistant, model or conversation."""

    key: str
    """A date, an id, or the name of a model."""
    name: str | None = None
    """The current name of an assistant."""
    call_count: int
    usage: Usage
    expected_cache_tokens: int
    """Tokens that were expected to be read from the cache."""
    cost_usd: Decimal | None
    """None if the price of any call is unknown: the sum of the others would look like a saving."""
    unpriced_count: int
    """Calls whose price is unknown."""

    @property
    def cache_share(self) -> float | None:
        """The share of input tokens that was read from the cache. None without input tokens."""
        total = self.usage.input_tokens
        return self.usage.cache_read_tokens / total if total else None

    @property
    def expected_share(self) -> float | None:
        """The share of input tokens that was expected to be read from the cache."""
        total = self.usage.input_tokens
        return self.expected_cache_tokens / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Days in order; other rows by tokens, most first."""

    rows: Sequence[UsageRow]
    total: UsageRow
    """All calls of the period, including those whose rows were omitted."""
    is_complete: bool
    """Whether all rows are included."""
