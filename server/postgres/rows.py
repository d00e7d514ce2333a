"""Rows of statements as values of the domain."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import asyncpg

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions, Tool
from server.conversation.block import JsonValue, ToolCallBlock, block_from_json
from server.conversation.cache_register import CacheKey, RegisteredCache
from server.conversation.call import Call, CallEnd, CallStart, CallTrace
from server.conversation.conversation import Conversation, ConversationState, Origin
from server.conversation.epoch import Epoch, EpochReason, Rejected, Segment, SignedSummary
from server.conversation.identifiers import ASSISTANT, CONVERSATION, encode_id
from server.conversation.payload import LayerOrder
from server.conversation.turn import (
    ModelResponseTurn,
    StopReason,
    ToolResponseTurn,
    Turn,
    TurnKind,
    TurnState,
    UserTaskTurn,
)
from server.conversation.usage import Usage
from server.postgres.codec import decode_json, decode_raw, decode_text

Row: TypeAlias = asyncpg.Record
_HASH_BYTES: Final = 32


def text_or_none(value: str | None) -> str | None:
    """Decode stored text; None for NULL."""
    return None if value is None else decode_text(value)


def json_or_none(value: str | None) -> Any:
    """Decode stored JSON; None for NULL."""
    return None if value is None else decode_json(value)


def order_or_none(value: str | None) -> LayerOrder | None:
    """Decode a stored layer order; None for NULL."""
    return None if value is None else LayerOrder(value)


def assistant_from(row: Row) -> Assistant:
    """Read a row of `assistants`, with column names that do not collide with those of a conversation."""
    return Assistant(
        id=encode_id(ASSISTANT, row["assistant_id"]),
        version=row["chosen_version"],
        created_at=row["assistant_created_at"],
        definition=AssistantDefinition(
            name=decode_text(row["name"]),
            language=decode_text(row["language"]),
            description=decode_text(row["description"]),
            provider=decode_text(row["provider"]),
            model=decode_text(row["model"]),
            instructions=Instructions(**decode_json(row["instructions"])),
            variables=decode_json(row["variables"]),
            tools=tuple(Tool(**tool) for tool in decode_json(row["tools"])),
            settings=decode_json(row["settings"]),
        ),
    )


def conversation_from(row: Row) -> Conversation:
    """Read a row of `conversations`, and `pending_blocks` if the statement selects them."""
    pending = tuple(decode_text(call_id) for call_id in row["pending_call_ids"])
    if row["lease_token"] is not None:
        state = ConversationState.RUNNING
    else:
        state = ConversationState.AWAITING_TOOLS if pending else ConversationState.IDLE
    origin = row["forked_from_id"]
    return Conversation(
        id=encode_id(CONVERSATION, row["id"]),
        assistant_id=encode_id(ASSISTANT, row["assistant_id"]),
        assistant_version=row["assistant_version"],
        revision=row["revision"],
        next_seq=row["next_seq"],
        buffer_start_seq=row["buffer_start_seq"],
        epoch=row["epoch"],
        state=state,
        pending_call_ids=pending,
        pending_calls=_pending_calls(row.get("pending_blocks"), pending),
        identifier=text_or_none(row["identifier"]),
        source=text_or_none(row["source"]),
        direction=text_or_none(row["direction"]),
        mode=text_or_none(row["mode"]),
        args=decode_json(row["args"]),
        context=decode_json(row["context"]),
        metadata=decode_json(row["metadata"]),
        forked_from=None
        if origin is None
        else Origin(conversation_id=encode_id(CONVERSATION, origin), seq=row["forked_from_seq"]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _pending_calls(stored: str | None, pending: tuple[str, ...]) -> tuple[ToolCallBlock, ...]:
    blocks = [block_from_json(item) for item in decode_json(stored or "[]")]
    return tuple(block for block in blocks if isinstance(block, ToolCallBlock) and block.id in pending)


def turn_from(row: Row) -> Turn:
    """Read a row of `turns` without its native bytes."""
    blocks = tuple(block_from_json(item) for item in decode_json(row["blocks"]))
    match TurnKind(row["kind"]):
        case TurnKind.USER_TASK:
            return UserTaskTurn(
                seq=row["seq"],
                created_at=row["created_at"],
                blocks=blocks,
                language=text_or_none(row["language"]),
                args=json_or_none(row["args"]),
            )
        case TurnKind.TOOL_RESPONSE:
            return ToolResponseTurn(
                seq=row["seq"], created_at=row["created_at"], blocks=blocks, args=json_or_none(row["args"])
            )
        case TurnKind.MODEL_RESPONSE:
            return ModelResponseTurn(
                seq=row["seq"],
                created_at=row["created_at"],
                blocks=blocks,
                state=TurnState(row["state"]),
                stop_reason=None if row["stop_reason"] is None else StopReason(row["stop_reason"]),
                error_code=row["error_code"],
                provider=decode_text(row["provider"]),
                model=decode_text(row["model"]),
                usage=usage_from(row),
                cost_usd=row["cost_usd"],
                attempt=row["attempt"],
                revision=row["revision"],
                ending=json_or_none(row["ending"]) or {},
            )


def usage_from(row: Row) -> Usage:
    """Read the token counts of a row."""
    return Usage(
        fresh_input_tokens=row["fresh_input_tokens"],
        cache_read_tokens=row["cache_read_tokens"],
        cache_write_tokens=row["cache_write_tokens"],
        output_tokens=row["output_tokens"],
        reasoning_tokens=row["reasoning_tokens"],
    )


def call_from(row: Row, manifest: Sequence[Mapping[str, JsonValue]]) -> Call:
    """Read a row of `calls` with its raw bytes. `manifest` is the whole of its manifest, see
    `server.postgres.payload.manifests`.
    """
    return Call(
        turn_seq=row["turn_seq"],
        start=CallStart(
            attempt=row["attempt"],
            provider=decode_text(row["provider"]),
            model=decode_text(row["model"]),
            account=decode_text(row["account"]),
            epoch=row["epoch"],
            started_at=row["started_at"],
            manifest=manifest,
            request_hash=row["request_hash"],
            # Null in old rows: there was no other order then.
            layer_order=order_or_none(row["layer_order"]) or LayerOrder.LAYERED,
            dynamic=row["dynamic"],
            caching=json_or_none(row["caching"]) or {},
            cache_expected_tokens=row["cache_expected_tokens"],
            repairs=tuple(decode_json(row["repairs"])),
            template_failures=tuple(decode_json(row["template_failures"])),
            warnings=tuple(decode_json(row["warnings"])),
        ),
        end=None if row["ended_at"] is None else _call_end_from(row),
    )


def _call_end_from(row: Row) -> CallEnd:
    return CallEnd(
        ended_at=row["ended_at"],
        first_byte_at=row["first_byte_at"],
        status=row["status"],
        headers=decode_json(row["headers"]),
        raw_response=None if row["raw_response"] is None else decode_raw(row["raw_response"]),
        usage=usage_from(row),
        usage_reported=json_or_none(row["usage_reported"]),
        response_id=text_or_none(row["response_id"]),
        cache_miss_reason=text_or_none(row["cache_miss_reason"]),
        cost_usd=row["cost_usd"],
        error_code=row["error_code"],
    )


def trace_from(row: Row) -> CallTrace:
    """Read the previous call of a payload source."""
    return CallTrace(
        provider=decode_text(row["previous_provider"]),
        model=decode_text(row["previous_model"]),
        account=decode_text(row["previous_account"]),
        started_at=row["previous_started_at"],
        usage=usage_from(row),
        response_id=text_or_none(row["previous_response_id"]),
        caching=json_or_none(row["previous_caching"]) or {},
    )


def cache_from(row: Row) -> RegisteredCache:
    """Read a row of `provider_caches`, with column names that do not collide with others."""
    return RegisteredCache(
        id=row["cache_id"],
        key=CacheKey(
            provider=decode_text(row["cache_provider"]),
            account=decode_text(row["cache_account"]),
            model=decode_text(row["cache_model"]),
            prefix_hash=row["cache_prefix_hash"],
        ),
        name=decode_text(row["cache_name"]),
        token_count=row["cache_token_count"],
        expires_at=row["cache_expires_at"],
    )


def epoch_from(row: Row) -> Epoch:
    """Read the epoch columns of a payload source."""
    return Epoch(
        number=row["epoch_number"],
        reason=EpochReason(row["epoch_reason"]),
        assistant_version=row["epoch_assistant_version"],
        generation=row["generation"],
        segment_count=row["segment_count"],
        base_text=decode_text(row["base_text"] or ""),
        static_hash=row["static_hash"],
        # Empty in old rows: equal to no hash, so the next payload begins another epoch.
        prefix_hash=row["epoch_prefix_hash"] or b"",
        arguments_hash=row["epoch_arguments_hash"] or b"",
        template_hash=row["template_hash"],
        buffer_start_seq=row["epoch_buffer_start_seq"],
        signed_summary=None if row["signed_summary"] is None else _signed_summary_from(row),
        args=json_or_none(row.get("epoch_args")),
        rejected=_rejected_from(row["rejected"]),
    )


def _rejected_from(stored: str | None) -> dict[str, Rejected]:
    return {
        provider: Rejected(signatures_through_seq=found["signatures"], calls_through_seq=found["calls"])
        for provider, found in (json_or_none(stored) or {}).items()
    }


def _signed_summary_from(row: Row) -> SignedSummary:
    return SignedSummary(
        data=row["signed_summary"],
        start_seq=row["signed_summary_start_seq"],
        text=decode_text(row["signed_summary_text"]),
        token_count=row["signed_summary_tokens"],
        kept_prefix_hashes=_split_hashes(row["signed_summary_kept_hash"]),
    )


def _split_hashes(joined: bytes | None) -> tuple[bytes, ...]:
    """Split concatenated SHA-256 hashes."""
    hashes = joined or b""
    return tuple(hashes[offset : offset + _HASH_BYTES] for offset in range(0, len(hashes), _HASH_BYTES))


def segment_from(row: Row, generation: int) -> Segment:
    """Read a row of `segments`; its text is empty if the statement does not select it."""
    summarised = row["summarises_generation"]
    return Segment(
        generation=generation,
        position=row["position"],
        first_seq=row["first_seq"],
        last_seq=row["last_seq"],
        text=decode_text(row["text"] or ""),
        token_count=row["token_count"],
        summarises=None if summarised is None else (summarised, row["summarises_count"]),
    )
