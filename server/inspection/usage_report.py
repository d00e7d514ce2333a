"""Reports of usage: what the calls of a tenant took and cost, by whatever an operator asks for.

Every call counts, each attempt and each summary of a compaction: what failed half-way is paid for too. A fork counts
what was asked for it, not what it brought along from its source. What was erased counts nowhere any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.usage import Usage

ROW_LIMIT: Final = 1000
"""Most rows of one report."""
TOTAL: Final = "total"
"""The key of the row that is the sum of all."""


USUAL_TIME: Final = timedelta(days=30)
"""What is reported where nobody says how much."""
LONGEST_TIME: Final = timedelta(days=366)
"""A report reads every call of its time."""


class UsageBy(StrEnum):
    """What the rows of a report stand for."""

    DAY = "day"
    """Days of UTC."""
    ASSISTANT = "assistant"
    MODEL = "model"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The calls of one day, assistant, model or conversation."""

    key: str
    """A date, an id, or a model's name."""
    name: str | None = None
    """Of an assistant, as it is called now."""
    call_count: int
    usage: Usage
    expected_cache_tokens: int
    """What should have been read from the cache."""
    cost_usd: Decimal | None
    """None where a call took tokens whose price is not known: a sum over the others would look like a saving."""
    unpriced_count: int
    """How many such calls."""

    @property
    def cache_share(self) -> float | None:
        """Of all input tokens, those that came from the cache; None where there were none."""
        total = self.usage.input_tokens
        return self.usage.cache_read_tokens / total if total else None

    @property
    def expected_share(self) -> float | None:
        """Of all input tokens, those that should have."""
        total = self.usage.input_tokens
        return self.expected_cache_tokens / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Days in their order; everything else with what took the most tokens first."""

    rows: Sequence[UsageRow]
    total: UsageRow
    """Of all calls, whether their rows were asked for or not."""
    is_complete: bool
    """False where there were more rows than were asked for."""


class UsageReports(Protocol):
    """Where reports come from. Raises `DatabaseUnavailable`."""

    async def report_usage(
        self, tenant_id: str | None, by: UsageBy, *, since: datetime, until: datetime, limit: int = 100
    ) -> UsageReport:
        """Of the calls that began at `since` or later and before `until`; of all tenants where none is named."""
        ...
