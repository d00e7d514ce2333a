"""Reports of usage: what the calls of a tenant took and cost, by whatever an operator asks for.

Every call counts, each attempt and each summary of a compaction: what failed half-way is paid for too. A fork counts
what was asked for it, not what it brought along from its source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol

from server.usage import Usage

ROW_LIMIT: Final = 1000
"""Most rows of one report."""


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
    call_count: int
    usage: Usage
    expected_cache_tokens: int
    """What should have been read from the cache."""
    cost_usd: Decimal | None
    """None where a call took tokens whose price is not known: a sum over the others would look like a saving."""
    unpriced_count: int
    """How many such calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Days in their order; everything else with what took the most tokens first."""

    rows: Sequence[UsageRow]
    is_complete: bool
    """False where there were more rows than were asked for."""


class UsageReports(Protocol):
    """Where reports come from. Raises `DatabaseUnavailable`."""

    async def report_usage(
        self, tenant_id: str, by: UsageBy, *, since: datetime, until: datetime, limit: int = 100
    ) -> UsageReport:
        """Of the calls that began at `since` or later and before `until`."""
        ...
