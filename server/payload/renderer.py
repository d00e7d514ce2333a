"""The renderer port: templates and arguments to text.

There are two kinds of templates. The *layer templates* are files of the operator: one static and one dynamic template
per provider, and two for the history. The *instructions* of an assistant are sent over the network by clients that may
create assistants. Rendering them is limited in time, memory and size. The same limits apply to the templates of a
replay's candidate, which replace layer templates. The text of a user's message is never a template, only a value.

A template that cannot be parsed or rendered is replaced by its own source, and recorded as a `TemplateFailure`.
Templates from the network are rendered in worker processes that are shared fairly between tenants, which is why the
methods take a tenant. They raise `TemplateWorkersBusy` if no worker becomes free in time: a rendered text may be used
for a long time, so there is no fallback for a template that was not tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.conversation.assistant import AssistantDefinition, Instructions
from server.conversation.block import JsonValue
from server.payload.transcript import TranscriptTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFailure:
    """A template that was replaced by its source. Stored with the call and shown to operators."""

    template: str
    """`roles`, `procedure`, `constraints`, or the name of a file."""
    kind: str
    """`parse`, `render`, `too_long`, `too_large`, or `not_json` for a dynamic layer whose text is not JSON."""
    message: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedStatic:
    """The static layer before the compacted history."""

    text: str
    template_source: str
    template_hash: bytes
    """SHA-256 of the source."""
    failures: tuple[TemplateFailure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedDynamic:
    """The dynamic layer."""

    text: str
    failures: tuple[TemplateFailure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """The prompt of a background call."""

    text: str
    template_source: str
    template_hash: bytes
    """SHA-256 of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencedName:
    """A name in a template that refers to an argument."""

    template: str
    path: str
    """The name; for a namespace also its member: `tone`, `assistant.name`, `args.city`."""
    line: int
    is_guarded: bool = False
    """The template tests whether the value exists, or has a default for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedInstructions:
    """The result of a static analysis of instructions."""

    failures: tuple[TemplateFailure, ...]
    """Everything that prevents saving them, not only the first."""
    names: tuple[ReferencedName, ...]
    """In the order of the text; empty for a template that does not parse."""


class Renderer(Protocol):
    """Renders the layers of a payload."""

    async def render_static(
        self, tenant_id: str, provider: str, assistant: AssistantDefinition, arguments: Mapping[str, JsonValue]
    ) -> RenderedStatic:
        """Render the instructions with the arguments, in the provider's static template.

        `arguments` come from `build_static_arguments`: none of them depends on the clock.
        """
        ...

    async def render_dynamic(
        self,
        tenant_id: str,
        provider: str,
        context: Mapping[str, JsonValue],
        arguments: Mapping[str, JsonValue],
    ) -> RenderedDynamic:
        """Render the conversation's context in the provider's dynamic template, as compact JSON.

        The template can use `file_references`, `artifacts`, `todos`, `current_datetime`, and `context`, which contains
        all of it.
        """
        ...

    async def render_segment(self, tenant_id: str, turns: Sequence[TranscriptTurn]) -> str:
        """Render turns as history, in complete lines. The same turns give the same text as long as the template is the
        same.

        There is no fallback: raises `TemplateInvalid` if the template fails.
        """
        ...

    async def render_summary_request(
        self, tenant_id: str, first_seq: int, last_seq: int, limit_words: int
    ) -> RenderedPrompt:
        """Render the request for a summary of these turns. Raises `TemplateInvalid`."""
        ...

    async def check_instructions(self, tenant_id: str, assistant: AssistantDefinition) -> None:
        """Raise `TemplateInvalid` for instructions that do not parse, or that depend on the clock or the message."""
        ...

    async def inspect_instructions(self, tenant_id: str, instructions: Instructions) -> InspectedInstructions:
        """Return the errors and the referenced names of instructions, without rendering them or raising errors about
        them.
        """
        ...

    async def check_templates(self, tenant_id: str) -> None:
        """Raise `ValidationFailed` if a template that replaces one of the server's cannot be used."""
        ...

    async def close(self) -> None:
        """Release the resources of rendering."""
        ...
