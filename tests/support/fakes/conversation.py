"""A conversation in memory: the sources for the payload builder, and the stored answers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from server.conversation.assistant import Assistant, AssistantDefinition, Tool
from server.conversation.block import Block, JsonValue, TextBlock, ToolCallBlock, ToolResultBlock, encode_blocks
from server.conversation.call import Call, CallStart
from server.conversation.conversation import Conversation, ConversationState
from server.conversation.epoch import Epoch, EpochReason
from server.conversation.errors import ProviderFailed
from server.conversation.manifest import encode_manifest
from server.conversation.payload import LayerOrder, PayloadMessage
from server.conversation.store import BufferedTurn, PayloadSource, RebuildSource
from server.conversation.turn import STRATA_DIALECT, Native, StopReason, TurnKind, TurnState
from server.payload.builder import BuiltPayload, build_payload, hash_prefix
from server.payload.dynamic_clock import EXACT, DynamicClock
from server.providers.provider import Provider, ProviderStream, StreamState
from tests.contracts.provider_harness import TOOLS
from tests.support.builders import build_conversation

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """The provider and model that are called, with the definition of the assistant."""

    provider: Provider
    model: str
    static_text: str = "You help."
    tools: tuple[Tool, ...] = TOOLS
    order: LayerOrder | None = None

    @property
    def prefix_hash(self) -> bytes:
        return hash_prefix(self.static_text, self.tools)

    @property
    def definition(self) -> AssistantDefinition:
        settings: dict[str, JsonValue] = {"max_output_tokens": 4_000}
        if self.order is not None:
            settings["layer_order"] = str(self.order)
        return AssistantDefinition(
            name="helper", provider=self.provider.name, model=self.model, tools=self.tools, settings=settings
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request that was sent."""

    target: ModelTarget
    built: BuiltPayload
    stream: ProviderStream
    failure: ProviderFailed | None
    rebuild: RebuildSource

    @property
    def request_body(self) -> bytes:
        return self.stream.record.request_body

    @property
    def messages(self) -> list[bytes]:
        return data_of(self.built.payload.messages)


@dataclass(slots=True)
class InMemoryConversation:
    """Turns as they would be stored. Inputs have odd numbers, answers the even ones after them."""

    turns: list[BufferedTurn] = field(default_factory=list)
    stop_reasons: dict[int, StopReason | None] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    @property
    def pending(self) -> tuple[ToolCallBlock, ...]:
        """The pending calls."""
        last = self.turns[-1] if self.turns else None
        if last is None or last.kind is not TurnKind.MODEL_RESPONSE or last.state is not TurnState.COMPLETE:
            return ()
        return tuple(block for block in last.blocks or () if isinstance(block, ToolCallBlock))

    def say(self, *texts: str) -> None:
        """Append a user task. Pending calls are abandoned."""
        self.put(TurnKind.USER_TASK, tuple(TextBlock(text=text) for text in texts))

    def give_results(self, output: JsonValue = None) -> None:
        """Append results for all pending calls, the last first."""
        results = [ToolResultBlock(tool_call_id=call.id, output=output or {"celsius": 4}) for call in self.pending]
        self.put(TurnKind.TOOL_RESPONSE, tuple(reversed(results)))

    def put(self, kind: TurnKind, blocks: tuple[Block, ...], **fields: Any) -> BufferedTurn:
        """Append any turn, as an import might contain it."""
        values: dict[str, Any] = {
            "seq": len(self.turns) + 1,
            "kind": kind,
            "state": TurnState.COMPLETE,
            "native": Native(dialect=STRATA_DIALECT, data=encode_blocks(blocks)),
            "blocks": blocks,
            "provider": None,
            "model": None,
            "account": None,
            "prefix_hash": None,
            "dynamic": None,
            "language": None,
            "args": None,
        }
        turn = BufferedTurn(**values | fields)
        self.turns.append(turn)
        return turn

    def source(self, target: ModelTarget) -> PayloadSource:
        previous = self.sent[-1] if self.sent else None
        return PayloadSource(
            conversation=_conversation(),
            assistant=Assistant(id="asst_1", version=1, created_at=NOW, definition=target.definition),
            epoch=_epoch(target),
            static_text=target.static_text,
            buffered=tuple(self._as_loaded(turn, target) for turn in self.turns),
            blobs={},
            previous_manifest=() if previous is None else previous.built.manifest,
            previous_order=None if previous is None else previous.built.order,
            previous_prefix_hash=None if previous is None else previous.target.prefix_hash,
        )

    def build(
        self,
        target: ModelTarget,
        dynamic: str | None = None,
        *,
        clock: DynamicClock = EXACT,
        source: PayloadSource | None = None,
    ) -> BuiltPayload:
        return build_payload(
            source or self.source(target),
            provider=target.provider,
            static_text=target.static_text,
            epoch=_epoch(target),
            dynamic=dynamic,
            clock=clock,
            blobs={},
        )

    async def ask(self, target: ModelTarget, dynamic: str | None = None, *, stop_after: int | None = None) -> Sent:
        """Send the request for the newest turn and store its answer; cancel after `stop_after` events."""
        source, built = self.source(target), self.build(target, dynamic)
        stream = target.provider.open_stream(built.payload)
        failure: ProviderFailed | None = None
        received = 0
        try:
            async for _ in stream.events():
                received += 1
                if received == stop_after:
                    await stream.cancel()
        except ProviderFailed as error:
            failure = error
        start = CallStart(
            attempt=1,
            provider=target.provider.name,
            model=target.model,
            account=target.provider.account,
            epoch=1,
            started_at=NOW,
            manifest=encode_manifest(built.manifest),
            request_hash=hashlib.sha256(stream.record.request_body).digest(),
            layer_order=built.order,
            dynamic=(built.dynamic_sent or "").encode("utf-8", "surrogatepass"),
        )
        call = Call(turn_seq=len(self.turns) + 1, start=start, end=None)
        rebuild = RebuildSource(call=call, source=source)
        sent = Sent(target=target, built=built, stream=stream, failure=failure, rebuild=rebuild)
        self._keep(sent)
        self.sent.append(sent)
        return sent

    def _keep(self, sent: Sent) -> None:
        answer, target = sent.stream.answer, sent.target
        states = {StreamState.COMPLETE: TurnState.COMPLETE, StreamState.CANCELLED: TurnState.CANCELLED}
        inside = sent.built.dynamic_sent if sent.built.order is LayerOrder.APPEND_ONLY else None
        turn = self.put(
            TurnKind.MODEL_RESPONSE,
            answer.blocks,
            state=states.get(sent.stream.state, TurnState.FAILED),
            native=answer.native or Native(dialect=target.provider.name, data=b""),
            provider=target.provider.name,
            model=target.model,
            account=target.provider.account,
            prefix_hash=target.prefix_hash,
            dynamic=inside.encode() if inside else None,
        )
        self.stop_reasons[turn.seq] = answer.stop_reason

    def _as_loaded(self, turn: BufferedTurn, target: ModelTarget) -> BufferedTurn:
        """The turn without the blocks that the store does not load."""
        is_plain = (
            turn.kind is TurnKind.MODEL_RESPONSE
            and turn.state is TurnState.COMPLETE
            and self.stop_reasons.get(turn.seq) is not StopReason.TOOL_USE
            and turn.provider == target.provider.name
        )
        return replace(turn, blocks=None) if is_plain else turn


def data_of(messages: Sequence[PayloadMessage]) -> list[bytes]:
    return [message.data for message in messages]


def _epoch(target: ModelTarget) -> Epoch:
    return Epoch(
        number=1,
        reason=EpochReason.STARTED,
        assistant_version=1,
        generation=0,
        segment_count=0,
        base_text=target.static_text,
        static_hash=hashlib.sha256(target.static_text.encode()).digest(),
        prefix_hash=target.prefix_hash,
        arguments_hash=b"",
        template_hash=b"",
        buffer_start_seq=1,
    )


def _conversation() -> Conversation:
    return build_conversation(next_seq=2, state=ConversationState.RUNNING, created_at=NOW, updated_at=NOW)
