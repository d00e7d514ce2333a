"""Checking, previewing and saving the instructions of an assistant."""

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
    list_failures,
    list_problems,
)
from server.payload.arguments import build_static_arguments
from server.payload.renderer import ReferencedName, Renderer
from server.providers.token_estimate import TokenEstimate

EXAMPLE_CONVERSATION: Final = "conv_example"
"""The conversation id in a preview without a conversation."""


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
