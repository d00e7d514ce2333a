"""Implements the renderer port with Jinja."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from server.conversation.assistant import AssistantDefinition, Instructions
from server.conversation.block import JsonValue
from server.conversation.errors import TemplateInvalid
from server.payload.arguments import clone
from server.payload.renderer import (
    InspectedInstructions,
    ReferencedName,
    RenderedDynamic,
    RenderedPrompt,
    RenderedStatic,
    TemplateFailure,
)
from server.payload.transcript import TranscriptTurn
from server.prompts.templates import (
    UNLIMITED_CHARS,
    LayerFailed,
    LayerTemplate,
    TemplateSet,
    override_templates,
    refuse_template,
    render_dynamic_layer,
    render_layer,
    render_static_layer,
)
from server.prompts.worker_pool import RenderLimits, WorkerPool

_TAGS: Final = ("{{", "{%", "{#")
"""A text without any of them is not a template and is not passed to Jinja."""
_LISTS: Final = ("file_references", "artifacts", "todos")


class JinjaRenderer:
    """Renders the server's own templates in this process and all others in worker processes, which `close` ends."""

    def __init__(self, templates: TemplateSet, limits: RenderLimits, *, pool: WorkerPool | None = None) -> None:
        """`pool`: shared with another renderer, which closes it; tasks then wait for a worker without a limit."""
        self._templates = templates
        self._limits = limits
        self._has_wait_limit = pool is None
        self.pool = pool or WorkerPool(limits)

    def with_templates(self, sources: Mapping[str, str]) -> "JinjaRenderer":
        """Return a renderer for replays, with other sources for some layer templates, by file name.

        It shares the workers of this one, need not be closed, and waits for a worker without a limit: no client waits
        for a replay, and its result must not depend on the load of the server. Raises `ValidationFailed` for an
        unknown file name; `check_templates` checks the sources.
        """
        return JinjaRenderer(override_templates(self._templates, sources), self._limits, pool=self.pool)

    async def render_static(
        self, tenant_id: str, provider: str, assistant: AssistantDefinition, arguments: Mapping[str, JsonValue]
    ) -> RenderedStatic:
        template = self._templates.static[provider]
        texts: dict[str, str] = {}
        failures: list[TemplateFailure] = []
        for name, source in _texts(assistant.instructions):
            texts[name], failure = await self._render_instruction(tenant_id, name, source, arguments)
            failures += [failure] if failure is not None else []
        values = {**arguments, **texts}
        try:
            if template.compiled is None:
                text = (await self._ask_for_layer(tenant_id, template, "static", values))["text"]
            else:
                text = render_static_layer(template, values, UNLIMITED_CHARS)
        except LayerFailed as error:
            text = template.source
            failures.append(error.failure)
        return RenderedStatic(
            text=text, template_source=template.source, template_hash=template.sha256, failures=tuple(failures)
        )

    async def render_dynamic(
        self,
        tenant_id: str,
        provider: str,
        context: Mapping[str, JsonValue],
        arguments: Mapping[str, JsonValue],
    ) -> RenderedDynamic:
        template = self._templates.dynamic[provider]
        own = clone(context)
        values = {
            **arguments,
            **{name: own.get(name, []) for name in _LISTS},
            "current_datetime": arguments["system"]["current_datetime"],
            "context": own,
        }
        failure: TemplateFailure | None
        try:
            if template.compiled is None:
                answer = await self._ask_for_layer(tenant_id, template, "dynamic", values)
                text, failure = answer["text"], _read_failure(template.name, answer.get("warning"))
            else:
                text, failure = render_dynamic_layer(template, values, self._limits.output_chars)
        except LayerFailed as error:
            text, failure = template.source, error.failure
        return RenderedDynamic(text=text, failures=() if failure is None else (failure,))

    async def render_segment(self, tenant_id: str, turns: Sequence[TranscriptTurn]) -> str:
        template = self._templates.segment
        if template.compiled is None:
            text = await self._render_or_refuse(tenant_id, template, {"turns": [asdict(turn) for turn in turns]})
        else:
            text = await self._render_or_refuse(tenant_id, template, {"turns": turns})
        return text if text.endswith("\n") else f"{text}\n"

    async def render_summary_request(
        self, tenant_id: str, first_seq: int, last_seq: int, limit_words: int
    ) -> RenderedPrompt:
        template = self._templates.summary
        values = {"first_seq": first_seq, "last_seq": last_seq, "limit_words": limit_words}
        text = (await self._render_or_refuse(tenant_id, template, values)).strip()
        return RenderedPrompt(text=text, template_source=template.source, template_hash=template.sha256)

    async def check_instructions(self, tenant_id: str, assistant: AssistantDefinition) -> None:
        for name, source in _texts(assistant.instructions):
            if not _is_template(source):
                continue
            answer = await self._ask(tenant_id, {"task": "check", "source": source})
            if "failure" in answer:
                found = answer["failure"]
                position = f"`{name}`" if found["line"] is None else f"`{name}`, line {found['line']}"
                raise TemplateInvalid(f"{position}: {found['message']}", template=name, line=found["line"])

    async def inspect_instructions(self, tenant_id: str, instructions: Instructions) -> InspectedInstructions:
        failures: list[TemplateFailure] = []
        names: list[ReferencedName] = []
        for name, source in _texts(instructions):
            if not _is_template(source):
                continue
            answer = await self._ask(tenant_id, {"task": "inspect", "source": source})
            found = [answer["failure"]] if "failure" in answer else answer["failures"]
            failures += [TemplateFailure(template=name, **failure) for failure in found]
            names += [
                ReferencedName(template=name, path=path, line=line, is_guarded=is_guarded)
                for path, line, is_guarded in answer.get("names", ())
            ]
        return InspectedInstructions(failures=tuple(failures), names=tuple(names))

    async def check_templates(self, tenant_id: str) -> None:
        templates = self._templates
        for template in (*templates.static.values(), *templates.dynamic.values(), templates.segment, templates.summary):
            if template.compiled is None:
                request = {"task": "check_layer", "name": template.name, "source": template.source}
                answer = await self._ask(tenant_id, request)
                if "failure" in answer:
                    raise refuse_template(template.name, answer["failure"]["message"])

    async def close(self) -> None:
        await self.pool.close()

    async def _render_instruction(
        self, tenant_id: str, name: str, source: str, arguments: Mapping[str, JsonValue]
    ) -> tuple[str, TemplateFailure | None]:
        if not _is_template(source):
            return source, None
        answer = await self._ask(tenant_id, {"task": "render", "source": source, "arguments": arguments})
        if "failure" in answer:
            return source, _read_failure(name, answer["failure"])
        return answer["text"], None

    async def _render_or_refuse(self, tenant_id: str, template: LayerTemplate, values: Mapping[str, Any]) -> str:
        try:
            if template.compiled is not None:
                return render_layer(template, values)
            answer = await self._ask_for_layer(tenant_id, template, "history", values)
        except LayerFailed as error:
            failure = error.failure
            raise TemplateInvalid(
                f"{template.name}: {failure.message}", template=template.name, line=failure.line
            ) from error
        return str(answer["text"])

    async def _ask_for_layer(
        self, tenant_id: str, template: LayerTemplate, layer: str, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Render the template in a worker and return its response. Raises `LayerFailed`."""
        request = {"task": "render_layer", "layer": layer, "name": template.name, "source": template.source}
        answer = await self._ask(tenant_id, {**request, "values": values})
        failure = _read_failure(template.name, answer.get("failure"))
        if failure is not None:
            raise LayerFailed(failure)
        return answer

    async def _ask(self, tenant_id: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self.pool.ask(tenant_id, request, has_wait_limit=self._has_wait_limit)


def _texts(texts: Instructions) -> tuple[tuple[str, str], ...]:
    return ("roles", texts.roles), ("procedure", texts.procedure), ("constraints", texts.constraints)


def _is_template(source: str) -> bool:
    return any(tag in source for tag in _TAGS)


def _read_failure(template: str, failure: Mapping[str, Any] | None) -> TemplateFailure | None:
    return None if failure is None else TemplateFailure(template=template, **failure)
