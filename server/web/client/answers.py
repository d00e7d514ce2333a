"""Values that the server answers with, and their decoders.

Members with values that a later server may add to (states, kinds, stop reasons) are plain strings: `turn.state ==
TurnState.COMPLETE` holds, and an unknown value is not an error. Unknown members are ignored. A decoder raises
`KeyError`, `TypeError` or `ValueError` if a required member is missing or malformed; `connection.decoding` turns these
into `AnswerMalformed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions, Tool
from server.conversation.block import Block, JsonValue, TextBlock, ToolCallBlock, block_from_json
from server.conversation.conversation import Origin
from server.conversation.usage import Usage

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnError:
    """Why a turn failed or was interrupted."""

    code: str
    message: str
    hint: str = ""
    source: str = "strata"
    """`provider` or `strata`: where the error occurred."""
    provider_message: str | None = None
    """The provider's own message."""
    provider_status: str | int | None = None
    retry_after_seconds: float | None = None
    """The wait that the provider requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of any kind. Members that only a model's turn has are None in the others."""

    seq: int
    kind: str
    state: str
    """As `server.conversation.turn.TurnState`, or `running`."""
    blocks: tuple[Block, ...] = ()
    created_at: datetime | None = None
    stop_reason: str | None = None
    stop_details: Mapping[str, JsonValue] = field(default_factory=dict)
    """The provider's own details of the stop, beyond its reason."""
    error: TurnError | None = None
    usage: Usage | None = None
    cost_usd: Decimal | None = None
    """None if a price is not known."""
    provider: str | None = None
    model: str | None = None

    @property
    def text(self) -> str:
        """The text, without thinking and tool calls."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def tool_calls(self) -> tuple[ToolCallBlock, ...]:
        """The tool calls, in the model's order."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStatus:
    """The part of a conversation that a client needs to continue it."""

    id: str
    revision: int
    state: str
    pending_tool_calls: tuple[ToolCallBlock, ...] = ()
    """Calls that wait for results; a new task has to abandon them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation without its turns."""

    id: str
    revision: int
    state: str
    pending_tool_calls: tuple[ToolCallBlock, ...]
    assistant_id: str
    assistant_version: int
    identifier: str | None = None
    source: str | None = None
    direction: str | None = None
    mode: str | None = None
    args: Mapping[str, JsonValue] = field(default_factory=dict)
    context: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    forked_from: Origin | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """A turn that the server has accepted, ended or not."""

    turn: Turn
    conversation: ConversationStatus
    replayed: bool
    """The server had received the same request before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """The last event of a turn: the answer is stored, complete or not, as its state says."""

    turn: Turn
    conversation: ConversationStatus
    """As it was when the turn ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """The rows that were erased, or would be."""

    dry_run: bool
    rows: Mapping[str, int]
    """Number of rows by table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """What a compaction did, or would do. Token counts are estimates."""

    conversation_id: str
    outcome: str
    """As `server.compaction.report.CompactionOutcome`."""
    reason: str
    dry_run: bool
    epoch: int
    first_seq: int | None = None
    last_seq: int | None = None
    """Of the turns that were moved; None if none was."""
    moved_tokens: int = 0
    segment_tokens: int = 0
    request_tokens: int | None = None
    saved_tokens_per_call: float = 0.0
    saved_usd_per_call: Decimal | None = None
    blocked: bool = False
    """The conversation has to be compacted and cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A change of the compacted history, which began an epoch."""

    epoch: int
    reason: str
    generation: int
    segment_count: int
    buffer_start_seq: int
    """The first turn that is sent as a message."""
    first_seq: int | None = None
    last_seq: int | None = None
    """Of the newest segment."""
    segment_tokens: int | None = None
    created_at: datetime | None = None


def assistant_from_json(item: Json) -> Assistant:
    return Assistant(
        id=item["id"],
        version=item["version"],
        created_at=datetime.fromisoformat(item["created_at"]),
        definition=AssistantDefinition(
            name=item["name"],
            provider=item["provider"],
            model=item["model"],
            language=item.get("language") or "",
            description=item.get("description") or "",
            instructions=_instructions(item.get("instructions") or {}),
            variables=item.get("variables") or {},
            tools=tuple(_tool(tool) for tool in item.get("tools") or ()),
            settings=item.get("settings") or {},
        ),
    )


def compaction_report_from_json(item: Json) -> CompactionReport:
    saved = item.get("saved_usd_per_call")
    return CompactionReport(
        conversation_id=item["conversation_id"],
        outcome=item["outcome"],
        reason=item["reason"],
        dry_run=item["dry_run"],
        epoch=item["epoch"],
        first_seq=item.get("first_seq"),
        last_seq=item.get("last_seq"),
        moved_tokens=item.get("moved_tokens") or 0,
        segment_tokens=item.get("segment_tokens") or 0,
        request_tokens=item.get("request_tokens"),
        saved_tokens_per_call=item.get("saved_tokens_per_call") or 0.0,
        saved_usd_per_call=None if saved is None else Decimal(str(saved)),
        blocked=item.get("blocked") or False,
    )


def compaction_from_json(item: Json) -> Compaction:
    return Compaction(
        epoch=item["epoch"],
        reason=item["reason"],
        generation=item["generation"],
        segment_count=item["segment_count"],
        buffer_start_seq=item["buffer_start_seq"],
        first_seq=item.get("first_seq"),
        last_seq=item.get("last_seq"),
        segment_tokens=item.get("segment_tokens"),
        created_at=datetime.fromisoformat(item["created_at"]),
    )


def conversation_from_json(item: Json) -> Conversation:
    origin = item.get("forked_from")
    return Conversation(
        id=item["id"],
        revision=item["revision"],
        state=item["state"],
        pending_tool_calls=_calls(item),
        assistant_id=item["assistant_id"],
        assistant_version=item["assistant_version"],
        identifier=item.get("identifier"),
        source=item.get("source"),
        direction=item.get("direction"),
        mode=item.get("mode"),
        args=item.get("args") or {},
        context=item.get("context") or {},
        metadata=item.get("metadata") or {},
        forked_from=Origin(conversation_id=origin["conversation_id"], seq=origin["seq"]) if origin else None,
        created_at=_time(item.get("created_at")),
        updated_at=_time(item.get("updated_at")),
    )


def turn_from_json(item: Json) -> Turn:
    return Turn(
        seq=item["seq"],
        kind=item["kind"],
        state=item["state"],
        blocks=tuple(block_from_json(block) for block in item.get("blocks") or ()),
        created_at=_time(item.get("created_at")),
        stop_reason=item.get("stop_reason"),
        stop_details=item.get("stop_details") or {},
        error=_error(item.get("error")),
        usage=usage_from_json(item["usage"]) if item.get("usage") else None,
        cost_usd=Decimal(str(item["cost_usd"])) if item.get("cost_usd") is not None else None,
        provider=item.get("provider"),
        model=item.get("model"),
    )


def turn_start_from_json(item: Json, *, replayed: bool) -> TurnStart:
    return TurnStart(turn=turn_from_json(item["turn"]), conversation=_status(item["conversation"]), replayed=replayed)


def turn_ended_from_json(item: Json) -> TurnEnded:
    turn = dict(item["turn"])
    turn["error"] = turn.get("error") or item.get("error")
    return TurnEnded(turn=turn_from_json(turn), conversation=_status(item["conversation"]))


def usage_from_json(item: Json) -> Usage:
    return Usage(**{name: int(item.get(name) or 0) for name in Usage.__slots__})


def erasure_from_json(item: Json) -> Erasure:
    return Erasure(dry_run=item["dry_run"], rows=dict(item["rows"]))


def _status(item: Json) -> ConversationStatus:
    return ConversationStatus(
        id=item["id"], revision=item["revision"], state=item["state"], pending_tool_calls=_calls(item)
    )


def _calls(item: Json) -> tuple[ToolCallBlock, ...]:
    return tuple(
        ToolCallBlock(id=call["id"], name=call["name"], arguments=call["arguments"])
        for call in item.get("pending_tool_calls") or ()
    )


def _error(item: Json | None) -> TurnError | None:
    if item is None:
        return None
    # The text is `message` in a turn and `detail` in a problem.
    return TurnError(
        code=item["code"],
        message=item.get("message") or item.get("detail") or "",
        hint=item.get("hint") or "",
        source=item.get("source") or "strata",
        provider_message=item.get("provider_message"),
        provider_status=item.get("provider_status"),
        retry_after_seconds=item.get("retry_after_seconds"),
    )


def _instructions(item: Json) -> Instructions:
    return Instructions(**{name: item.get(name) or "" for name in Instructions.__slots__})


def _tool(item: Json) -> Tool:
    return Tool(name=item["name"], description=item.get("description") or "", parameters=item.get("parameters") or {})


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text is not None else None
