"""Pages of assistants: the list, versions, the difference between versions, and the rendered static prompt."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation

from server.conversation.assistant import AssistantDefinition
from server.conversation.errors import ConversationNotFound
from server.inspection.admin_sessions import AdminSession
from server.inspection.assistant_editor import (
    AssistantEditor,
    CheckedInstructions,
    RenderedPrompt,
    TemplateProblem,
    list_instructions,
)
from server.inspection.assistants import COUNT_CAP, InspectedAssistant, compare_definitions, describe_tool, write_json
from server.inspection.port import Inspector
from server.web.admin.assistant_drafts import example_args, read_object
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
_PROMPT_CHARS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownText:
    """The beginning of a text, as a page shows it."""

    name: str
    text: str
    is_cut: bool
    size_chars: int


def show_part(name: str, text: str, max_chars: int = _TEXT_CHARS) -> ShownText:
    """Truncate a text that may be long."""
    return ShownText(name=name, text=text[:max_chars], is_cut=len(text) > max_chars, size_chars=len(text))


@get("/assistants")
async def show_assistants(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """List assistants, newest first."""
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
    """Show the newest version, and a page of all versions."""
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
    """Show a version; with `against` also its difference from that version."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id, version)
    return await _answer_version(request, session, inspector, found, against=against, cursor=cursor)


@get("/assistants/{assistant_id:str}/versions/{version:int}/definition")
async def download_definition(
    assistant_id: FromPath[str],
    version: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Response[AssistantView]:
    """Download the complete definition: the page truncates long texts."""
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
    scope, assistant = session.tenant_scope, found.assistant
    difference = None
    if against is not None:
        other = await inspector.load_assistant(scope, assistant.id, against)
        # In a thread: comparing large definitions would block the event loop.
        difference = await asyncio.to_thread(compare_definitions, other.assistant.definition, assistant.definition)
    return answer_page(
        request,
        "assistant.html",
        found=found,
        assistant=assistant,
        parts=_show_parts(assistant.definition),
        versions=await inspector.list_versions(scope, assistant.id, cursor=cursor, limit=_VERSIONS),
        is_first=cursor is None,
        difference=difference,
        against=against,
        saved=request.query_params.get("saved") == "true",
        shows_tenant=scope is None,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A rendered prompt, or the reason why there is none."""

    found: InspectedAssistant
    args: str
    """The text in the form."""
    conversation_id: str
    checked: CheckedInstructions
    prompt: RenderedPrompt | None = None
    args_problem: TemplateProblem | None = None
    is_unknown_conversation: bool = False


async def provide_trial(
    request: StrataRequest,
    assistant_id: FromPath[str],
    version: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
) -> _Trial:
    """Render the prompt with the args of the query, those of the conversation, or an example of the args it uses."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id, version)
    checked = await assistant_editor.check(found.tenant_id, found.assistant.definition)
    conversation_id = request.query_params.get("conversation", "").strip()
    example = "" if conversation_id else example_args(checked.args)
    args = request.query_params.get("args", example)
    given, args_problem = read_object("args", args)
    trial = _Trial(found=found, args=args, conversation_id=conversation_id, checked=checked, args_problem=args_problem)
    if args_problem is not None:
        return trial
    try:
        prompt = await assistant_editor.render(
            found.tenant_id, found.assistant, args=given, conversation_id=conversation_id or None
        )
    except ConversationNotFound:
        return replace(trial, is_unknown_conversation=True)
    return replace(trial, prompt=prompt)


_TRIAL: Final = {"trial": Provide(provide_trial)}


@get("/assistants/{assistant_id:str}/versions/{version:int}/prompt", dependencies=_TRIAL)
async def show_prompt(request: StrataRequest, trial: NamedDependency[SkipValidation[_Trial]]) -> Response[bytes]:
    """Show the prompt and its size. Args and conversation are in the URL, so that it can be shared."""
    assistant = trial.found.assistant
    query = urlencode({"args": trial.args, "conversation": trial.conversation_id})
    return answer_page(
        request,
        "assistant_prompt.html",
        status_code=200 if trial.prompt else 422,
        assistant=assistant,
        trial=trial,
        prompt=trial.prompt,
        shown=show_part("prompt", trial.prompt.text, _PROMPT_CHARS) if trial.prompt else None,
        whole_url=f"/admin/assistants/{assistant.id}/versions/{assistant.version}/prompt/whole?{query}",
    )


@get("/assistants/{assistant_id:str}/versions/{version:int}/prompt/whole", dependencies=_TRIAL)
async def download_prompt(trial: NamedDependency[SkipValidation[_Trial]]) -> Response[bytes]:
    """Download the complete prompt. No browser shows it as a page."""
    assistant, text = trial.found.assistant, trial.prompt.text if trial.prompt else ""
    return Response(
        content=text.encode("utf-8", "replace"),
        headers={
            "content-type": "text/plain; charset=utf-8",
            "content-disposition": f'attachment; filename="{assistant.id}-v{assistant.version}-prompt.txt"',
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        },
    )
