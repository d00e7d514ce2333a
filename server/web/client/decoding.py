"""JSON to answers and events. What lacks a member that is always there is `AnswerMalformed`."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions, Tool
from server.conversation.block import ToolCallBlock, block_from_json
from server.conversation.conversation import Origin
from server.conversation.event import (
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    TurnStarted,
    UsageReported,
)
from server.conversation.usage import Usage
from server.web.client.answers import (
    Compaction,
    CompactionReport,
    Conversation,
    ConversationStatus,
    Erasure,
    Turn,
    TurnEnded,
    TurnError,
    TurnStart,
)
from server.web.client.errors import AnswerMalformed
from server.web.client.event import ClientEvent, UnknownEvent
from server.web.client.frames import Frame

Json = Mapping[str, Any]


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """Whatever goes wrong in here is the answer's fault."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise AnswerMalformed(
            f"The server's {what} cannot be read ({type(error).__name__}: {error}).",
            hint="Is it a Strata server, and about as new as this client?",
        ) from error


def decode_json(body: bytes, what: str) -> Any:
    with understanding(what):
        return json.loads(body)


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


def event_from_frame(frame: Frame) -> ClientEvent:
    """What a frame means."""
    decode = _EVENTS.get(frame.event)
    if decode is None:
        return UnknownEvent(name=frame.event, data=_json_or_text(frame.data))
    with understanding(f"event {frame.event}"):
        return decode(json.loads(frame.data))


_EVENTS: Final[Mapping[str, Callable[[Json], ClientEvent]]] = {
    "turn.started": lambda data: TurnStarted(
        conversation_id=data["conversation_id"], input_seq=data["input_seq"], seq=data["seq"]
    ),
    "thinking.delta": lambda data: ThinkingDelta(text=data["text"]),
    "text.delta": lambda data: TextDelta(text=data["text"]),
    "tool_call.begin": lambda data: ToolCallBegin(call_id=data["id"], name=data["name"]),
    "tool_call.delta": lambda data: ToolCallDelta(call_id=data["id"], arguments_json=data["arguments_json"]),
    "tool_call.end": lambda data: ToolCallEnd(call_id=data["id"], name=data["name"], arguments=data["arguments"]),
    "usage": lambda data: UsageReported(usage=usage_from_json(data)),
    "turn.completed": turn_ended_from_json,
    "turn.failed": turn_ended_from_json,
    "turn.cancelled": turn_ended_from_json,
}


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
    # A turn calls the sentence `message`, a problem `detail`.
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


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
