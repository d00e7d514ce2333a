"""Compactions over HTTP: old exchanges move out of the buffer into the history of the static layer, and back."""

from datetime import datetime
from typing import Annotated, Any, Final, Self

from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from pydantic import ConfigDict, Field

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.api_key import ApiKey
from server.conversation.epoch import EpochReason
from server.conversation.errors import (
    CompactionNotFound,
    ConversationBusy,
    ConversationNotFound,
    CursorInvalid,
    EpochMoved,
    SummaryUnavailable,
)
from server.conversation.page import PAGE_LIMIT
from server.conversation.store import EpochOutline, Store
from server.web.api.block_views import View
from server.web.api.views import CONVERSATION_ID, EXAMPLE_TIME
from server.web.auth import client_only
from server.web.body import Body
from server.web.errors import document_client_errors
from server.web.json_text import answer_json

_REPORT_EXAMPLE: Final[dict[str, Any]] = {
    "conversation_id": CONVERSATION_ID,
    "outcome": "compacted",
    "reason": "rent",
    "dry_run": False,
    "epoch": 2,
    "first_seq": 1,
    "last_seq": 12,
    "moved_tokens": 2400,
    "segment_tokens": 1300,
    "request_tokens": 4100,
    "saved_tokens_per_call": 1900.0,
    "saved_usd_per_call": 0.0038,
    "thinking_kept": True,
    "window_short": False,
    "blocked": False,
}


class CompactionBody(Body):
    """How to compact."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"dry_run": True}, {"force": True}]})

    dry_run: bool = Field(default=False, description="Only tell what would be done.")
    force: bool = Field(default=False, description="Move all that need not stay, whatever the policy says.")


class CompactionReportView(View):
    """What was done, or would be. Tokens are estimates."""

    model_config = ConfigDict(json_schema_extra={"examples": [_REPORT_EXAMPLE]})

    conversation_id: str
    outcome: CompactionOutcome = Field(description="What became of it.")
    reason: str = Field(description="Why it was done, or why not.")
    dry_run: bool
    epoch: int = Field(description="The conversation's when it was over.")
    first_seq: int | None = Field(description="Of the turns that changed their place.")
    last_seq: int | None
    moved_tokens: int = Field(description="What these turns were as messages.")
    segment_tokens: int = Field(description="What they are as history.")
    request_tokens: int | None = Field(description="What the next request has beside the new task.")
    saved_tokens_per_call: float = Field(description="In uncached input tokens.")
    saved_usd_per_call: float | None = Field(description="Null where the price is not known.")
    thinking_kept: bool = Field(description="False: the turns that stay are sent without their thinking.")
    window_short: bool = Field(description="Requests are near the model's window.")
    blocked: bool = Field(description="Something has to be compacted and cannot be.")

    @classmethod
    def of(cls, report: CompactionReport) -> Self:
        """The view of a report."""
        saved = report.saved_usd_per_call
        return cls(
            conversation_id=report.conversation_id,
            outcome=report.outcome,
            reason=report.reason,
            dry_run=report.is_dry_run,
            epoch=report.epoch,
            first_seq=report.first_seq,
            last_seq=report.last_seq,
            moved_tokens=report.moved_tokens,
            segment_tokens=report.segment_tokens,
            request_tokens=report.request_tokens,
            saved_tokens_per_call=report.saved_tokens_per_call,
            saved_usd_per_call=None if saved is None else float(saved),
            thinking_kept=report.thinking_kept,
            window_short=report.is_window_short,
            blocked=report.is_blocked,
        )


class CompactionView(View):
    """A change of the history: an epoch that began with it."""

    epoch: int = Field(examples=[2])
    reason: EpochReason = Field(examples=["compacted"])
    generation: int = Field(description="Segments of one generation are only ever added.", examples=[0])
    segment_count: int = Field(description="How many pieces the history has since then.", examples=[1])
    buffer_start_seq: int = Field(description="The first turn that is still a message.", examples=[13])
    first_seq: int | None = Field(description="Of the newest piece.", examples=[1])
    last_seq: int | None = Field(examples=[12])
    segment_tokens: int | None = Field(description="Of the newest piece, about.", examples=[1300])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, outline: EpochOutline) -> Self:
        """The view of an epoch."""
        newest = outline.last_segment
        return cls(
            epoch=outline.number,
            reason=outline.reason,
            generation=outline.generation,
            segment_count=outline.segment_count,
            buffer_start_seq=outline.buffer_start_seq,
            first_seq=None if newest is None else newest.first_seq,
            last_seq=None if newest is None else newest.last_seq,
            segment_tokens=None if newest is None else newest.token_count,
            created_at=outline.created_at,
        )


class CompactionPage(View):
    """Compactions, newest first."""

    data: list[CompactionView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


@post(
    "/v1/conversations/{conversation_id:str}/compactions",
    guards=[client_only],
    status_code=200,
    summary="Compact a conversation now",
    response_description="What was done, or why nothing was.",
    description="The policy of the assistant decides whether anything is done; `force` moves all that need not stay. "
    "With `dry_run` nothing is changed. A running turn is not disturbed.",
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, EpochMoved, SummaryUnavailable, body=True),
)
async def compact_conversation(
    conversation_id: FromPath[str],
    data: JSONBody[CompactionBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    compactor: NamedDependency[SkipValidation[Compactor]],
) -> Response[CompactionReportView]:
    """The report."""
    report = await compactor.compact(caller.tenant_id, conversation_id, force=data.force, dry_run=data.dry_run)
    return answer_json(CompactionReportView.of(report))


@get(
    "/v1/conversations/{conversation_id:str}/compactions",
    guards=[client_only],
    summary="All compactions of a conversation",
    response_description="A page of them.",
    description="Newest first, with summaries and those that were undone.",
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, CursorInvalid),
)
async def list_compactions(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[CompactionPage]:
    """A page of them."""
    page = await store.list_epochs(caller.tenant_id, conversation_id, cursor=cursor, limit=limit)
    return answer_json(
        CompactionPage(data=[CompactionView.of(item) for item in page.items], next_cursor=page.next_cursor)
    )


@delete(
    "/v1/conversations/{conversation_id:str}/compactions/latest",
    guards=[client_only],
    status_code=200,
    summary="Undo the latest compaction",
    response_description="What was undone.",
    description="Its turns are messages again; a summary gives way to what it summed up. The next request is made of "
    "the same bytes as it would have been without the compaction. From then on the conversation is compacted only when "
    "somebody asks with `force`, its assistant changes, or the window runs short.",
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, CompactionNotFound, ConversationBusy, EpochMoved),
)
async def undo_compaction(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    compactor: NamedDependency[SkipValidation[Compactor]],
) -> Response[CompactionReportView]:
    """The report."""
    return answer_json(CompactionReportView.of(await compactor.undo(caller.tenant_id, conversation_id)))
