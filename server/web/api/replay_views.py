"""Response bodies of replays."""

from datetime import datetime
from typing import Any, Final, Self

from pydantic import ConfigDict, Field

from server.replay.rerun.json_codec import (
    estimate_to_json,
    item_to_json,
    replay_to_json,
    report_to_json,
    result_to_json,
)
from server.replay.rerun.replay import ItemState, Replay, ReplayEstimate, ReplayItem, ReplayMode, ReplayState
from server.replay.rerun.report import ReplayReport
from server.replay.rerun.result import DivergenceKind, Outcome, StoredResult
from server.web.api.replay_bodies import EXAMPLE
from server.web.api.views import CONVERSATION_ID, EXAMPLE_TIME, View

REPLAY_ID: Final = "replay_01jd0z8s3bf6h9kq2m4n6p8r0t"
_COUNTS: Final[dict[str, Any]] = {"waiting": 396, "running": 4, "done": 200, "failed": 0, "cancelled": 0, "skipped": 0}
_FACTS: Final[dict[str, Any]] = {
    "stop_reason": "end_turn",
    "error_code": None,
    "usage": {
        "fresh_input_tokens": 120,
        "cache_read_tokens": 4096,
        "cache_write_tokens": 0,
        "output_tokens": 42,
        "reasoning_tokens": 0,
    },
    "cost_usd": "0.0009",
    "latency_ms": 1840,
    "first_byte_ms": 420,
}
_SPREAD: Final[dict[str, Any]] = {
    "count": 600,
    "mean": 0.91,
    "least": 0.2,
    "most": 1.0,
    "quantiles": [0.55, 0.86, 0.97, 1.0, 1.0],
    "bins": [2, 0, 1, 3, 5, 4, 6, 9, 12, 20, 31, 44, 60, 83, 120, 200],
    "interval": {"low": 0.89, "high": 0.93},
}


class ReplayView(View):
    """A replay with its progress and spending."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": REPLAY_ID,
                    "name": EXAMPLE["name"],
                    "state": "running",
                    "mode": "teacher_forced",
                    "draft": EXAMPLE,
                    "item_count": 600,
                    "items": _COUNTS,
                    "spent_usd": 0.7301,
                    "spent_tokens": 1_802_000,
                    "reserved_usd": 0.012,
                    "unpriced_count": 0,
                    "created_at": EXAMPLE_TIME,
                    "created_by": "key_01jd0z8s3bf6h9kq2m4n6p8r0t",
                    "ended_at": None,
                }
            ]
        }
    )

    id: str
    name: str
    state: ReplayState
    mode: ReplayMode
    draft: dict[str, Any] = Field(description="The definition of the replay. The conversations are named by the items.")
    item_count: int = Field(description="Conversations times repetitions.")
    items: dict[ItemState, int] = Field(description="The current number of items by state.")
    spent_usd: float = Field(description="The cost of ended calls, and the estimates of lost calls.")
    spent_tokens: int
    reserved_usd: float = Field(description="The estimates of open calls.")
    unpriced_count: int = Field(description="Calls without a known price, which the spending does not include.")
    created_at: datetime
    created_by: str | None = Field(description="The id of an API key; null for the command line.")
    ended_at: datetime | None

    @classmethod
    def of(cls, replay: Replay) -> Self:
        return cls(**replay_to_json(replay))


class ReplayPage(View):
    """A page of replays, newest first."""

    data: list[ReplayView]
    next_cursor: str | None = Field(description="Null on the last page.", examples=[None])


class ReplayEstimateView(View):
    """The estimated size and cost of a replay, from the recorded usage."""

    conversation_count: int = Field(examples=[200])
    item_count: int = Field(examples=[600])
    call_count: int = Field(description="Including the judge's calls. Compactions are not estimated.", examples=[2400])
    input_tokens: int = Field(examples=[5_200_000])
    output_tokens: int = Field(examples=[310_000])
    cost_usd: float | None = Field(
        description="With the recorded cache reads; null if no price is known.", examples=[2.41]
    )
    uncached_cost_usd: float | None = Field(description="The same without cache reads.", examples=[5.02])
    unpriced_count: int = Field(
        description="Calls without a known price, which the costs do not include.", examples=[0]
    )
    unmeasured_count: int = Field(description="Calls without recorded usage.", examples=[0])
    is_rough: bool = Field(
        description="Whether the replay is free-running, so that the number of turns is not known.", examples=[False]
    )

    @classmethod
    def of(cls, estimate: ReplayEstimate) -> Self:
        return cls(**estimate_to_json(estimate))


class ReplayItemView(View):
    """One source conversation in one repetition."""

    number: int = Field(examples=[1])
    conversation_id: str = Field(description="The source conversation.", examples=[CONVERSATION_ID])
    repetition: int = Field(examples=[1])
    state: ItemState = Field(examples=["done"])
    error_code: str | None = Field(examples=[None])
    diverged_at_seq: int | None = Field(
        description="The first recorded answer that the candidate's differs from.", examples=[4]
    )
    spent_usd: float = Field(examples=[0.0031])
    spent_tokens: int = Field(examples=[9120])
    lost_count: int = Field(description="Calls whose process died, which were sent again.", examples=[0])
    started_at: datetime | None = Field(examples=[EXAMPLE_TIME])
    ended_at: datetime | None = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, item: ReplayItem) -> Self:
        return cls(**item_to_json(item))


class ReplayItemPage(View):
    """A page of items, by number."""

    data: list[ReplayItemView]
    next_cursor: str | None = Field(description="Null on the last page.", examples=[None])


class ReplayResultView(View):
    """The result of one answer of the candidate, compared with the recorded answer."""

    item: int = Field(examples=[1])
    conversation_id: str = Field(examples=[CONVERSATION_ID])
    repetition: int = Field(examples=[1])
    position: int = Field(description="1, 2, 3, in the order of the item's answers.", examples=[2])
    source_seq: int | None = Field(description="The recorded answer; null if there is none.", examples=[4])
    replay_seq: int | None = Field(description="The turn of the replay conversation.", examples=[4])
    attempt: int | None = Field(
        description="The call of that turn that gave the answer; null if no call was made.", examples=[1]
    )
    outcome: Outcome = Field(examples=["different"])
    kinds: list[DivergenceKind] = Field(description="How the answers differ.", examples=[["text"]])
    similarity: float | None = Field(description="Of the texts, from 0 to 1.", examples=[0.86])
    severity: float = Field(description="From 0, the same, to 1. `order=worst` sorts by this.", examples=[0.056])
    note: str | None = Field(examples=[None])
    recorded: dict[str, Any] | None = Field(
        description="Stop reason, usage, cost and times of the recorded answer.", examples=[_FACTS]
    )
    candidate: dict[str, Any] | None = Field(description="The same of the candidate's answer.", examples=[_FACTS])
    assertions: list[dict[str, Any]] = Field(
        examples=[[{"name": "answers briefly", "passed": True, "message": "", "error_code": None}]],
        description="The result of each assertion. `error_code` says why it could not be evaluated.",
    )
    judge: dict[str, Any] | None = Field(examples=[{"score": 0.9, "reason": "As good.", "error_code": None}])

    @classmethod
    def of(cls, stored: StoredResult) -> Self:
        return cls(**result_to_json(stored))


class ReplayResultPage(View):
    """A page of results."""

    data: list[ReplayResultView]
    next_cursor: str | None = Field(description="Null on the last page.", examples=[None])


class ReplayReportView(View):
    """The numbers of a replay. Intervals are 95 % intervals by Student's t, over the means of the repetitions."""

    result_count: int = Field(examples=[600])
    same_share: float | None = Field(
        description="The share of same answers among those that were compared.", examples=[0.82]
    )
    same_interval: dict[str, float] | None = Field(
        description="The interval of the share; null with fewer than two complete repetitions.",
        examples=[{"low": 0.8, "high": 0.84}],
    )
    outcomes: dict[Outcome, int] = Field(examples=[{"same": 490, "different": 108, "not_compared": 2, "failed": 0}])
    kinds: dict[DivergenceKind, int] = Field(examples=[{"text": 101, "tool_arguments": 9}])
    assertions: list[dict[str, Any]] = Field(examples=[[{"name": "answers briefly", "passed": 598, "failed": 2}]])
    measures: list[dict[str, Any]] = Field(
        description="Distributions: the quantiles 5, 25, 50, 75 and 95 %, and counts of 16 equal bins from `low` to "
        "`high`. `recorded` is null for measures that only the candidate's answers have.",
        examples=[[{"measure": "similarity", "low": 0.2, "high": 1.0, "recorded": None, "candidate": _SPREAD}]],
    )

    @classmethod
    def of(cls, report: ReplayReport) -> Self:
        return cls(**report_to_json(report))
