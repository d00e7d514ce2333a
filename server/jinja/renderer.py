"""The renderer port on Jinja."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from server.assistant import AssistantDefinition, Instructions
from server.block import JsonValue
from server.errors import TemplateInvalid
from server.jinja.environment import RENDER_ERRORS, TextTooLong, describe, line_of, render_within, to_json
from server.jinja.limits import RenderLimits
from server.jinja.templates import LayerTemplate, TemplateSet, override_templates
from server.jinja.worker_process import WorkerProcess
from server.prompt_arguments import clone
from server.renderer import (
    AskedName,
    InspectedInstructions,
    RenderedDynamic,
    RenderedQuestion,
    RenderedStatic,
    TemplateFailure,
)
from server.transcript import TranscriptTurn

_TAGS: Final = ("{{", "{%", "{#")
"""A text with none of them is no template and is left as it is, without any engine."""
_LISTS: Final = ("file_references", "artifacts", "todos")


class JinjaRenderer:
    """Layers in this process, instructions in another one. `close` ends that one."""

    def __init__(self, templates: TemplateSet, limits: RenderLimits, *, worker: WorkerProcess | None = None) -> None:
        """`worker`: another renderer's, which closes it."""
        self._templates = templates
        self._limits = limits
        self._worker = worker or WorkerProcess(limits)

    def with_templates(self, sources: Mapping[str, str]) -> "JinjaRenderer":
        """One with other layers' templates, by the names of their files. It need not be closed, and ends with this one.

        Raises `ValidationFailed`.
        """
        if not sources:
            return self
        return JinjaRenderer(override_templates(self._templates, sources), self._limits, worker=self._worker)

    @property
    def worker_pid(self) -> int | None:
        """Of the process that renders instructions, if it runs."""
        return self._worker.pid

    async def render_static(
        self, provider: str, assistant: AssistantDefinition, arguments: Mapping[str, JsonValue]
    ) -> RenderedStatic:
        template = self._templates.static[provider]
        texts: dict[str, str] = {}
        failures: list[TemplateFailure] = []
        for name, source in _texts(assistant.instructions):
            texts[name], failure = await self._render_instruction(name, source, arguments)
            failures += [failure] if failure is not None else []
        try:
            text = _base_text(template, template.compiled.render({**arguments, **texts}))
        except RENDER_ERRORS as error:
            text = template.source
            failures.append(_failure(template.name, "render", error))
        return RenderedStatic(
            text=text, template_source=template.source, template_hash=template.sha256, failures=tuple(failures)
        )

    def render_dynamic(
        self, provider: str, context: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
    ) -> RenderedDynamic:
        template = self._templates.dynamic[provider]
        own = clone(context)
        values = {
            **arguments,
            **{name: own.get(name, []) for name in _LISTS},
            "current_datetime": arguments["system"]["current_datetime"],
            "context": own,
        }
        try:
            text = render_within(template.compiled, values, self._limits.output_chars)
        except (TextTooLong, OverflowError) as error:
            return RenderedDynamic(text=template.source, failures=(_failure(template.name, "too_large", error),))
        except RENDER_ERRORS as error:
            return RenderedDynamic(text=template.source, failures=(_failure(template.name, "render", error),))
        try:
            return RenderedDynamic(text=_compact(text), failures=())
        except (ValueError, RecursionError) as error:
            return RenderedDynamic(text=text, failures=(_failure(template.name, "not_json", error),))

    def render_segment(self, turns: Sequence[TranscriptTurn]) -> str:
        text = _render_or_refuse(self._templates.segment, {"turns": turns})
        return text if text.endswith("\n") else f"{text}\n"

    def render_summary_request(self, first_seq: int, last_seq: int, limit_words: int) -> RenderedQuestion:
        template = self._templates.summary
        values = {"first_seq": first_seq, "last_seq": last_seq, "limit_words": limit_words}
        text = _render_or_refuse(template, values).strip()
        return RenderedQuestion(text=text, template_source=template.source, template_hash=template.sha256)

    async def check_instructions(self, assistant: AssistantDefinition) -> None:
        for name, source in _texts(assistant.instructions):
            if not _is_template(source):
                continue
            answer = await self._worker.ask({"task": "check", "source": source})
            if "failure" in answer:
                found = answer["failure"]
                place = f"`{name}`" if found["line"] is None else f"`{name}`, line {found['line']}"
                raise TemplateInvalid(f"{place}: {found['message']}", template=name, line=found["line"])

    async def inspect_instructions(self, instructions: Instructions) -> InspectedInstructions:
        failures: list[TemplateFailure] = []
        names: list[AskedName] = []
        for name, source in _texts(instructions):
            if not _is_template(source):
                continue
            answer = await self._worker.ask({"task": "inspect", "source": source})
            found = [answer["failure"]] if "failure" in answer else answer["failures"]
            failures += [TemplateFailure(template=name, **failure) for failure in found]
            names += [
                AskedName(template=name, path=path, line=line, is_guarded=is_guarded)
                for path, line, is_guarded in answer.get("names", ())
            ]
        return InspectedInstructions(failures=tuple(failures), names=tuple(names))

    async def close(self) -> None:
        await self._worker.close()

    async def _render_instruction(
        self, name: str, source: str, arguments: Mapping[str, JsonValue]
    ) -> tuple[str, TemplateFailure | None]:
        if not _is_template(source):
            return source, None
        answer = await self._worker.ask({"task": "render", "source": source, "arguments": arguments})
        if "failure" in answer:
            return source, TemplateFailure(template=name, **answer["failure"])
        return answer["text"], None


def _texts(texts: Instructions) -> tuple[tuple[str, str], ...]:
    return ("roles", texts.roles), ("procedure", texts.procedure), ("constraints", texts.constraints)


def _is_template(source: str) -> bool:
    return any(tag in source for tag in _TAGS)


def _base_text(template: LayerTemplate, text: str) -> str:
    """Where history is added behind a template that says nothing about it, a blank line stands between the two."""
    if template.ends_in_history:
        return text
    stripped = text.rstrip()
    return f"{stripped}\n\n" if stripped else ""


def _render_or_refuse(template: LayerTemplate, values: Mapping[str, Any]) -> str:
    try:
        return template.compiled.render(values)
    except RENDER_ERRORS as error:
        line = line_of(error)
        raise TemplateInvalid(f"{template.name}: {describe(error)}", template=template.name, line=line) from error


def _compact(text: str) -> str:
    return to_json(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _failure(template: str, kind: str, error: Exception) -> TemplateFailure:
    line = error.lineno if isinstance(error, json.JSONDecodeError) else line_of(error)
    return TemplateFailure(template=template, kind=kind, message=describe(error), line=line)
