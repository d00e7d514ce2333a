"""The overview port: tokens, cost, cache share, errors and latency over time, and what needs a look."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.usage import Usage
from server.inspection.port import InspectedConversation

LONGEST_TIME: Final = timedelta(days=366)
USUAL_TIME: Final = timedelta(days=7)
HOURLY_TIME: Final = timedelta(days=3)
"""Up to this length a step is an hour, beyond it a day."""
KEY_LIMIT: Final = 500
"""Of so many assistants or models, those that took the most tokens, there are numbers."""
CELL_KEY_LIMIT: Final = 20
"""And of so many of them step by step."""
TOP_LIMIT: Final = 10
ALARM_LIMIT: Final = 20
ERROR_LIMIT: Final = 20


class OverviewBy(StrEnum):
    """What the lines of the charts stand for."""

    ASSISTANT = "assistant"
    MODEL = "model"
    PROVIDER = "provider"


class OverviewStep(StrEnum):
    """How long a step of the time is; in UTC."""

    HOUR = "hour"
    DAY = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewCell:
    """The calls of one step, of one assistant or model, of both, or all."""

    at: datetime | None
    """When the step began; None for the whole time."""
    key: str | None
    """Of the assistant or model; None for all of them."""
    name: str | None = None
    """Of the assistant, as it is called now."""
    call_count: int
    error_count: int
    usage: Usage
    cost_usd: Decimal
    """Of the calls whose price is known."""
    unpriced_count: int
    median_seconds: float | None
    """From the request to the last byte; None where no call ended."""
    slow_seconds: float | None
    """Nineteen of twenty calls took less."""
    first_byte_seconds: float | None
    """The median until the first byte."""

    @property
    def cache_share(self) -> float | None:
        """Of all input tokens, those that came from the cache; None where there were none."""
        total = self.usage.input_tokens
        return self.usage.cache_read_tokens / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConversation:
    """A conversation that stands out in the time."""

    id: str
    assistant_name: str
    call_count: int
    cost_usd: Decimal
    slowest_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """Why attempts failed."""

    code: str
    call_count: int
    last_at: datetime
    """When the newest of them began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCompaction:
    """A conversation that has to be compacted and cannot be."""

    conversation_id: str
    reason: str
    request_tokens: int
    began_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Conversations of the time that have one kind of trouble, the newest of them."""

    kind: str
    """The filter that finds them all."""
    estimated_count: int
    conversations: Sequence[InspectedConversation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All of it."""

    step: OverviewStep
    total: OverviewCell
    by_step: Sequence[OverviewCell]
    by_key: Sequence[OverviewCell]
    """What took the most tokens first."""
    cells: Sequence[OverviewCell]
    """By step and key, in the order of time; of the first keys only, see `CELL_KEY_LIMIT`."""
    errors: Sequence[ErrorCount]
    """The most frequent first."""
    most_expensive: Sequence[TopConversation]
    slowest: Sequence[TopConversation]
    stuck_compactions: Sequence[StuckCompaction]
    alarms: Sequence[Alarm]


class Overviews(Protocol):
    """Where overviews come from. Raises `DatabaseUnavailable`."""

    async def load_overview(
        self, tenant_id: str | None, by: OverviewBy, *, since: datetime, until: datetime
    ) -> Overview:
        """Of the calls that began at `since` or later and before `until`; of all tenants where none is named."""
        ...


def choose_step(since: datetime, until: datetime) -> OverviewStep:
    """How finely a time is shown."""
    return OverviewStep.HOUR if until - since <= HOURLY_TIME else OverviewStep.DAY
