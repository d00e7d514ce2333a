"""Layers as they were recorded, where the candidate does not change them; rendered anew where it does.

What is rendered anew speaks of the recorded conversation, its name, its age and its time, and not of the replay
conversation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, TypeAlias

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions
from server.conversation.block import JsonValue
from server.conversation.conversation import Conversation
from server.payload.arguments import build_arguments, build_static_arguments
from server.payload.renderer import InspectedInstructions, RenderedDynamic, RenderedPrompt, RenderedStatic, Renderer
from server.payload.transcript import TranscriptTurn
from server.replay.rerun.candidate import keeps_dynamic, keeps_static
from server.replay.rerun.replay import Candidate
from server.replay.rerun.source import RecordedStep

RendererOf: TypeAlias = Callable[[Mapping[str, str]], Renderer]
"""A renderer with templates in place of the server's own, by the names of their files. Raises `ValidationFailed` for a
name that no file has; `Renderer.check_templates` checks their sources."""

ARGUMENTS_MARK: Final = "strata_replay_arguments"
"""An arg of replay conversations that no template sees. It begins an epoch where the recorded conversation's args had
changed."""


class ReplayRenderer:
    """Implements `server.payload.renderer.Renderer` for one replay conversation, moment by moment."""

    def __init__(self, renderer: Renderer, candidate: Candidate, conversation: Conversation) -> None:
        """`renderer` has the candidate's templates. `conversation`: the recorded one, with the args that it has now:
        they stand for former ones that were not kept.
        """
        self._renderer = renderer
        self._candidate = candidate
        self._recorded = self._conversation = conversation
        self._definition: AssistantDefinition | None = None
        self._static: RenderedStatic | None = None
        self._dynamic: str | None = None
        self._now = datetime.now(UTC)

    def move_to(self, recorded_step: RecordedStep, definition: AssistantDefinition, *, is_task: bool) -> None:
        """From now on it is this moment. `definition`: of the candidate that is asked in it."""
        self._definition = definition
        present = self._recorded.args
        self._conversation = replace(self._recorded, args=present if recorded_step.args is None else recorded_step.args)
        call = recorded_step.call
        self._now = datetime.now(UTC) if call is None else call.start.started_at
        self._static = (
            recorded_step.static if keeps_static(self._candidate, recorded_step.definition.provider) else None
        )
        if call is None or not keeps_dynamic(self._candidate, definition.provider):
            self._dynamic = None
            return
        sent = call.start.dynamic.decode("utf-8", "surrogatepass")
        # Within an exchange the append-only order sends it again only where it has changed.
        self._dynamic = sent if is_task or sent or self._dynamic is None else self._dynamic

    async def render_static(
        self,
        tenant_id: str,
        provider: str,
        assistant: AssistantDefinition,
        arguments: Mapping[str, JsonValue],  # noqa: ARG002  reason: the port's; those of the replay conversation
    ) -> RenderedStatic:
        if self._static is not None:
            return self._static
        own = build_static_arguments(assistant=self._assistant(assistant), conversation=self._conversation)
        return await self._renderer.render_static(tenant_id, provider, assistant, own)

    async def render_dynamic(
        self,
        tenant_id: str,
        provider: str,
        context: Mapping[str, JsonValue],
        arguments: Mapping[str, JsonValue],
    ) -> RenderedDynamic:
        if self._dynamic is not None:
            return RenderedDynamic(text=self._dynamic, failures=())
        if self._definition is None:
            return await self._renderer.render_dynamic(tenant_id, provider, context, arguments)
        own = build_arguments(
            assistant=self._assistant(self._definition),
            conversation=self._conversation,
            now=self._now,
            message_text=arguments["message"]["text"],
            message_language=arguments["message"]["language"],
            turn_args={name: value for name, value in arguments["args"].items() if name != ARGUMENTS_MARK},
        )
        return await self._renderer.render_dynamic(tenant_id, provider, context, own)

    async def render_segment(self, tenant_id: str, turns: Sequence[TranscriptTurn]) -> str:
        return await self._renderer.render_segment(tenant_id, turns)

    async def render_summary_request(
        self, tenant_id: str, first_seq: int, last_seq: int, limit_words: int
    ) -> RenderedPrompt:
        return await self._renderer.render_summary_request(tenant_id, first_seq, last_seq, limit_words)

    async def check_instructions(self, tenant_id: str, assistant: AssistantDefinition) -> None:
        await self._renderer.check_instructions(tenant_id, assistant)

    async def inspect_instructions(self, tenant_id: str, instructions: Instructions) -> InspectedInstructions:
        return await self._renderer.inspect_instructions(tenant_id, instructions)

    async def check_templates(self, tenant_id: str) -> None:
        await self._renderer.check_templates(tenant_id)

    async def close(self) -> None:
        """Nothing was opened here."""

    def _assistant(self, definition: AssistantDefinition) -> Assistant:
        recorded = self._conversation
        return Assistant(
            id=recorded.assistant_id,
            version=recorded.assistant_version,
            created_at=recorded.created_at,
            definition=definition,
        )
