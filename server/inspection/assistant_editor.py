"""Trying out and saving the instructions of an assistant: what a page or a program does before it makes a version."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from server.conversation.assistant import Assistant, AssistantDefinition
from server.conversation.audit import Action, Actor, AuditDraft, AuditLog, Outcome
from server.conversation.block import JsonValue
from server.conversation.conversation import Conversation, ConversationState
from server.conversation.errors import StrataError
from server.conversation.store import Store
from server.inspection.template_checks import (
    Severity,
    TemplateProblem,
    find_args,
    find_missing,
    tell_failures,
    tell_problems,
)
from server.payload.arguments import build_static_arguments
from server.payload.renderer import ReferencedName, Renderer
from server.providers.token_estimate import TokenEstimate

EXAMPLE_CONVERSATION: Final = "conv_example"
"""The id that templates see where no conversation is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInstructions:
    """What can be said of instructions without rendering them."""

    problems: tuple[TemplateProblem, ...]
    names: tuple[ReferencedName, ...]
    args: tuple[str, ...]
    """What a conversation can bring."""

    @property
    def is_valid(self) -> bool:
        """Whether nothing keeps them from being saved."""
        return not any(problem.severity is Severity.ERROR for problem in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """The static layer as a conversation would begin with it; history would follow."""

    text: str
    size_bytes: int
    token_count: int
    """About."""
    sha256: str
    args: Mapping[str, JsonValue]
    """Those that it was rendered with."""
    problems: tuple[TemplateProblem, ...]
    """Templates that fell back to their source."""
    missing: tuple[str, ...]
    """Names that stood for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditorTools:
    """What the editor is made of."""

    store: Store
    renderer: Renderer
    estimate: TokenEstimate
    audit_log: AuditLog


class AssistantEditor:
    """Checks, renders and saves."""

    __slots__ = ("_tools",)

    def __init__(self, tools: EditorTools) -> None:
        self._tools = tools

    async def check(self, tenant_id: str, definition: AssistantDefinition) -> CheckedInstructions:
        """All that is wrong with the instructions, and what they ask for."""
        inspected = await self._tools.renderer.inspect_instructions(tenant_id, definition.instructions)
        return CheckedInstructions(
            problems=tell_problems(definition.instructions, inspected, definition.variables),
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
        """The static text as a conversation with these args would get it.

        With a conversation its args, mode and the rest are taken, and `args` go over its own. Raises
        `ConversationNotFound`.
        """
        tools, definition = self._tools, assistant.definition
        conversation = (
            _example_of(assistant)
            if conversation_id is None
            else await tools.store.load_conversation(tenant_id, conversation_id)
        )
        conversation = replace(conversation, args={**conversation.args, **(args or {})})
        arguments = build_static_arguments(assistant=assistant, conversation=conversation)
        rendered = await tools.renderer.render_static(tenant_id, definition.provider, definition, arguments)
        inspected = await tools.renderer.inspect_instructions(tenant_id, definition.instructions)
        data = rendered.text.encode("utf-8", "surrogatepass")
        return RenderedPrompt(
            text=rendered.text,
            size_bytes=len(data),
            token_count=tools.estimate.estimate(definition.model, len(data)),
            sha256=hashlib.sha256(data).hexdigest(),
            args=conversation.args,
            problems=tuple(tell_failures(definition.instructions, rendered.failures)),
            missing=find_missing(inspected.names, arguments),
        )

    async def save(
        self, tenant_id: str, actor: Actor, assistant_id: str, definition: AssistantDefinition, *, expected_version: int
    ) -> Assistant:
        """The next version, with a row in the audit log. The definition has been checked.

        Raises `AssistantNotFound` and `AssistantRevised`, after the log has its row.
        """
        tools = self._tools

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
            saved = await tools.store.revise_assistant(
                tenant_id, assistant_id, definition, expected_version=expected_version
            )
        except StrataError as error:
            await tools.audit_log.append(draft(Outcome.FAILED, code=error.code))
            raise
        await tools.audit_log.append(draft(Outcome.DONE, version=saved.version))
        return saved


def _example_of(assistant: Assistant) -> Conversation:
    """A conversation that nobody has held, which begins now."""
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
