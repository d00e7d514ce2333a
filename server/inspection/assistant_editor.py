"""Checking, previewing and saving the instructions of an assistant.

Instructions with an error cannot be saved. A warning names a likely mistake, such as an unknown name, which would
silently render as an empty text.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions
from server.conversation.audit import Action, Actor, AuditDraft, AuditLog, Outcome
from server.conversation.block import JsonValue
from server.conversation.conversation import Conversation, ConversationState
from server.conversation.errors import StrataError
from server.conversation.store import Store
from server.inspection.differences import split_lines
from server.payload.arguments import NAMESPACES, build_static_arguments
from server.payload.renderer import InspectedInstructions, ReferencedName, Renderer, TemplateFailure
from server.providers.token_estimate import TokenEstimate

STATIC_MEMBERS: Final[Mapping[str, frozenset[str]]] = {
    "assistant": frozenset({"name", "id", "language", "description"}),
    "conversation": frozenset({"id", "identifier", "source", "direction", "created_date"}),
    "session": frozenset({"mode"}),
}
"""The members of the namespaces in the static layer, apart from `args`."""
_VOLATILE: Final = frozenset({"system", "message", "conversation.updated_date", "conversation.duration"})
"""Names that are reported as errors already."""
_SOURCE_CHARS: Final = 300
EXAMPLE_CONVERSATION: Final = "conv_example"
"""The conversation id in a preview without a conversation."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInstructions:
    """The result of checking instructions without rendering them."""

    problems: tuple[TemplateProblem, ...]
    names: tuple[ReferencedName, ...]
    args: tuple[str, ...]
    """Args that a conversation can set."""

    @property
    def is_valid(self) -> bool:
        """Whether they can be saved."""
        return not any(problem.severity is Severity.ERROR for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """The static layer at the start of a conversation, before any history."""

    text: str
    size_bytes: int
    token_count: int
    """An estimate."""
    sha256: str
    args: Mapping[str, JsonValue]
    """The args that it was rendered with."""
    problems: tuple[TemplateProblem, ...]
    """Templates that failed, so that their source was used."""
    missing: tuple[str, ...]
    """Names that had no value."""


class AssistantEditor:
    """Checks, renders and saves instructions."""

    def __init__(self, *, store: Store, renderer: Renderer, estimate: TokenEstimate, audit_log: AuditLog) -> None:
        self._store = store
        self._renderer = renderer
        self._estimate = estimate
        self._audit_log = audit_log

    async def check(self, tenant_id: str, definition: AssistantDefinition) -> CheckedInstructions:
        """List the problems of the instructions and the names that they use."""
        inspected = await self._renderer.inspect_instructions(tenant_id, definition.instructions)
        return CheckedInstructions(
            problems=list_problems(definition.instructions, inspected, definition.variables),
            names=inspected.names,
            args=find_args(inspected.names, definition.variables),
        )

    async def render(
        self,
        tenant_id: str,
        assistant: Assistant,
        *,
        args: Mapping[str, JsonValue] | None = None,
        conversation_id: str | None = None,
    ) -> RenderedPrompt:
        """Render the static text for a conversation with these args.

        With a conversation id, its args and other members are used, and `args` override them. Raises
        `ConversationNotFound`.
        """
        definition = assistant.definition
        conversation = (
            _example_of(assistant)
            if conversation_id is None
            else await self._store.load_conversation(tenant_id, conversation_id)
        )
        conversation = replace(conversation, args={**conversation.args, **(args or {})})
        arguments = build_static_arguments(assistant=assistant, conversation=conversation)
        rendered = await self._renderer.render_static(tenant_id, definition.provider, definition, arguments)
        inspected = await self._renderer.inspect_instructions(tenant_id, definition.instructions)
        data = rendered.text.encode("utf-8", "surrogatepass")
        return RenderedPrompt(
            text=rendered.text,
            size_bytes=len(data),
            token_count=self._estimate.estimate(definition.model, len(data)),
            sha256=hashlib.sha256(data).hexdigest(),
            args=conversation.args,
            problems=tuple(list_failures(definition.instructions, rendered.failures)),
            missing=find_missing(inspected.names, arguments),
        )

    async def save(
        self, tenant_id: str, actor: Actor, assistant_id: str, definition: AssistantDefinition, *, expected_version: int
    ) -> Assistant:
        """Save a checked definition as the next version, with an entry in the audit log.

        Raises `AssistantNotFound` and `AssistantRevised`, after the failure is logged.
        """

        def draft(outcome: Outcome, **details: object) -> AuditDraft:
            return AuditDraft(
                tenant_id=tenant_id,
                actor=actor,
                action=Action.SAVE_ASSISTANT,
                object_id=assistant_id,
                details={"expected_version": expected_version, **details},
                outcome=outcome,
            )

        try:
            saved = await self._store.revise_assistant(
                tenant_id, assistant_id, definition, expected_version=expected_version
            )
        except StrataError as error:
            await self._audit_log.append(draft(Outcome.FAILED, code=error.code))
            raise
        await self._audit_log.append(draft(Outcome.DONE, version=saved.version))
        return saved


def _example_of(assistant: Assistant) -> Conversation:
    """A new conversation for a preview."""
    now = datetime.now(UTC)
    return Conversation(
        id=EXAMPLE_CONVERSATION,
        assistant_id=assistant.id,
        assistant_version=assistant.version,
        revision=0,
        next_seq=1,
        buffer_start_seq=1,
        epoch=0,
        state=ConversationState.IDLE,
        pending_call_ids=(),
        pending_calls=(),
        identifier=None,
        source=None,
        direction=None,
        mode=None,
        args={},
        context={},
        metadata={},
        forked_from=None,
        created_at=now,
        updated_at=now,
    )
