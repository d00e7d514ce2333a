"""The items of a prompt in order: their cache markers, with the rules for them, and their tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.anthropic.binding import Bound
from server.emulator.anthropic.errors import invalid
from server.emulator.anthropic.models import Model
from server.emulator.anthropic.prompt import THINKING_TYPES, content_blocks, place_blocks
from server.emulator.tokens import count_json, count_tokens

_IMAGE_TOKENS: Final = 1_500
_BLOCK_TOKENS: Final = 3
"""The overhead of a block."""
_MAX_MARKERS: Final = 4
_NEVER_CACHED: Final = frozenset({"thinking", "redacted_thinking"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """A tool, a `system` block or a block of a message, in prompt order."""

    path: str
    layer: str
    """`tools`, `system` or `messages`."""
    value: dict[str, Any]
    role: str = ""


def list_items(body: Mapping[str, Any]) -> list[PromptItem]:
    """All items of the prompt in order: tools, system, messages."""
    return [*_list_tools(body), *_list_system(body), *_list_messages(body)]


def read_ttls(body: Mapping[str, Any], items: list[PromptItem]) -> dict[str, str]:
    """The time to live at each breakpoint, by path, the automatic one included. Raises `Refused`."""
    explicit = {item.path: ttl for item in items if (ttl := _ttl_of(item.value)) is not None}
    found = sum(_count_markers(item.value) for item in items)
    automatic = _read_automatic(body, items, explicit)
    found += len(automatic.keys() - explicit.keys())
    if found > _MAX_MARKERS:
        raise invalid(f"A maximum of {_MAX_MARKERS} blocks with cache_control may be provided. Found {found}.")
    ttls = {**explicit, **automatic}
    _check_order([(item.path, ttls[item.path]) for item in items if item.path in ttls])
    return ttls


def _list_tools(body: Mapping[str, Any]) -> Iterator[PromptItem]:
    for index, tool in enumerate(body.get("tools", [])):
        yield PromptItem(path=f"tools.{index}", layer="tools", value=tool)


def _list_system(body: Mapping[str, Any]) -> Iterator[PromptItem]:
    for index, block in enumerate(content_blocks(body.get("system") or [])):
        yield PromptItem(path=f"system.{index}", layer="system", value=block)


def _list_messages(body: Mapping[str, Any]) -> Iterator[PromptItem]:
    for placed in place_blocks(body["messages"]):
        yield PromptItem(path=placed.path, layer="messages", value=placed.block, role=placed.role)


def _ttl_of(value: Mapping[str, Any]) -> str | None:
    """The marker of a block, or the last marker inside it."""
    marker = value.get("cache_control")
    if marker:
        return str(marker.get("ttl", "5m"))
    inner = [ttl for block in _inner_blocks(value) if (ttl := _ttl_of(block)) is not None]
    return inner[-1] if inner else None


def _count_markers(value: Mapping[str, Any]) -> int:
    return bool(value.get("cache_control")) + sum(_count_markers(block) for block in _inner_blocks(value))


def _inner_blocks(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = value.get("content")
    return content if value.get("type") == "tool_result" and isinstance(content, list) else []


def _read_automatic(body: Mapping[str, Any], items: list[PromptItem], explicit: Mapping[str, str]) -> dict[str, str]:
    marker = body.get("cache_control")
    if not marker:
        return {}
    ttl = str(marker.get("ttl", "5m"))
    target = next((item for item in reversed(items) if item.value.get("type") not in _NEVER_CACHED), None)
    if target is None:
        return {}
    if target.path in explicit and explicit[target.path] != ttl:
        raise invalid(
            f"Top-level cache_control has ttl='{ttl}' but the target block already has cache_control with "
            f"ttl='{explicit[target.path]}'"
        )
    return {target.path: ttl}


def _check_order(marked: list[tuple[str, str]]) -> None:
    shorter_seen = False
    for path, ttl in marked:
        if ttl == "1h" and shorter_seen:
            raise invalid(
                f"{path}.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
                "cache_control block. Note that blocks are processed in the following order: `tools`, `system`, "
                "`messages`."
            )
        shorter_seen = shorter_seen or ttl == "5m"


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
