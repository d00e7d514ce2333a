"""Builders of complete and plausible values; a test states only what matters to it."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions, Tool
from server.conversation.block import (
    Blob,
    Block,
    SignatureMark,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Conversation, ConversationDraft, ConversationState, Lease
from server.conversation.epoch import Epoch, EpochReason
from server.conversation.store import Accepted, NewAnswer, NewInput, Store
from server.conversation.turn import Native, StopReason, TurnKind, TurnState
from server.conversation.usage import Usage

# For values that are only compared with each other. Calls in a store get the current time, like the times of the
# database
# itself: a fixed time would be within "the last 24 hours" on some dates and outside of it on others.
A_TIME = datetime(2026, 11, 16, 12, 0, 0, 123456, tzinfo=UTC)
LEASE_SECONDS = 60.0
NASTY = (
    "NUL \x00, lone \ud83d and \udc00, both \ud83d\udc00, last \U0010ffff, \\u0000, \\\x00, 😀, \u202e, \x1b[31m, "
    "<script>, 1e+300, %s, :name, $1, {{ x }}"
)


def definition(**changes: Any) -> AssistantDefinition:
    values: dict[str, Any] = {
        "name": "helper",
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
        "language": "en",
        "description": "Helps.",
        "instructions": Instructions(roles="You help.", procedure="Think, then answer.", constraints="Be kind."),
        "variables": {"tone": "friendly"},
        "tools": (
            Tool(
                name="get_weather",
                description="The weather in a city.",
                # Deliberately not in alphabetical order.
                parameters={"type": "object", "properties": {"zip": {"type": "string"}, "city": {"type": "string"}}},
            ),
        ),
        "settings": {"max_output_tokens": 1024, "thinking": "low"},
    }
    return AssistantDefinition(**values | changes)


def user_input(conversation_id: str, text: str = "What is the weather in Oslo?", **changes: Any) -> NewInput:
    blocks: tuple[Block, ...] = (TextBlock(text=text),)
    values: dict[str, Any] = {
        "conversation_id": conversation_id,
        "kind": TurnKind.USER_TASK,
        "blocks": blocks,
        "body_hash": hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(),
        "lease_token": uuid4(),
        "lease_owner": "test",
        "lease_seconds": LEASE_SECONDS,
    }
    return NewInput(**values | changes)


def tool_response(conversation_id: str, call_ids: Sequence[str], **changes: Any) -> NewInput:
    blocks = tuple(ToolResultBlock(tool_call_id=call_id, output={"celsius": 4}) for call_id in call_ids)
    return user_input(
        conversation_id,
        **{"kind": TurnKind.TOOL_RESPONSE, "blocks": blocks, "answers": tuple(call_ids)} | changes,
    )


def tool_call(call_id: str) -> ToolCallBlock:
    return ToolCallBlock(
        id=call_id,
        name="get_weather",
        arguments={"city": "Oslo", "days": 3, "scale": 1.5},
        signature=SignatureMark(length=48, fingerprint="0123456789abcdef"),
    )


def picture(data: bytes) -> Blob:
    return Blob(sha256=hashlib.sha256(data).digest(), media_type="image/png", data=data)


def build_conversation(**changes: Any) -> Conversation:
    """An id that no store has."""
    values: dict[str, Any] = {
        "id": "conv_x",
        "assistant_id": "asst_x",
        "assistant_version": 1,
        "revision": 1,
        "next_seq": 1,
        "buffer_start_seq": 1,
        "epoch": 1,
        "state": ConversationState.IDLE,
        "pending_call_ids": (),
        "pending_calls": (),
        "identifier": None,
        "source": None,
        "direction": None,
        "mode": None,
        "args": {},
        "context": {},
        "metadata": {},
        "forked_from": None,
        "created_at": A_TIME,
        "updated_at": A_TIME,
    }
    return Conversation(**values | changes)


def call_start(**changes: Any) -> CallStart:
    values: dict[str, Any] = {
        "attempt": 1,
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
        "account": "acct-1",
        "epoch": 1,
        "started_at": datetime.now(UTC),
        "manifest": (
            {"layer": "static", "kind": "static", "role": "system", "hash": "ab", "length": 10},
            {"layer": "trigger", "kind": "message", "role": "user", "hash": "cd", "length": 5},
        ),
        "request_hash": hashlib.sha256(b"request").digest(),
        "dynamic": b'{"todos":[]}',
        "caching": {"cache_seconds": 300, "previous_response_id": "resp_0"},
        "cache_expected_tokens": 100,
    }
    return CallStart(**values | changes)


def call_end(**changes: Any) -> CallEnd:
    now = datetime.now(UTC)
    values: dict[str, Any] = {
        "ended_at": now,
        "first_byte_at": now,
        "status": 200,
        "headers": {"x-request-id": "abc"},
        "raw_response": b'data: {"text":"It rains."}\n\n' * 20,
        "usage": Usage(
            fresh_input_tokens=7, cache_read_tokens=5, cache_write_tokens=3, output_tokens=2, reasoning_tokens=1
        ),
        "usage_reported": {"promptTokenCount": 15},
        "response_id": "resp_1",
        "cost_usd": Decimal("0.0012345678"),
    }
    return CallEnd(**values | changes)


def answer(text: str = "It rains.", *, calls: Sequence[str] = (), **changes: Any) -> NewAnswer:
    blocks: tuple[Block, ...] = (
        ThinkingBlock(text="Rain?", signature=SignatureMark(length=3, fingerprint="00ff00ff00ff00ff")),
        TextBlock(text=text),
        *(tool_call(call_id) for call_id in calls),
    )
    values: dict[str, Any] = {
        "blocks": blocks,
        "native": Native(dialect="gemini", data=b'{"role":"model","parts":[{"text":"It rains."}]}'),
        "state": TurnState.COMPLETE,
        "stop_reason": StopReason.TOOL_USE if calls else StopReason.END_TURN,
        "error_code": None,
        "usage": Usage(
            fresh_input_tokens=7, cache_read_tokens=5, cache_write_tokens=3, output_tokens=2, reasoning_tokens=1
        ),
        "cost_usd": Decimal("0.0012345678"),
        "pending_call_ids": tuple(calls),
        "start": call_start(),
        "end": call_end(),
    }
    # The answering provider is the one that was called, unless the test sets another.
    start = changes.get("start") or values["start"]
    values |= {"provider": start.provider, "model": start.model, "account": start.account}
    return NewAnswer(**values | changes)


def epoch(number: int = 1, text: str = "You help.", **changes: Any) -> Epoch:
    values: dict[str, Any] = {
        "number": number,
        "reason": EpochReason.STARTED,
        "assistant_version": 1,
        "generation": 0,
        "segment_count": 0,
        "base_text": text,
        "static_hash": hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(),
        "prefix_hash": hashlib.sha256(f"tools {text}".encode("utf-8", "surrogatepass")).digest(),
        "arguments_hash": hashlib.sha256(b"{}").digest(),
        "template_hash": hashlib.sha256(b"template").digest(),
        "buffer_start_seq": 1,
    }
    return Epoch(**values | changes)


async def create_assistant(store: Store, tenant_id: str, **changes: Any) -> Assistant:
    return await store.create_assistant(tenant_id, definition(**changes))


async def create_conversation(store: Store, tenant_id: str, **changes: Any) -> Conversation:
    assistant = await create_assistant(store, tenant_id)
    return await store.create_conversation(tenant_id, ConversationDraft(assistant_id=assistant.id, **changes))


async def accept(store: Store, tenant_id: str, turn: NewInput) -> Accepted:
    """Accept a turn that must not be a duplicate."""
    outcome = await store.accept_turn(tenant_id, turn)
    assert isinstance(outcome, Accepted), outcome
    return outcome


async def take_exchange(
    store: Store, tenant_id: str, conversation_id: str, text: str = "Hello", reply: str = "Hi", **changes: Any
) -> Lease:
    """Store one user task and its answer."""
    accepted = await accept(store, tenant_id, user_input(conversation_id, text))
    await store.finish_turn(accepted.lease, answer(reply, **changes))
    return accepted.lease


def token() -> UUID:
    return uuid4()
