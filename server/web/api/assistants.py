"""Routes to create, list, load and revise assistants. Saving an unchanged assistant creates no new version."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Self

from litestar import Response, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from pydantic import ConfigDict, Field, field_validator

from server.conversation.api_key import ApiKey
from server.conversation.assistant import Assistant, AssistantDefinition, Instructions, Tool
from server.conversation.errors import AssistantNotFound, CursorInvalid, TemplateInvalid, TemplateWorkersBusy
from server.conversation.page import PAGE_LIMIT
from server.conversation.store import Store
from server.payload.renderer import Renderer
from server.payload.settings import check_settings
from server.providers.choice import DEFAULT_MODELS
from server.web.api.views import ASSISTANT_ID, EXAMPLE_TIME, PageView, View
from server.web.auth import client_only
from server.web.body import MAX_INTEGER, Body, JsonObject, TextLimit
from server.web.errors import document_client_errors
from server.web.json_text import answer_json
from server.web.validation import refuse

_INSTRUCTION: Final = TextLimit(200_000)
_TOOL_EXAMPLE: Final[dict[str, Any]] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_EXAMPLE: Final[dict[str, Any]] = {
    "name": "helper",
    "language": "en",
    "description": "Answers questions about the weather.",
    "provider": "gemini",
    "model": "gemini-3.1-pro-preview",
    "instructions": {"roles": "You know the weather.", "procedure": "Look it up.", "constraints": "Be {{ tone }}."},
    "variables": {"tone": "friendly"},
    "tools": [_TOOL_EXAMPLE],
    "settings": {"max_output_tokens": 1024, "thinking": "low"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderNames:
    """The providers that this server has keys for."""

    default: str | None
    """The provider of an assistant that names none."""
    known: Collection[str]


class InstructionsBody(Body):
    """The texts of the static layer. Each is a template and may be empty."""

    roles: Annotated[str, _INSTRUCTION] = Field(default="", description="Who the assistant is.")
    procedure: Annotated[str, _INSTRUCTION] = Field(default="", description="How the assistant proceeds.")
    constraints: Annotated[str, _INSTRUCTION] = Field(default="", description="What the assistant must not do.")


class ToolBody(Body):
    """A function that the client runs when the model calls it."""

    name: str = Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_-]{0,63}$", examples=["get_weather"])
    description: Annotated[str, TextLimit(20_000)] = Field(default="", examples=["The weather in a city."])
    parameters: JsonObject = Field(
        default_factory=lambda: {"type": "object", "properties": {}},
        description="A JSON schema whose type is `object`. The order of its keys is kept.",
        examples=[_TOOL_EXAMPLE["parameters"]],
    )

    @field_validator("parameters")
    @classmethod
    def _object_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "object" or not isinstance(value.get("properties", {}), dict):
            message = "Expected a JSON schema whose type is `object`"
            raise ValueError(message)
        return value


class AssistantBody(Body):
    """The definition of an assistant."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "helper"}, _EXAMPLE]})

    name: Annotated[str, TextLimit(200, blank=False)]
    language: Annotated[str, TextLimit(64)] = Field(default="", description="Prompt argument `assistant.language`.")
    description: Annotated[str, TextLimit(2000)] = Field(
        default="", description="Prompt argument `assistant.description`."
    )
    provider: str | None = Field(
        default=None, description="`gemini` or `anthropic`. Default: the server's default provider."
    )
    model: Annotated[str, TextLimit(200, blank=False)] | None = Field(
        default=None, description="Default: the provider's default model."
    )
    instructions: InstructionsBody = Field(default_factory=InstructionsBody)
    variables: JsonObject = Field(default_factory=dict, description="Defaults of the prompt arguments.")
    tools: list[ToolBody] = Field(default_factory=list, max_length=128)
    settings: JsonObject = Field(default_factory=dict, description="Settings of the model calls.")

    @field_validator("tools")
    @classmethod
    def _named_once(cls, value: list[ToolBody]) -> list[ToolBody]:
        names = [tool.name for tool in value]
        if len(set(names)) != len(names):
            message = "Expected each tool name once"
            raise ValueError(message)
        return value


class AssistantView(View):
    """One version of an assistant."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": ASSISTANT_ID, "version": 1, "created_at": EXAMPLE_TIME, **_EXAMPLE}]}
    )

    id: str
    version: int = Field(description="The first version is 1; each change adds one.")
    created_at: datetime
    name: str
    language: str
    description: str
    provider: str
    model: str
    instructions: dict[str, str] = Field(description="`roles`, `procedure`, `constraints`.")
    variables: dict[str, Any]
    tools: list[dict[str, Any]] = Field(description="`name`, `description`, `parameters` of each.")
    settings: dict[str, Any]

    @classmethod
    def of(cls, assistant: Assistant) -> Self:
        return cls(
            id=assistant.id,
            version=assistant.version,
            created_at=assistant.created_at,
            **definition_members(assistant.definition),
        )


class AssistantPage(PageView[AssistantView]):
    """Assistants in their newest versions, newest assistant first."""


@post(
    "/v1/assistants",
    guards=[client_only],
    summary="Create an assistant",
    response_description="Version 1.",
    description="Instructions are templates. A template that does not parse or that depends on the clock is refused.",
    tags=["assistants"],
    responses=document_client_errors(TemplateInvalid, TemplateWorkersBusy, body=True),
)
async def create_assistant(
    data: JSONBody[AssistantBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    renderer: NamedDependency[SkipValidation[Renderer]],
    provider_names: NamedDependency[SkipValidation[ProviderNames]],
) -> Response[AssistantView]:
    definition = await check_definition(caller.tenant_id, data, provider_names, renderer)
    assistant = await store.create_assistant(caller.tenant_id, definition)
    return answer_json(AssistantView.of(assistant), 201, {"location": f"/v1/assistants/{assistant.id}"})


@get(
    "/v1/assistants",
    guards=[client_only],
    summary="List assistants",
    response_description="A page of assistants.",
    description="The newest version of each, newest assistant first.",
    tags=["assistants"],
    responses=document_client_errors(CursorInvalid),
)
async def list_assistants(
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[AssistantPage]:
    page = await store.list_assistants(caller.tenant_id, cursor=cursor, limit=limit)
    return answer_json(
        AssistantPage(data=[AssistantView.of(item) for item in page.items], next_cursor=page.next_cursor)
    )


@get(
    "/v1/assistants/{assistant_id:str}",
    guards=[client_only],
    summary="Load an assistant",
    response_description="The version.",
    description="Returns the newest version, or the given one.",
    tags=["assistants"],
    responses=document_client_errors(AssistantNotFound),
)
async def show_assistant(
    assistant_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    version: Annotated[int | None, QueryParameter(ge=1, le=MAX_INTEGER)] = None,
) -> Response[AssistantView]:
    return answer_json(AssistantView.of(await store.load_assistant(caller.tenant_id, assistant_id, version)))


@put(
    "/v1/assistants/{assistant_id:str}",
    guards=[client_only],
    summary="Change an assistant",
    response_description="The newest version.",
    description="Replaces the whole definition with a new version, unless nothing differs. Conversations keep their "
    "version of the assistant; PATCH changes it.",
    tags=["assistants"],
    responses=document_client_errors(AssistantNotFound, TemplateInvalid, TemplateWorkersBusy, body=True),
)
async def revise_assistant(
    assistant_id: FromPath[str],
    data: JSONBody[AssistantBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    renderer: NamedDependency[SkipValidation[Renderer]],
    provider_names: NamedDependency[SkipValidation[ProviderNames]],
) -> Response[AssistantView]:
    newest = await store.load_assistant(caller.tenant_id, assistant_id)
    definition = await check_definition(caller.tenant_id, data, provider_names, renderer)
    # Compared as text: the order of keys is part of a definition, because it affects prompts and caches.
    if json.dumps(definition_members(definition)) != json.dumps(definition_members(newest.definition)):
        newest = await store.revise_assistant(caller.tenant_id, assistant_id, definition)
    return answer_json(AssistantView.of(newest))


async def check_definition(
    tenant_id: str, body: AssistantBody, providers: ProviderNames, renderer: Renderer
) -> AssistantDefinition:
    """Build a definition. Raises `ValidationFailed`, `TemplateInvalid` and `TemplateWorkersBusy`."""
    provider = body.provider or providers.default
    if provider is None or provider not in providers.known:
        known = ", ".join(sorted(providers.known)) or "none"
        raise refuse("provider", f"Expected a provider that this server has a key for: {known}")
    definition = AssistantDefinition(
        name=body.name,
        provider=provider,
        model=body.model or DEFAULT_MODELS[provider],
        language=body.language,
        description=body.description,
        instructions=Instructions(**body.instructions.model_dump()),
        variables=body.variables,
        tools=tuple(
            Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in body.tools
        ),
        settings=body.settings,
    )
    check_settings(definition.provider, definition.model, definition.settings)
    await renderer.check_instructions(tenant_id, definition)
    return definition


def definition_members(definition: AssistantDefinition) -> Mapping[str, Any]:
    """Return the members of a definition as in a body."""
    instructions = definition.instructions
    return {
        "name": definition.name,
        "language": definition.language,
        "description": definition.description,
        "provider": definition.provider,
        "model": definition.model,
        "instructions": {
            "roles": instructions.roles,
            "procedure": instructions.procedure,
            "constraints": instructions.constraints,
        },
        "variables": dict(definition.variables),
        "tools": [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in definition.tools
        ],
        "settings": dict(definition.settings),
    }
