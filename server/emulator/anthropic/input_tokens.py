"""How many tokens each part of a prompt costs."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.emulator.anthropic.binding import Bound
from server.emulator.anthropic.cache_markers import PromptItem
from server.emulator.anthropic.models import Model
from server.emulator.anthropic.prompt import THINKING_TYPES, content_blocks
from server.emulator.tokens import count_json, count_tokens

_IMAGE_TOKENS: Final = 1_500
_BLOCK_TOKENS: Final = 3
"""The overhead of a block."""


def count_items(
    items: Sequence[PromptItem], messages: Sequence[dict[str, Any]], model: Model, bound: Bound
) -> dict[str, int]:
    """The tokens of each item, by path. Items that the model does not get cost nothing."""
    hidden = bound.dropped | _find_cleared(messages)
    if not model.keeps_old_thinking:
        hidden |= _find_old_thinking(items)
    return {item.path: 0 if item.path in hidden else _count(item, bound.thinking_tokens) for item in items}


def _count(item: PromptItem, thinking_tokens: Mapping[str, int]) -> int:
    if item.layer == "tools":
        return count_json({key: value for key, value in item.value.items() if key != "cache_control"})
    if item.path in thinking_tokens:
        return thinking_tokens[item.path]
    return _BLOCK_TOKENS + _count_block(item.value)


def _count_block(block: Mapping[str, Any]) -> int:
    match block["type"]:
        case "text":
            return count_tokens(block["text"])
        case "image":
            return _IMAGE_TOKENS
        case "tool_use":
            return count_tokens(block["name"]) + count_json(block["input"])
        case "tool_result":
            return sum(_count_block(inner) for inner in content_blocks(block.get("content", [])))
        case "compaction":
            return count_tokens(block.get("content") or "")
        case _:
            return count_json({key: value for key, value in block.items() if key != "cache_control"})


def _find_cleared(messages: Sequence[dict[str, Any]]) -> set[str]:
    """Paths of turn-scoped system messages whose turn is over: they stay in the array but are not shown to the
    model.
    """
    last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return {
        f"messages.{number}.content.{index}"
        for number, message in enumerate(messages)
        if message.get("clear_at") == "next_user_message" and number < last_user
        for index in range(len(content_blocks(message["content"])))
    }


def _find_old_thinking(items: Sequence[PromptItem]) -> set[str]:
    """Paths of thinking blocks before the newest user text."""
    spoken = [index for index, item in enumerate(items) if item.role == "user" and item.value["type"] != "tool_result"]
    newest = spoken[-1] if spoken else 0
    return {item.path for item in items[:newest] if item.value.get("type") in THINKING_TYPES}
