"""A response in both forms: one message, or the events of a stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from server.emulator.anthropic.cache import CacheUsage
from server.emulator.anthropic.composing import Block, Composed

Event: TypeAlias = dict[str, Any]
"""The data of one server-sent event; its `type` is also the event's name."""

_DELTAS_PER_PING: Final = 25
_FIRST_TOKENS: Final = 1
"""The output tokens that `message_start` reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    id: str
    model: str
    composed: Composed
    usage: CacheUsage
    extras: dict[str, Any]
    """Fields that only some requests get: diagnostics, input_transformations, context_management."""
    speed: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(block.output_tokens for block in self.composed.blocks)

    @property
    def thinking_tokens(self) -> int:
        return sum(block.output_tokens for block in self.composed.blocks if block.is_thinking)


def render_message(answer: Answer) -> dict[str, Any]:
    """The response as one message."""
    composed = answer.composed
    message = _render_head(answer, answer.output_tokens)
    message["content"] = [_renew(block.whole, composed) for block in composed.blocks]
    message["stop_reason"] = composed.stop_reason
    message["stop_sequence"] = composed.stop_sequence
    message["stop_details"] = composed.stop_details
    if composed.container is not None:
        message["container"] = composed.container
    message["usage"]["output_tokens_details"] = {"thinking_tokens": answer.thinking_tokens}
    return message


def render_events(answer: Answer) -> Iterator[Event]:
    """The response as stream events, with a ping after the first block has started and then now and then."""
    yield {"type": "message_start", "message": _render_head(answer, _FIRST_TOKENS)}
    if answer.composed.is_novel:
        yield {"type": "emulated_novelty", "novelty": "an event that no document names"}
    if not answer.composed.blocks:
        yield {"type": "ping"}
    sent = 0
    for index, block in enumerate(answer.composed.blocks):
        yield {"type": "content_block_start", "index": index, "content_block": _renew(block.start, answer.composed)}
        if index == 0:
            yield {"type": "ping"}
        for delta in block.deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            sent += 1
            if sent % _DELTAS_PER_PING == 0:
                yield {"type": "ping"}
        yield {"type": "content_block_stop", "index": index}
    yield _render_end(answer)
    yield {"type": "message_stop"}


def list_thinking_ids(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    return tuple(block.thinking_id for block in blocks if block.is_thinking)


def _render_head(answer: Answer, output_tokens: int) -> dict[str, Any]:
    usage = answer.usage
    head: dict[str, Any] = {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": usage.input_tokens,
            "cache_creation_input_tokens": usage.written_tokens,
            "cache_read_input_tokens": usage.read_tokens,
            "cache_creation": {
                "ephemeral_5m_input_tokens": usage.written_5m_tokens,
                "ephemeral_1h_input_tokens": usage.written_1h_tokens,
            },
            "output_tokens": output_tokens,
            "service_tier": "standard",
            "inference_geo": "global",
            **({"speed": answer.speed} if answer.speed else {}),
        },
        **answer.extras,
    }
    if answer.composed.is_novel:
        head["emulated_note"] = "a field that no document names"
    return head


def _render_end(answer: Answer) -> Event:
    composed, usage = answer.composed, answer.usage
    delta: dict[str, Any] = {"stop_reason": composed.stop_reason, "stop_sequence": composed.stop_sequence}
    if composed.stop_details is not None:
        delta["stop_details"] = composed.stop_details
    if composed.container is not None:
        delta["container"] = composed.container
    return {
        "type": "message_delta",
        "delta": delta,
        "usage": {
            "input_tokens": usage.input_tokens,
            "cache_creation_input_tokens": usage.written_tokens,
            "cache_read_input_tokens": usage.read_tokens,
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"thinking_tokens": answer.thinking_tokens},
        },
    }


def _renew(block: dict[str, Any], composed: Composed) -> dict[str, Any]:
    """The block; with the fault `unknown_parts` also an undocumented field."""
    return {**block, "emulated_note": "keep me"} if composed.is_novel and block["type"] == "text" else block
