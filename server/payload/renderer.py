"""The renderer port: templates and arguments to text.

Two kinds of templates meet here. The *layers' templates* are files of whoever runs the server: one static and one
dynamic per provider, and those that tell the history. The *instructions* of an assistant come over the network, from
people who may create assistants; they are templates too, and rendering one may cost no more time, memory or text than
the limits allow. So do the templates of a replay's candidate, which stand in the place of the layers' templates. What a
user of the assistant types is neither: it is only ever a value.

A template that cannot be parsed or rendered gives its own source as the text, and a `TemplateFailure`. A template that
came over the network is rendered in one of a few worker processes, which are shared fairly between tenants: hence the
tenant. Every method that takes one raises `TemplateWorkersBusy` if no worker becomes free in time: what is rendered may
be kept for long, so nothing is sent that has not been tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.conversation.assistant import AssistantDefinition, Instructions
from server.conversation.block import JsonValue
from server.payload.transcript import TranscriptTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFailure:
    """A template that fell back to its source. Stored with the call, shown to the operator."""

    template: str
    """`roles`, `procedure`, `constraints`, or the name of a file."""
    kind: str
    """`parse`, `render`, `too_long`, `too_large`, or `not_json` for a dynamic layer that rendered but is no JSON."""
    message: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedStatic:
    """The static layer up to where the history begins."""

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
    """What a model is asked in the background."""

    text: str
    template_source: str
    template_hash: bytes
    """SHA-256 of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencedName:
    """A name in a template that stands for something outside it."""

    template: str
    path: str
    """The name, or of a namespace its member too: `tone`, `assistant.name`, `args.city`."""
    line: int
    is_guarded: bool = False
    """The template itself asks whether it is there, or says what to take instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedInstructions:
    """What instructions tell without being rendered."""

    failures: tuple[TemplateFailure, ...]
    """All that keeps them from being saved, and not only the first."""
    names: tuple[ReferencedName, ...]
    """In the order of the text; none of a template that does not parse."""


class Renderer(Protocol):
    """Renders the layers of a payload."""

    async def render_static(
        self, tenant_id: str, provider: str, assistant: AssistantDefinition, arguments: Mapping[str, JsonValue]
    ) -> RenderedStatic:
        """The instructions, each rendered with the arguments, in the provider's static template.

        `arguments` as `prompt_arguments.build_static_arguments` gives them: nothing in them depends on the clock.
        """
        ...

    async def render_dynamic(
        self,
        tenant_id: str,
        provider: str,
        context: Mapping[str, JsonValue],
        arguments: Mapping[str, JsonValue],
    ) -> RenderedDynamic:
        """The conversation's context in the provider's dynamic template, as compact JSON.

        The template sees `file_references`, `artifacts`, `todos`, `current_datetime` and `context`, the whole of it.
        """
        ...

    async def render_segment(self, tenant_id: str, turns: Sequence[TranscriptTurn]) -> str:
        """A piece of history, whole lines. The same turns give the same text as long as the template is the same.

        There is no text to fall back to: raises `TemplateInvalid` where the template fails over them.
        """
        ...

    async def render_summary_request(
        self, tenant_id: str, first_seq: int, last_seq: int, limit_words: int
    ) -> RenderedPrompt:
        """What a model is asked in order to sum up these turns. Raises `TemplateInvalid`."""
        ...

    async def check_instructions(self, tenant_id: str, assistant: AssistantDefinition) -> None:
        """Raises `TemplateInvalid` for instructions that do not parse, or that depend on the clock or the message."""
        ...

    async def inspect_instructions(self, tenant_id: str, instructions: Instructions) -> InspectedInstructions:
        """What is wrong with the texts, and what they ask for. Nothing is rendered, and nothing raised for a text."""
        ...

    async def check_templates(self, tenant_id: str) -> None:
        """Raises `ValidationFailed` if one of the templates that stand in the place of the server's cannot be used."""
        ...

    async def close(self) -> None:
        """Ends what rendering has started."""
        ...
