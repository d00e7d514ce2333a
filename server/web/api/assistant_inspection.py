"""Assistants for operators over HTTP: versions, differences, and trying out instructions, under `/admin/api`."""

import asyncio
from dataclasses import replace
from typing import Annotated

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from pydantic import ConfigDict, Field

from server.conversation.api_key import ApiKey
from server.conversation.assistant import Assistant, Instructions
from server.conversation.errors import (
    AssistantNotFound,
    ConversationNotFound,
    CursorInvalid,
    TemplateWorkersBusy,
)
from server.conversation.page import PAGE_LIMIT
from server.inspection.assistant_editor import AssistantEditor
from server.inspection.assistants import compare_definitions
from server.inspection.port import Inspector
from server.web.api.assistant_views import (
    AssistantOutlinePage,
    CheckView,
    ComparedVersionView,
    DifferenceView,
    InspectedAssistantView,
    PromptView,
    VersionPage,
)
from server.web.api.assistants import InstructionsBody
from server.web.api.inspection import choose_tenant, tenant_scope
from server.web.auth import admin_only
from server.web.body import MAX_INTEGER, Body, JsonObject
from server.web.errors import document_admin_errors
from server.web.json_text import answer_json


class DraftBody(Body):
    """A draft of instructions. Members that are left out are those of the version."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"instructions": {"roles": "You know {{ city }}."}}]})

    instructions: InstructionsBody | None = Field(default=None, description="Replace those of the version.")
    variables: JsonObject | None = Field(default=None, description="Replace those of the version.")

    def apply_to(self, assistant: Assistant) -> Assistant:
        """Return the assistant with the draft."""
        definition = assistant.definition
        if self.instructions is not None:
            definition = replace(definition, instructions=Instructions(**self.instructions.model_dump()))
        if self.variables is not None:
            definition = replace(definition, variables=self.variables)
        return replace(assistant, definition=definition)


class RenderBody(DraftBody):
    """A draft to render, and its arguments."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 1, "args": {"city": "Oslo"}}]})

    version: int | None = Field(default=None, ge=1, le=MAX_INTEGER, description="Default: the newest.")
    args: JsonObject | None = Field(default=None, description="Override those of the conversation.")
    conversation_id: str | None = Field(
        default=None, description="The conversation whose args and other members are used."
    )


@get(
    "/admin/api/assistants",
    guards=[admin_only],
    summary="List assistants with totals",
    response_description="A page of the list.",
    description="The newest version of each assistant, newest assistant first. `tenant` selects another tenant, or "
    "`all`, and requires the scope `superadmin`.",
    tags=["inspection"],
    responses=document_admin_errors(CursorInvalid),
)
async def inspect_assistants(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[AssistantOutlinePage]:
    """List assistants."""
    page = await inspector.list_assistants(choose_tenant(caller, tenant), cursor=cursor, limit=limit)
    return answer_json(AssistantOutlinePage.of(page))


@get(
    "/admin/api/assistants/{assistant_id:str}",
    guards=[admin_only],
    summary="Show an assistant and its use",
    response_description="Its newest version.",
    description="The newest version, and the number of conversations by version.",
    tags=["inspection"],
    responses=document_admin_errors(AssistantNotFound),
)
async def inspect_assistant(
    assistant_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Response[InspectedAssistantView]:
    """Show the newest version."""
    return answer_json(InspectedAssistantView.of(await inspector.load_assistant(tenant_scope(caller), assistant_id)))


@get(
    "/admin/api/assistants/{assistant_id:str}/versions",
    guards=[admin_only],
    summary="List the versions of an assistant",
    response_description="A page of the list.",
    description="Newest first.",
    tags=["inspection"],
    responses=document_admin_errors(AssistantNotFound, CursorInvalid),
)
async def list_versions(
    assistant_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[VersionPage]:
    """List versions."""
    page = await inspector.list_versions(tenant_scope(caller), assistant_id, cursor=cursor, limit=limit)
    return answer_json(VersionPage.of(page))


@get(
    "/admin/api/assistants/{assistant_id:str}/versions/{version:int}",
    guards=[admin_only],
    summary="Show a version and its changes",
    response_description="The version.",
    description="With `against`, also the difference from that version: field by field, texts line by line.",
    tags=["inspection"],
    responses=document_admin_errors(AssistantNotFound),
)
async def inspect_version(
    assistant_id: FromPath[str],
    version: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    against: Annotated[int | None, QueryParameter(ge=1, le=MAX_INTEGER)] = None,
) -> Response[ComparedVersionView]:
    """Show a version."""
    found = await inspector.load_assistant(tenant_scope(caller), assistant_id, version)
    difference = None
    if against is not None:
        other = await inspector.load_assistant(tenant_scope(caller), assistant_id, against)
        # Large definitions would block the event loop.
        compared = await asyncio.to_thread(compare_definitions, other.assistant.definition, found.assistant.definition)
        difference = DifferenceView.comparing(against, compared)
    view = InspectedAssistantView.of(found)
    return answer_json(ComparedVersionView(**dict(view), difference=difference))


@post(
    "/admin/api/assistants/{assistant_id:str}/render",
    guards=[admin_only],
    status_code=200,
    summary="Render the static prompt",
    response_description="The text.",
    description="The static layer at the start of a conversation with these args, without history. Nothing is saved. "
    "If a template fails, its source is used, and `problems` names it.",
    tags=["inspection"],
    responses=document_admin_errors(AssistantNotFound, ConversationNotFound, TemplateWorkersBusy, body=True),
)
async def render_prompt(
    assistant_id: FromPath[str],
    data: JSONBody[RenderBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
) -> Response[PromptView]:
    """Render the static text."""
    found = await inspector.load_assistant(tenant_scope(caller), assistant_id, data.version)
    prompt = await assistant_editor.render(
        found.tenant_id, data.apply_to(found.assistant), args=data.args, conversation_id=data.conversation_id
    )
    return answer_json(PromptView.showing(found.assistant.version, prompt))


@post(
    "/admin/api/assistants/{assistant_id:str}/check",
    guards=[admin_only],
    status_code=200,
    summary="Check instructions before saving them",
    response_description="The problems.",
    description="All errors with their lines: syntax errors, and names that change with every turn; and warnings for "
    "unknown names. Nothing is saved.",
    tags=["inspection"],
    responses=document_admin_errors(AssistantNotFound, TemplateWorkersBusy, body=True),
)
async def check_instructions(
    assistant_id: FromPath[str],
    data: JSONBody[DraftBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
) -> Response[CheckView]:
    """Check a draft."""
    found = await inspector.load_assistant(tenant_scope(caller), assistant_id)
    checked = await assistant_editor.check(found.tenant_id, data.apply_to(found.assistant).definition)
    return answer_json(CheckView.of(checked))
