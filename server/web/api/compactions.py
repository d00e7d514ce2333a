"""The list of a conversation's compactions. `actions` has the routes that compact and undo."""

from datetime import datetime
from typing import Annotated, Self

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.conversation.epoch import EpochReason
from server.conversation.errors import ConversationNotFound, CursorInvalid
from server.conversation.page import PAGE_LIMIT
from server.conversation.store import EpochOutline, Store
from server.web.api.views import EXAMPLE_TIME, PageView, View
from server.web.auth import client_only
from server.web.errors import document_client_errors
from server.web.json_text import answer_json


class CompactionView(View):
    """A change of the compacted history, which began an epoch."""

    epoch: int = Field(examples=[2])
    reason: EpochReason = Field(examples=["compacted"])
    generation: int = Field(description="Within a generation segments are only added.", examples=[0])
    segment_count: int = Field(description="Number of segments since then.", examples=[1])
    buffer_start_seq: int = Field(description="The first turn that is sent as a message.", examples=[13])
    first_seq: int | None = Field(description="First turn of the newest segment.", examples=[1])
    last_seq: int | None = Field(description="Last turn of the newest segment.", examples=[12])
    segment_tokens: int | None = Field(description="Estimated size of the newest segment.", examples=[1300])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, outline: EpochOutline) -> Self:
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


class CompactionPage(PageView[CompactionView]):
    """Compactions, newest first."""


@get(
    "/v1/conversations/{conversation_id:str}/compactions",
    guards=[client_only],
    summary="List the compactions of a conversation",
    response_description="A page of compactions.",
    description="Newest first, including summaries and compactions that were undone.",
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
    page = await store.list_epochs(caller.tenant_id, conversation_id, cursor=cursor, limit=limit)
    return answer_json(
        CompactionPage(data=[CompactionView.of(item) for item in page.items], next_cursor=page.next_cursor)
    )
