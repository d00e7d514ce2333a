"""The assistants: their versions, what changed between them, and what a model reads of them."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation

from server.conversation.assistant import AssistantDefinition
from server.inspection.admin_sessions import AdminSession
from server.inspection.assistant_editor import list_instructions
from server.inspection.assistants import COUNT_CAP, InspectedAssistant, compare_definitions, describe_tool, write_json
from server.inspection.port import Inspector
from server.web.admin.rendering import answer_page
from server.web.api.assistants import AssistantView
from server.web.body import MAX_INTEGER
from server.web.json_text import answer_json
from server.web.request import StrataRequest

_ROWS: Final = 50
_VERSIONS: Final = 20
_TEXT_CHARS: Final = 20_000
_TOOL_CHARS: Final = 8000
_SETTING_CHARS: Final = 2000
_MAX_SETTINGS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownText:
    """A text as far as a page shows it."""

    name: str
    text: str
    is_cut: bool
    size_chars: int


def show_part(name: str, text: str, max_chars: int = _TEXT_CHARS) -> ShownText:
    """The beginning of a text that may be long."""
    return ShownText(name=name, text=text[:max_chars], is_cut=len(text) > max_chars, size_chars=len(text))


@get("/assistants")
async def show_assistants(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """A page of them, newest first."""
    page = await inspector.list_assistants(session.tenant_scope, cursor=cursor, limit=_ROWS)
    return answer_page(
        request,
        "assistants.html",
        outlines=page.items,
        cap=COUNT_CAP,
        shows_tenant=session.tenant_scope is None,
        is_first=cursor is None,
        next_url=f"/admin/assistants?{urlencode({'cursor': page.next_cursor})}" if page.next_cursor else None,
    )


@get("/assistants/{assistant_id:str}")
async def show_assistant_page(
    request: StrataRequest,
    assistant_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Its newest version, and a page of all versions."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id)
    return await _answer_version(request, session, inspector, found, cursor=cursor)


@get("/assistants/{assistant_id:str}/versions/{version:int}")
async def show_version_page(
    request: StrataRequest,
    assistant_id: FromPath[str],
    version: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    against: Annotated[int | None, QueryParameter(ge=1, le=MAX_INTEGER)] = None,
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """One version; with `against` also what is different from that one."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id, version)
    return await _answer_version(request, session, inspector, found, against=against, cursor=cursor)


@get("/assistants/{assistant_id:str}/versions/{version:int}/definition")
async def download_definition(
    assistant_id: FromPath[str],
    version: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Response[AssistantView]:
    """The whole of it, for what the page cuts."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id, version)
    name = f"{found.assistant.id}-v{version}.json"
    return answer_json(
        AssistantView.of(found.assistant),
        headers={"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"},
    )


async def _answer_version(
    request: StrataRequest,
    session: AdminSession,
    inspector: Inspector,
    found: InspectedAssistant,
    *,
    against: int | None = None,
    cursor: str | None = None,
) -> Response[bytes]:
    reach, assistant = session.tenant_scope, found.assistant
    difference = None
    if against is not None:
        other = await inspector.load_assistant(reach, assistant.id, against)
        # In a thread: large definitions take a while.
        difference = await asyncio.to_thread(compare_definitions, other.assistant.definition, assistant.definition)
    return answer_page(
        request,
        "assistant.html",
        found=found,
        assistant=assistant,
        parts=_show_parts(assistant.definition),
        versions=await inspector.list_versions(reach, assistant.id, cursor=cursor, limit=_VERSIONS),
        is_first=cursor is None,
        difference=difference,
        against=against,
        saved=request.query_params.get("saved") == "true",
        shows_tenant=reach is None,
        cap=COUNT_CAP,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A definition as the page shows it."""

    instructions: Sequence[ShownText]
    variables: ShownText
    tools: Sequence[ShownText]
    settings: Sequence[ShownText]


def _show_parts(definition: AssistantDefinition) -> _Parts:
    settings = list(definition.settings.items())[:_MAX_SETTINGS]
    return _Parts(
        instructions=[show_part(name, text) for name, text in list_instructions(definition.instructions)],
        variables=show_part("variables", write_json(definition.variables)),
        tools=[show_part(tool.name, write_json(describe_tool(tool)), _TOOL_CHARS) for tool in definition.tools],
        settings=[show_part(name, json.dumps(value, ensure_ascii=False), _SETTING_CHARS) for name, value in settings],
    )
