"""What operators' programs see of replays."""

from datetime import datetime
from typing import Any, Final, Self

from pydantic import ConfigDict, Field

from server.replay.rerun.projection import (
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
    """A replay as it stands."""

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
    draft: dict[str, Any] = Field(description="What was asked for. Its items name the conversations.")
    item_count: int = Field(description="Conversations times repetitions.")
    items: dict[ItemState, int] = Field(description="By state, now.")
    spent_usd: float = Field(description="Of calls that have ended, and estimates of lost ones.")
    spent_tokens: int
    reserved_usd: float = Field(description="What calls on their way may come to.")
    unpriced_count: int = Field(description="Calls whose price is not known: the spending is at least that.")
    created_at: datetime
    created_by: str | None = Field(description="A key's id. Null: somebody at the command line.")
    ended_at: datetime | None

    @classmethod
    def of(cls, replay: Replay) -> Self:
        return cls(**replay_to_json(replay))


class ReplayPage(View):
    """Replays, newest first."""

    data: list[ReplayView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


class ReplayEstimateView(View):
    """What a replay would come to, from what its sources have recorded."""

    conversation_count: int = Field(examples=[200])
    item_count: int = Field(examples=[600])
    call_count: int = Field(description="With the judge's; compactions are not foreseen.", examples=[2400])
    input_tokens: int = Field(examples=[5_200_000])
    output_tokens: int = Field(examples=[310_000])
    cost_usd: float | None = Field(description="As if the cache did what it did. Null: no price.", examples=[2.41])
    uncached_cost_usd: float | None = Field(description="As if nothing came from a cache.", examples=[5.02])
    unpriced_count: int = Field(description="Calls that the costs leave out.", examples=[0])
    unmeasured_count: int = Field(description="Calls of which no usage was recorded.", examples=[0])
    is_rough: bool = Field(description="A free-running candidate takes as many turns as it likes.", examples=[False])

    @classmethod
    def of(cls, estimate: ReplayEstimate) -> Self:
        return cls(**estimate_to_json(estimate))


class ReplayItemView(View):
    """One source conversation in one repetition."""

    number: int = Field(examples=[1])
    conversation_id: str = Field(description="The source.", examples=[CONVERSATION_ID])
    repetition: int = Field(examples=[1])
    state: ItemState = Field(examples=["done"])
    error_code: str | None = Field(examples=[None])
    diverged_at_seq: int | None = Field(description="The first answer that differs.", examples=[4])
    spent_usd: float = Field(examples=[0.0031])
    spent_tokens: int = Field(examples=[9120])
    lost_count: int = Field(description="Calls of processes that died; asked once more.", examples=[0])
    started_at: datetime | None = Field(examples=[EXAMPLE_TIME])
    ended_at: datetime | None = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, item: ReplayItem) -> Self:
        return cls(**item_to_json(item))


class ReplayItemPage(View):
    """Items by their numbers."""

    data: list[ReplayItemView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


class ReplayResultView(View):
    """What became of one answer of the candidate's, beside the recorded one."""

    item: int = Field(examples=[1])
    conversation_id: str = Field(examples=[CONVERSATION_ID])
    repetition: int = Field(examples=[1])
    position: int = Field(description="1, 2, 3 within the item.", examples=[2])
    source_seq: int | None = Field(description="The recorded answer. Null: there is none.", examples=[4])
    replay_seq: int | None = Field(description="The turn of the replayed conversation.", examples=[4])
    attempt: int | None = Field(description="The call of that turn that gave it. Null: nobody was asked.", examples=[1])
    outcome: Outcome = Field(examples=["different"])
    kinds: list[DivergenceKind] = Field(description="In what they differ.", examples=[["text"]])
    similarity: float | None = Field(description="Of the texts, 0 to 1.", examples=[0.86])
    severity: float = Field(description="0 to 1: worst first is by this.", examples=[0.056])
    note: str | None = Field(examples=[None])
    recorded: dict[str, Any] | None = Field(description="What it took.", examples=[_FACTS])
    candidate: dict[str, Any] | None = Field(examples=[_FACTS])
    assertions: list[dict[str, Any]] = Field(
        examples=[[{"name": "answers briefly", "passed": True, "message": "", "error_code": None}]],
        description="How each went. An `error_code` says why it could not be decided.",
    )
    judge: dict[str, Any] | None = Field(examples=[{"score": 0.9, "reason": "As good.", "error_code": None}])

    @classmethod
    def of(cls, stored: StoredResult) -> Self:
        return cls(**result_to_json(stored))


class ReplayResultPage(View):
    """Results of a replay."""

    data: list[ReplayResultView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


class ReplayReportView(View):
    """What came out, as numbers. Intervals are Student's 95 %, over the means of the repetitions."""

    result_count: int = Field(examples=[600])
    same_share: float | None = Field(description="Of the answers that were compared.", examples=[0.82])
    same_interval: dict[str, float] | None = Field(
        description="Of the share, over the repetitions; null with a single one.",
        examples=[{"low": 0.8, "high": 0.84}],
    )
    outcomes: dict[Outcome, int] = Field(examples=[{"same": 490, "different": 108, "not_compared": 2, "failed": 0}])
    kinds: dict[DivergenceKind, int] = Field(examples=[{"text": 101, "tool_arguments": 9}])
    assertions: list[dict[str, Any]] = Field(examples=[[{"name": "answers briefly", "passed": 598, "failed": 2}]])
    measures: list[dict[str, Any]] = Field(
        description="Distributions: the quantiles 5, 25, 50, 75 and 95 %, and counts of 16 equal bins from `low` to "
        "`high`. `recorded` is null for what only a candidate has.",
        examples=[[{"measure": "similarity", "low": 0.2, "high": 1.0, "recorded": None, "candidate": _SPREAD}]],
    )

    @classmethod
    def of(cls, report: ReplayReport) -> Self:
        return cls(**report_to_json(report))
