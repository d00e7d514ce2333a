"""What is wrong with the instructions of an assistant, told before anybody saves or renders them.

An error keeps them from being saved. A warning names what is likely a mistake: a name that stands for nothing is an
empty text, and nobody would notice.
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
"""What the namespaces of the static layer have, beside `args`."""
_VOLATILE: Final = frozenset({"system", "message", "conversation.updated_date", "conversation.duration"})
"""Named by an error already."""
_SOURCE_CHARS: Final = 300


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """It cannot be saved, or falls back to its source when it is rendered."""
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProblem:
    """Something that an author should look at."""

    template: str
    """`roles`, `procedure`, `constraints`, or the name of a file."""
    severity: Severity
    kind: str
    """As in `TemplateFailure`, or `unknown_name`."""
    message: str
    line: int | None = None
    source: str = ""
    """That line, or the beginning of it."""


def tell_problems(
    instructions: Instructions, inspected: InspectedInstructions, variables: Iterable[str]
) -> tuple[TemplateProblem, ...]:
    """Errors first, each kind in the order of the text."""
    found = [*tell_failures(instructions, inspected.failures), *_tell_unknown(instructions, inspected, set(variables))]
    order = {name: place for place, (name, _) in enumerate(list_instructions(instructions))}
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


def tell_failures(instructions: Instructions, failures: Iterable[TemplateFailure]) -> Iterator[TemplateProblem]:
    """Failures with the line that they are in."""
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
    """The texts by name, in the order in which they are sent."""
    return (
        ("roles", instructions.roles),
        ("procedure", instructions.procedure),
        ("constraints", instructions.constraints),
    )


def find_args(names: Sequence[ReferencedName], variables: Iterable[str]) -> tuple[str, ...]:
    """The args that a conversation can bring: what is asked for and nobody else provides."""
    known = set(variables) | NAMESPACES
    wanted = [name.path.removeprefix("args.") for name in names if _is_arg(name, known)]
    return tuple(dict.fromkeys(wanted))


def find_missing(names: Sequence[ReferencedName], arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """Names that stand for nothing among these arguments, and that the text does not expect to be missing."""
    missing = (name.path for name in names if not name.is_guarded and not _is_there(name.path, arguments))
    return tuple(dict.fromkeys(missing))


def _tell_unknown(
    instructions: Instructions, inspected: InspectedInstructions, variables: set[str]
) -> Iterator[TemplateProblem]:
    told = set()
    for name in inspected.names:
        message = None if name.is_guarded else _doubt(name.path, variables)
        if message is None or (name.template, name.path) in told:
            continue
        told.add((name.template, name.path))
        yield TemplateProblem(
            template=name.template,
            severity=Severity.WARNING,
            kind="unknown_name",
            message=message,
            line=name.line,
            source=_line_of(instructions, name.template, name.line),
        )


def _doubt(path: str, variables: set[str]) -> str | None:
    """What may be wrong with a name; None where nothing is."""
    root, _, member = path.partition(".")
    if path in _VOLATILE or root in _VOLATILE or path == "args":
        return None
    if root in STATIC_MEMBERS:
        is_known = not member or member in STATIC_MEMBERS[root]
        return None if is_known else f"There is no `{path}`: it is empty."
    if root == "args":
        return f"`{path}` is empty unless the conversation brings it as an arg; variables are not in `args`."
    return None if root in variables else f"No variable is called `{root}`: it is empty unless an arg brings it."


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
