"""Payloads of replay conversations: recorded layers and cache markers, unless the candidate changes them.

A layer that is rendered again describes the recorded conversation (its id, its age and the time of the recorded call),
not the replay conversation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, TypeAlias

from server.caching.policy import apply_caching
from server.conversation.assistant import Assistant, AssistantDefinition, Instructions
from server.conversation.block import JsonValue
from server.conversation.call import Call
from server.conversation.conversation import Conversation
from server.conversation.manifest import CONTINUATION, encode_manifest
from server.conversation.payload import LayerOrder
from server.conversation.store import PayloadSource
from server.payload.arguments import build_arguments, build_static_arguments, hash_arguments
from server.payload.dynamic_clock import DynamicClock, decode_clock, insert_time
from server.payload.preparation import PayloadPreparation, PreparedPayload
from server.payload.renderer import InspectedInstructions, RenderedDynamic, RenderedPrompt, RenderedStatic, Renderer
from server.payload.transcript import TranscriptTurn
from server.providers.provider import Provider
from server.replay.rerun.candidate import keeps_dynamic, keeps_static
from server.replay.rerun.replay import Candidate
from server.replay.rerun.source import RecordedStep

RendererOf: TypeAlias = Callable[[Mapping[str, str]], Renderer]
"""Returns a renderer that uses these template sources, by file name, instead of the server's own.

Raises `ValidationFailed` for an unknown file name. `Renderer.check_templates` checks the sources."""

_ARGUMENTS_MARK: Final = "strata_replay_arguments"
"""An arg of replay conversations that no template sees. It begins an epoch when the recorded args have changed."""


def mark_arguments(args: Mapping[str, JsonValue], recorded_hash: bytes | None) -> dict[str, JsonValue]:
    """Return the args of a replay conversation: the current args of its source, marked if they have changed since the
    recording.
    """
    if recorded_hash is None or recorded_hash == hash_arguments(args):
        return dict(args)
    return {**args, _ARGUMENTS_MARK: recorded_hash.hex()}


class ReplayRenderer:
    """Implements `server.payload.renderer.Renderer` for one replay conversation, step by step."""

    def __init__(self, renderer: Renderer, candidate: Candidate, conversation: Conversation) -> None:
        """`renderer` has the candidate's templates. `conversation` is the recorded one; its current args are used for
        steps whose args were not stored.
        """
        self._renderer = renderer
        self._candidate = candidate
        self._recorded = self._conversation = conversation
        self._definition: AssistantDefinition | None = None
        self._static: RenderedStatic | None = None
        self._dynamic: str | None = None
        self._now = datetime.now(UTC)

    def move_to(self, recorded_step: RecordedStep, definition: AssistantDefinition, *, is_task: bool) -> None:
        """Render this step from now on. `definition`: of the candidate."""
        self._definition = definition
        current = self._recorded.args
        self._conversation = replace(self._recorded, args=current if recorded_step.args is None else recorded_step.args)
        call = recorded_step.call
        self._now = datetime.now(UTC) if call is None else call.start.started_at
        self._static = (
            recorded_step.static if keeps_static(self._candidate, recorded_step.definition.provider) else None
        )
        if call is None or not keeps_dynamic(self._candidate, definition.provider):
            self._dynamic = None
            return
        sent = call.start.dynamic.decode("utf-8", "surrogatepass")
        # Within an exchange, the append-only order sends the dynamic layer again only if it has changed.
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
            turn_args={name: value for name, value in arguments["args"].items() if name != _ARGUMENTS_MARK},
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
        """Do nothing: this class opens no resource."""

    def _assistant(self, definition: AssistantDefinition) -> Assistant:
        recorded = self._conversation
        return Assistant(
            id=recorded.assistant_id,
            version=recorded.assistant_version,
            created_at=recorded.created_at,
            definition=definition,
        )


class ReplayPreparation(PayloadPreparation):
    """Prepares the payloads of one replay conversation."""

    recorded: Call | None = None
    """The recorded call that the next payload repeats."""

    async def prepare(self, tenant_id: str, source: PayloadSource) -> PreparedPayload:
        """Prepare the payload. If it has the blocks of the recorded request, it also has its cache markers."""
        prepared = await super().prepare(tenant_id, source)
        start = None if self.recorded is None else self.recorded.start
        if (
            start is None
            or not is_same_request(prepared, self.recorded)
            or start.model != prepared.model
            or "cached_content" in start.caching
        ):
            return prepared
        payload = apply_caching(prepared.built.payload, start.caching)
        return replace(prepared, built=replace(prepared.built, payload=payload))

    async def _render_dynamic(
        self, tenant_id: str, source: PayloadSource, provider: Provider, order: LayerOrder
    ) -> tuple[RenderedDynamic, DynamicClock]:
        """Return the dynamic layer with the recorded time of a user task. A task that was recorded without a time has
        none.
        """
        rendered, clock = await super()._render_dynamic(tenant_id, source, provider, order)
        if self.recorded is None:
            return rendered, clock
        input_time = decode_clock(self.recorded.start.caching).input_time
        if order is LayerOrder.LAYERED:
            return rendered, replace(clock, input_time=input_time)
        return rendered if input_time is None else replace(rendered, text=insert_time(rendered.text, input_time)), clock


def is_same_request(prepared: PreparedPayload, recorded: Call | None) -> bool:
    """Return whether a payload has the blocks of a recorded request to the same provider."""
    return (
        recorded is not None
        and recorded.start.provider == prepared.provider.name
        and _have_same_blocks(encode_manifest(prepared.built.manifest), recorded.start.manifest)
    )


def _have_same_blocks(one: Sequence[Mapping[str, JsonValue]], other: Sequence[Mapping[str, JsonValue]]) -> bool:
    """Return whether two manifests list the same blocks.

    Cache markers are ignored, and so is a paused answer that one of the requests continues: it is part of the answer.
    """
    one, other = ([entry for entry in each if entry["kind"] != CONTINUATION] for each in (one, other))
    if not one or len(one) != len(other):
        return False
    return all(
        (first["kind"], first["role"], first["hash"]) == (second["kind"], second["role"], second["hash"])
        for first, second in zip(one, other, strict=True)
    )
