"""Routes to create, list, load and change conversations. The `etag` is the revision, which reveals changes."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from litestar import Response, get, patch, post, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from pydantic import ConfigDict, Field, model_validator

from server.conversation.api_key import ApiKey
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.errors import (
    AssistantNotFound,
    ConversationNotFound,
    CursorInvalid,
    RevisionMismatch,
)
from server.conversation.page import PAGE_LIMIT
from server.conversation.store import ConversationChange, ConversationFilter, Store
from server.web.api.actions import ETAG
from server.web.api.views import ASSISTANT_ID, ConversationView, PageView
from server.web.auth import client_only
from server.web.body import (
    CONTEXT_LIMIT,
    MAX_BIGINT,
    MAX_INTEGER,
    Body,
    ContextObject,
    JsonObject,
    TextLimit,
)
from server.web.errors import document_client_errors
from server.web.headers import IfMatch, IfNoneMatch, is_unchanged, read_expected_revision, write_etag
from server.web.json_text import answer_json
from server.web.validation import in_utc, refuse

_LABEL: Final = TextLimit(256)


class ConversationBody(Body):
    """A new conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"assistant_id": ASSISTANT_ID},
                {
                    "assistant_id": ASSISTANT_ID,
                    "identifier": "ticket-4711",
                    "source": "web",
                    "args": {"city": "Oslo"},
                    "context": {"todos": ["pack"]},
                    "metadata": {"client.language": "nb"},
                },
            ]
        }
    )

    assistant_id: str
    assistant_version: int | None = Field(
        default=None, ge=1, le=MAX_INTEGER, description="Default: the newest version."
    )
    identifier: Annotated[str, _LABEL] | None = Field(default=None, description="Your own name for the conversation.")
    source: Annotated[str, _LABEL] | None = Field(default=None, description="Prompt argument `conversation.source`.")
    direction: Annotated[str, _LABEL] | None = Field(
        default=None, description="Prompt argument `conversation.direction`."
    )
    mode: Annotated[str, _LABEL] | None = Field(default=None, description="Prompt argument `session.mode`.")
    args: JsonObject = Field(default_factory=dict, description="Prompt arguments.")
    context: ContextObject = Field(
        default_factory=dict,
        description="The dynamic layer: `file_references`, `artifacts`, `todos`, and your own members.",
    )
    metadata: JsonObject = Field(
        default_factory=dict,
        description="Your own data; never sent to a model. `client.language` is the user's language.",
    )


class ConversationEdit(Body):
    """Changes of a conversation. Absent members are not changed."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "examples": [{"assistant_version": "latest"}, {"metadata": {"team": "north"}, "expected_revision": 4}],
        }
    )

    assistant_version: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | Literal["latest"] = Field(
        default=0, description="Moves the conversation to another version of its assistant."
    )
    args: JsonObject = Field(default_factory=dict)
    context: ContextObject = Field(default_factory=dict)
    metadata: JsonObject = Field(default_factory=dict)
    expected_revision: int | None = Field(default=None, ge=0, le=MAX_BIGINT)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set - {"expected_revision"}:
            message = "Expected at least one change"
            raise ValueError(message)
        return self


class ConversationPage(PageView[ConversationView]):
    """Conversations, newest first."""


_NOT_MODIFIED: Final = ResponseSpec(
    data_container=None, generate_examples=False, description="The conversation has not changed since that revision."
)


@post(
    "/v1/conversations",
    guards=[client_only],
    summary="Create a conversation",
    response_description="The conversation.",
    description="It keeps the version of the assistant that it begins with, until PATCH changes it.",
    response_headers=ETAG,
    tags=["conversations"],
    responses=document_client_errors(AssistantNotFound, body=True),
)
async def create_conversation(
    data: JSONBody[ConversationBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[ConversationView]:
    draft = ConversationDraft(**{name: getattr(data, name) for name in type(data).model_fields})
    return _answer(await store.create_conversation(caller.tenant_id, draft), created=True)


@get(
    "/v1/conversations",
    guards=[client_only],
    summary="List conversations",
    response_description="A page of conversations.",
    description="Newest first. Filters can be combined; times are compared with `created_at`.",
    tags=["conversations"],
    responses=document_client_errors(CursorInvalid),
)
async def list_conversations(
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    assistant_id: FromQuery[str | None] = None,
    identifier: FromQuery[str | None] = None,
    created_after: FromQuery[datetime | None] = None,
    created_before: FromQuery[datetime | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[ConversationPage]:
    filters = ConversationFilter(
        assistant_id=assistant_id,
        identifier=identifier,
        created_after=in_utc("created_after", created_after),
        created_before=in_utc("created_before", created_before),
    )
    page = await store.list_conversations(caller.tenant_id, filters=filters, cursor=cursor, limit=limit)
    return answer_json(ConversationPage.of(page))


@get(
    "/v1/conversations/{conversation_id:str}",
    guards=[client_only],
    summary="Load a conversation",
    response_description="The conversation.",
    description="Returns it without its turns. `state` is `idle`, `running` or `awaiting_tools`.",
    response_headers=ETAG,
    tags=["conversations"],
    responses={304: _NOT_MODIFIED, **document_client_errors(ConversationNotFound)},
)
async def show_conversation(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    if_none_match: IfNoneMatch = None,
) -> Response[ConversationView]:
    conversation = await store.load_conversation(caller.tenant_id, conversation_id)
    if is_unchanged(if_none_match, conversation.revision):
        unchanged: Response[Any] = Response(
            content=None, status_code=304, headers={"etag": write_etag(conversation.revision)}
        )
        return unchanged
    return _answer(conversation)


@patch(
    "/v1/conversations/{conversation_id:str}",
    guards=[client_only],
    summary="Change a conversation",
    response_description="The changed conversation.",
    description="Absent members are not changed. A running turn uses the values that it began with.",
    response_headers=ETAG,
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, AssistantNotFound, RevisionMismatch, body=True),
)
async def change_conversation(
    conversation_id: FromPath[str],
    data: JSONBody[ConversationEdit],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    if_match: IfMatch = None,
) -> Response[ConversationView]:
    expected_revision = read_expected_revision(if_match, data.expected_revision)
    changed = data.model_fields_set
    change = ConversationChange(
        assistant_version=await _version(data, store, caller.tenant_id, conversation_id),
        args=data.args if "args" in changed else None,
        context=data.context if "context" in changed else None,
        metadata=data.metadata if "metadata" in changed else None,
    )
    return await _change(store, caller.tenant_id, conversation_id, change, expected_revision)


@put(
    "/v1/conversations/{conversation_id:str}/context",
    guards=[client_only],
    summary="Replace the context",
    response_description="The changed conversation.",
    description="The body is the content of the dynamic layer: `file_references`, `artifacts`, `todos`, and any "
    "members that your own template uses.",
    response_headers=ETAG,
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, RevisionMismatch, body=True),
)
async def replace_context(
    conversation_id: FromPath[str],
    data: JSONBody[dict[str, Any]],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    if_match: IfMatch = None,
) -> Response[ConversationView]:
    try:
        context = CONTEXT_LIMIT.check(data)
    except ValueError as error:
        raise refuse("", str(error)) from None
    expected_revision = read_expected_revision(if_match)
    return await _change(
        store, caller.tenant_id, conversation_id, ConversationChange(context=context), expected_revision
    )


async def _change(
    store: Store, tenant_id: str, conversation_id: str, change: ConversationChange, expected_revision: int | None
) -> Response[Any]:
    changed = await store.change_conversation(tenant_id, conversation_id, change, expected_revision=expected_revision)
    return _answer(await _with_calls(store, tenant_id, changed))


async def _with_calls(store: Store, tenant_id: str, conversation: Conversation) -> Conversation:
    """Reload a conversation with pending calls: only loading includes their arguments."""
    if not conversation.pending_call_ids:
        return conversation
    return await store.load_conversation(tenant_id, conversation.id)


async def _version(edit: ConversationEdit, store: Store, tenant_id: str, conversation_id: str) -> int | None:
    if edit.assistant_version != "latest":
        return edit.assistant_version or None
    conversation = await store.load_conversation(tenant_id, conversation_id)
    return (await store.load_assistant(tenant_id, conversation.assistant_id)).version


def _answer(conversation: Conversation, *, created: bool = False) -> Response[Any]:
    headers = {"etag": write_etag(conversation.revision)}
    if created:
        headers["location"] = f"/v1/conversations/{conversation.id}"
    return answer_json(ConversationView.of(conversation), 201 if created else 200, headers)
