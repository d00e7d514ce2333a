"""The form of the editor of an assistant: from its fields to a definition, or to a list of problems.

A field that was not edited keeps its exact text, also if a page cannot show all of it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions
from server.conversation.errors import BodyMalformed, ValidationFailed
from server.inspection.assistant_editor import Severity, TemplateProblem, list_instructions
from server.inspection.assistants import write_json
from server.payload.renderer import Renderer
from server.web.admin.rendering import show_text
from server.web.api.assistants import AssistantBody, ProviderNames, check_definition, definition_members
from server.web.body import MAX_DEPTH, MAX_INTEGER, is_deeper
from server.web.json_text import DuplicateKey, decode_json
from server.web.validation import trace_path

INSTRUCTIONS: Final = ("roles", "procedure", "constraints")
_SOURCE_CHARS: Final = 300
_WINDOWS_LINE: Final = "\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A form as it was sent."""

    base_version: int
    fields: Mapping[str, str]
    """The texts in the form, by field: `roles`, `procedure`, `constraints`, `variables`, `args`."""
    definition: AssistantDefinition
    """The definition of the base version, with the changes that are valid."""
    args: Mapping[str, Any]
    problems: tuple[TemplateProblem, ...]
    """Fields that are not valid. A problem in `args` does not prevent saving."""


def open_draft(base: Assistant, text: Assistant, args: str) -> Draft:
    """Return the form before it is edited. `text` is the version whose texts it shows."""
    definition = replace(
        base.definition, instructions=text.definition.instructions, variables=text.definition.variables
    )
    given, _ = read_object("args", args)
    return Draft(
        base_version=base.version,
        fields={**_shown_fields(text), "args": args},
        definition=definition,
        args=given,
        problems=(),
    )


def read_draft(base: Assistant, form: Mapping[str, str]) -> Draft:
    """Read a form that was sent. `base` is the version that it edits."""
    stored = {
        **dict(list_instructions(base.definition.instructions)),
        "variables": write_json(base.definition.variables),
    }
    sent = {name: form.get(name, "").replace(_WINDOWS_LINE, "\n") for name in (*stored, "args")}
    texts: dict[str, str] = {}
    problems: list[TemplateProblem] = []
    for name, before in stored.items():
        texts[name], problem = _read_text(name, before, sent[name])
        problems += [problem] if problem is not None else []
    variables: Mapping[str, Any] = base.definition.variables
    if texts["variables"] != stored["variables"]:
        variables, problem = read_object("variables", texts["variables"])
        problems += [problem] if problem is not None else []
    args, problem = read_object("args", sent["args"])
    problems += [problem] if problem is not None else []
    instructions = Instructions(**{name: texts[name] for name in INSTRUCTIONS})
    return Draft(
        base_version=base.version,
        fields={name: show_text(text) for name, text in sent.items()},
        definition=replace(base.definition, instructions=instructions, variables=variables),
        args=args,
        problems=tuple(problems),
    )


def rebase(form: Mapping[str, str], base: Assistant, newest: Assistant) -> dict[str, str]:
    """Move a form to a newer version: fields that were not edited get the texts of the newer version."""
    before, after = _shown_fields(base), _shown_fields(newest)
    unedited = {name for name in before if form.get(name, "").replace(_WINDOWS_LINE, "\n") == before[name]}
    return {**form, **{name: after[name] for name in unedited}}


def read_version(form: Mapping[str, str]) -> int:
    """Return the base version of a form. Raises `BodyMalformed`."""
    text = form.get("base_version", "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= MAX_INTEGER):
        raise BodyMalformed("The form does not name the version that it edits.", hint="Reload the page.")
    return int(text)


async def find_refusals(
    tenant_id: str, definition: AssistantDefinition, providers: ProviderNames, renderer: Renderer
) -> tuple[TemplateProblem, ...]:
    """Return why the API would refuse the definition, apart from its templates, which `AssistantEditor.check` checks.

    Raises `TemplateInvalid` if a template is invalid.
    """
    members = dict(definition_members(definition))
    try:
        await check_definition(tenant_id, AssistantBody.model_validate(members), providers, renderer)
    except ValidationError as error:
        return tuple(
            _problem(trace_path(fault["loc"], members), str(fault["msg"]).removeprefix("Value error, "))
            for fault in error.errors(include_url=False, include_input=False, include_context=False)
        )
    except ValidationFailed as error:
        faults = error.details.get("errors")
        found = [(fault["path"], fault["message"]) for fault in faults] if isinstance(faults, list) else []
        return tuple(_problem(path, message) for path, message in found or [("", error.message)])
    return ()


def example_args(names: Iterable[str]) -> str:
    """Return a JSON object with a placeholder for each name."""
    return write_json({name: name for name in names})


def read_object(field: str, text: str) -> tuple[dict[str, Any], TemplateProblem | None]:
    """Read a JSON object from a field. An empty field is an empty object."""
    if not text.strip():
        return {}, None
    try:
        value = decode_json(text.encode("utf-8", "surrogatepass"))
    except json.JSONDecodeError as error:
        lines = text.split("\n")
        source = lines[error.lineno - 1][:_SOURCE_CHARS] if error.lineno <= len(lines) else ""
        return {}, _problem(field, f"This is not valid JSON: {error.msg}.", line=error.lineno, source=source)
    except DuplicateKey as error:
        return {}, _problem(field, f"This JSON is ambiguous: {error}.")
    except (ValueError, RecursionError) as error:
        return {}, _problem(field, f"This is not valid JSON: {error}.")
    if not isinstance(value, dict):
        return {}, _problem(field, "Expected a JSON object, from { to }.", line=1)
    if is_deeper(value, MAX_DEPTH):
        return {}, _problem(field, f"The value is nested more than {MAX_DEPTH} levels deep.")
    return value, None


def show_field(text: str) -> str:
    """Return a text as a field of the form shows it."""
    return show_text(text.replace(_WINDOWS_LINE, "\n"))


def _shown_fields(assistant: Assistant) -> dict[str, str]:
    definition = assistant.definition
    texts = {**dict(list_instructions(definition.instructions)), "variables": write_json(definition.variables)}
    return {name: show_field(text) for name, text in texts.items()}


def _read_text(name: str, before: str, sent: str) -> tuple[str, TemplateProblem | None]:
    """Return the text of a field, or the earlier text and a problem if the field is not valid."""
    shown = show_field(before)
    if sent == shown:
        return before, None
    if shown != before.replace(_WINDOWS_LINE, "\n"):
        message = "The text has characters that a page cannot show. Change it with the API."
        return before, _problem(name, message)
    for number, line in enumerate(sent.split("\n"), start=1):
        if show_text(line) != line:
            message = "This line has an invisible character. Write it as an escape, such as {{ '\\u200b' }}."
            return before, _problem(name, message, line=number, source=line[:_SOURCE_CHARS])
    return (sent.replace("\n", _WINDOWS_LINE) if _WINDOWS_LINE in before else sent), None


def _problem(field: str, message: str, *, line: int | None = None, source: str = "") -> TemplateProblem:
    return TemplateProblem(
        template=field.removeprefix("instructions."),
        severity=Severity.ERROR,
        kind="invalid",
        message=message,
        line=line,
        source=source,
    )
