"""The editor of an assistant's instructions. A draft can be checked; a valid draft is saved as a new version."""

import asyncio
from dataclasses import dataclass, replace
from typing import Annotated, Final

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.conversation.audit import Actor
from server.conversation.errors import AssistantRevised
from server.inspection.admin_sessions import AdminSession
from server.inspection.assistant_editor import AssistantEditor, RenderedPrompt, Severity, TemplateProblem
from server.inspection.assistants import AssistantDifference, InspectedAssistant, compare_definitions
from server.inspection.port import Inspector
from server.payload.renderer import Renderer
from server.web.admin.assistant_drafts import (
    Draft,
    example_args,
    find_refusals,
    open_draft,
    read_draft,
    read_version,
    rebase,
)
from server.web.admin.assistant_pages import show_part
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.sessions import read_form
from server.web.api.assistants import ProviderNames
from server.web.body import MAX_INTEGER
from server.web.request import PROBLEM_CODE, StrataRequest

_FORM_LIMIT_BYTES: Final = 10 * 1024 * 1024
"""Enough for three instructions and the variables at the limits of the API, URL-encoded."""
_PREVIEW_CHARS: Final = 50_000


@get("/assistants/{assistant_id:str}/edit")
async def show_editor(
    request: StrataRequest,
    assistant_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
    start: Annotated[int | None, QueryParameter(name="from", ge=1, le=MAX_INTEGER)] = None,
) -> Response[bytes]:
    """Show the form with the texts of the newest version, or of the older version in `from`."""
    newest = await inspector.load_assistant(session.tenant_scope, assistant_id)
    text = newest if start is None else await inspector.load_assistant(session.tenant_scope, assistant_id, start)
    checked = await assistant_editor.check(text.tenant_id, text.assistant.definition)
    draft = open_draft(newest.assistant, text.assistant, example_args(checked.args))
    return _answer(request, newest, draft, None, text_version=text.assistant.version)


@post("/assistants/{assistant_id:str}/check", status_code=200, request_max_body_size=_FORM_LIMIT_BYTES)
async def check_draft(
    request: StrataRequest,
    assistant_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
    renderer: NamedDependency[SkipValidation[Renderer]],
    provider_names: NamedDependency[SkipValidation[ProviderNames]],
) -> Response[bytes]:
    """Show the form again with its problems, its difference and its prompt. Nothing is saved."""
    form = await read_form(request)
    base = await inspector.load_assistant(session.tenant_scope, assistant_id, read_version(form))
    draft = read_draft(base.assistant, form)
    verdict = await _judge(base, draft, assistant_editor, renderer, provider_names)
    return _answer(request, base, draft, verdict)


@post("/assistants/{assistant_id:str}/edit", status_code=303, request_max_body_size=_FORM_LIMIT_BYTES)
async def save_draft(
    request: StrataRequest,
    assistant_id: FromPath[str],
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    assistant_editor: NamedDependency[SkipValidation[AssistantEditor]],
    renderer: NamedDependency[SkipValidation[Renderer]],
    provider_names: NamedDependency[SkipValidation[ProviderNames]],
) -> Response[bytes]:
    """Save a new version, or show the form again with the reason why it was not saved."""
    form = await read_form(request)
    base = await inspector.load_assistant(session.tenant_scope, assistant_id, read_version(form))
    draft = read_draft(base.assistant, form)
    verdict = await _judge(base, draft, assistant_editor, renderer, provider_names)
    if verdict.error_count:
        return _answer(request, base, draft, verdict, status_code=422)
    if base.assistant.version == base.newest_version and not verdict.difference.changes:
        return _answer(request, base, draft, replace(verdict, is_unchanged=True))
    try:
        saved = await assistant_editor.save(
            base.tenant_id, actor, base.assistant.id, draft.definition, expected_version=draft.base_version
        )
    except AssistantRevised as refusal:
        request.scope["state"][PROBLEM_CODE] = refusal.code
        newest = await inspector.load_assistant(session.tenant_scope, assistant_id)
        moved = read_draft(newest.assistant, rebase(form, base.assistant, newest.assistant))
        verdict = await _judge(newest, moved, assistant_editor, renderer, provider_names)
        verdict = replace(verdict, edited_version=draft.base_version)
        return _answer(request, newest, moved, verdict, status_code=409)
    url = f"/admin/assistants/{saved.id}/versions/{saved.version}?against={draft.base_version}&saved=true"
    return answer_redirect(url)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """The result of checking a draft."""

    problems: tuple[TemplateProblem, ...]
    """Errors first. A definition that the API would refuse has at least one."""
    difference: AssistantDifference
    """The difference from the base version."""
    prompt: RenderedPrompt | None
    """None if there are errors."""
    is_unchanged: bool = False
    edited_version: int | None = None
    """The base version of the form, if another version was saved meanwhile."""

    @property
    def error_count(self) -> int:
        """Number of problems that prevent saving."""
        return sum(_is_obstacle(problem) for problem in self.problems)


async def _judge(
    base: InspectedAssistant, draft: Draft, editor: AssistantEditor, renderer: Renderer, providers: ProviderNames
) -> _Verdict:
    checked = await editor.check(base.tenant_id, draft.definition)
    refusals = await find_refusals(base.tenant_id, draft.definition, providers, renderer) if checked.is_valid else ()
    problems = (*draft.problems, *refusals, *checked.problems)
    # In a thread: comparing large definitions would block the event loop.
    difference = await asyncio.to_thread(compare_definitions, base.assistant.definition, draft.definition)
    prompt = None
    if not any(_is_obstacle(problem) for problem in problems):
        tried = replace(base.assistant, definition=draft.definition)
        prompt = await editor.render(base.tenant_id, tried, args=draft.args)
    return _Verdict(problems=problems, difference=difference, prompt=prompt)


def _is_obstacle(problem: TemplateProblem) -> bool:
    """Return whether a problem prevents saving. Args are only used for the preview."""
    return problem.severity is Severity.ERROR and problem.template != "args"


def _answer(
    request: StrataRequest,
    base: InspectedAssistant,
    draft: Draft,
    verdict: _Verdict | None,
    *,
    status_code: int = 200,
    text_version: int | None = None,
) -> Response[bytes]:
    prompt = verdict.prompt if verdict else None
    return answer_page(
        request,
        "assistant_edit.html",
        status_code=status_code,
        found=base,
        assistant=base.assistant,
        draft=draft,
        verdict=verdict,
        text_version=text_version,
        prompt=prompt,
        shown=show_part("prompt", prompt.text, _PREVIEW_CHARS) if prompt else None,
    )
