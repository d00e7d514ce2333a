"""The static prompt of an assistant, as a conversation with certain args gets it."""

from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.conversation.errors import ConversationNotFound
from server.inspection.admin_sessions import AdminSession
from server.inspection.assistant_editor import AssistantEditor, CheckedInstructions, RenderedPrompt, TemplateProblem
from server.inspection.assistants import InspectedAssistant
from server.inspection.port import Inspector
from server.web.admin.assistant_drafts import example_args, read_object
from server.web.admin.assistant_pages import show_part
from server.web.admin.rendering import answer_page
from server.web.request import StrataRequest

_PROMPT_CHARS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A prompt that was asked for, or why there is none."""

    args: str
    """As they stand in the form."""
    conversation_id: str
    checked: CheckedInstructions
    prompt: RenderedPrompt | None = None
    args_problem: TemplateProblem | None = None
    is_unknown_conversation: bool = False


@get("/assistants/{assistant_id:str}/versions/{version:int}/prompt")
async def show_prompt(
    request: StrataRequest,
    assistant_id: FromPath[str],
    version: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
) -> Response[bytes]:
    """The text and its size. Args and conversation are in the address, so that it can be sent on."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id, version)
    trial = await _try(request, found, assistant_editor)
    query = urlencode({"args": trial.args, "conversation": trial.conversation_id})
    return answer_page(
        request,
        "assistant_prompt.html",
        status_code=200 if trial.prompt else 422,
        found=found,
        assistant=found.assistant,
        trial=trial,
        prompt=trial.prompt,
        shown=show_part("prompt", trial.prompt.text, _PROMPT_CHARS) if trial.prompt else None,
        whole_url=f"/admin/assistants/{found.assistant.id}/versions/{version}/prompt/whole?{query}",
    )


@get("/assistants/{assistant_id:str}/versions/{version:int}/prompt/whole")
async def download_prompt(
    request: StrataRequest,
    assistant_id: FromPath[str],
    version: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
) -> Response[bytes]:
    """All of the text, as a file: whatever it says, no browser shows it as a page."""
    found = await inspector.load_assistant(session.tenant_scope, assistant_id, version)
    trial = await _try(request, found, assistant_editor)
    text = trial.prompt.text if trial.prompt else ""
    return Response(
        content=text.encode("utf-8", "replace"),
        headers={
            "content-type": "text/plain; charset=utf-8",
            "content-disposition": f'attachment; filename="{found.assistant.id}-v{version}-prompt.txt"',
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        },
    )


async def _try(request: StrataRequest, found: InspectedAssistant, editor: AssistantEditor) -> _Trial:
    """With the args of the address, else with those of the conversation, else with an example of what is asked for."""
    checked = await editor.check(found.tenant_id, found.assistant.definition)
    conversation_id = request.query_params.get("conversation", "").strip()
    example = "" if conversation_id else example_args(checked.args)
    args = request.query_params.get("args", example)
    given, args_problem = read_object("args", args)
    trial = _Trial(args=args, conversation_id=conversation_id, checked=checked, args_problem=args_problem)
    if args_problem is not None:
        return trial
    try:
        prompt = await editor.render(
            found.tenant_id, found.assistant, args=given, conversation_id=conversation_id or None
        )
    except ConversationNotFound:
        return replace(trial, is_unknown_conversation=True)
    return replace(trial, prompt=prompt)
