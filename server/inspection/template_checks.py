"""Checks of an assistant's instructions before they are saved or rendered.

Instructions with an error cannot be saved. A warning names a likely mistake, such as an unknown name, which would
silently render as an empty text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.conversation.assistant import Instructions
from server.conversation.block import JsonValue
from server.inspection.text_difference import split_lines
from server.payload.arguments import NAMESPACES
from server.payload.renderer import InspectedInstructions, ReferencedName, TemplateFailure

STATIC_MEMBERS: Final[Mapping[str, frozenset[str]]] = {
    "assistant": frozenset({"name", "id", "language", "description"}),
    "conversation": frozenset({"id", "identifier", "source", "direction", "created_date"}),
    "session": frozenset({"mode"}),
}
"""The members of the namespaces in the static layer, apart from `args`."""
_VOLATILE: Final = frozenset({"system", "message", "conversation.updated_date", "conversation.duration"})
"""Names that are reported as errors already."""
_SOURCE_CHARS: Final = 300


class Severity(StrEnum):
    """How severe a problem is."""

    ERROR = "error"
    """The instructions cannot be saved, or the source is used instead of the rendered text."""
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProblem:
    """A problem in a template."""

    template: str
    """`roles`, `procedure`, `constraints`, or the name of a file."""
    severity: Severity
    kind: str
    """As in `TemplateFailure`, or `unknown_name`."""
    message: str
    line: int | None = None
    source: str = ""
    """The line, truncated if it is long."""


def list_problems(
    instructions: Instructions, inspected: InspectedInstructions, variables: Iterable[str]
) -> tuple[TemplateProblem, ...]:
    """List errors first, then warnings, each in the order of the text."""
    found = [*list_failures(instructions, inspected.failures), *_list_unknown(instructions, inspected, set(variables))]
    order = {name: index for index, (name, _) in enumerate(list_instructions(instructions))}
    return tuple(
        sorted(
            found,
            key=lambda problem: (
                problem.severity is not Severity.ERROR,
                order.get(problem.template, len(order)),
                problem.line or 0,
            ),
        )
    )


def list_failures(instructions: Instructions, failures: Iterable[TemplateFailure]) -> Iterator[TemplateProblem]:
    """Turn failures into problems with the line of the template."""
    for failure in failures:
        yield TemplateProblem(
            template=failure.template,
            severity=Severity.ERROR,
            kind=failure.kind,
            message=failure.message,
            line=failure.line,
            source=_line_of(instructions, failure.template, failure.line),
        )


def list_instructions(instructions: Instructions) -> tuple[tuple[str, str], ...]:
    """Return the texts by name, in the order in which they are sent."""
    return (
        ("roles", instructions.roles),
        ("procedure", instructions.procedure),
        ("constraints", instructions.constraints),
    )


def find_args(names: Sequence[ReferencedName], variables: Iterable[str]) -> tuple[str, ...]:
    """List the args that a conversation can set: names that neither a variable nor a namespace defines."""
    known = set(variables) | NAMESPACES
    wanted = [name.path.removeprefix("args.") for name in names if _is_arg(name, known)]
    return tuple(dict.fromkeys(wanted))


def find_missing(names: Sequence[ReferencedName], arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """List names without a value in these arguments, unless the text handles that they may be missing."""
    missing = (name.path for name in names if not name.is_guarded and not _is_there(name.path, arguments))
    return tuple(dict.fromkeys(missing))


def _list_unknown(
    instructions: Instructions, inspected: InspectedInstructions, variables: set[str]
) -> Iterator[TemplateProblem]:
    reported = set()
    for name in inspected.names:
        message = None if name.is_guarded else _find_doubt(name.path, variables)
        if message is None or (name.template, name.path) in reported:
            continue
        reported.add((name.template, name.path))
        yield TemplateProblem(
            template=name.template,
            severity=Severity.WARNING,
            kind="unknown_name",
            message=message,
            line=name.line,
            source=_line_of(instructions, name.template, name.line),
        )


def _find_doubt(path: str, variables: set[str]) -> str | None:
    """Return a warning for a name, or None if it is fine."""
    root, _, member = path.partition(".")
    if path in _VOLATILE or root in _VOLATILE or path == "args":
        return None
    if root in STATIC_MEMBERS:
        is_known = not member or member in STATIC_MEMBERS[root]
        return None if is_known else f"`{path}` does not exist. It renders as empty text."
    if root == "args":
        return f"`{path}` is empty unless the conversation sets this arg. Variables are not in `args`."
    return (
        None
        if root in variables
        else f"There is no variable `{root}`. It is empty unless the conversation sets this arg."
    )


def _is_arg(name: ReferencedName, known: set[str]) -> bool:
    root, _, member = name.path.partition(".")
    return bool(member) if root == "args" else root not in known


def _is_there(path: str, arguments: Mapping[str, JsonValue]) -> bool:
    root, _, member = path.partition(".")
    if root not in arguments:
        return False
    owner = arguments[root]
    return not member or not isinstance(owner, Mapping) or member in owner


def _line_of(instructions: Instructions, template: str, line: int | None) -> str:
    lines = split_lines(dict(list_instructions(instructions)).get(template, ""))
    return lines[line - 1][:_SOURCE_CHARS] if line is not None and 0 < line <= len(lines) else ""
