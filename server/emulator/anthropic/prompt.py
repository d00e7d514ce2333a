"""The messages of a request, block by block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

THINKING_TYPES: Final = frozenset({"thinking", "redacted_thinking"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBlock:
    """A block and its position in the request."""

    message: int
    index: int
    role: str
    block: dict[str, Any]

    @property
    def path(self) -> str:
        return f"messages.{self.message}.content.{self.index}"

    @property
    def is_thinking(self) -> bool:
        return self.block["type"] in THINKING_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRun:
    """Consecutive messages of one role, which the API treats as one message."""

    role: str
    blocks: tuple[PlacedBlock, ...]
    first: int
    last: int
    """The indexes of its first and last message."""

    @property
    def tool_use_ids(self) -> list[str]:
        return [placed.block["id"] for placed in self.blocks if placed.block["type"] == "tool_use"]

    @property
    def block_types(self) -> set[str]:
        return {placed.block["type"] for placed in self.blocks}

    @property
    def thinking(self) -> list[PlacedBlock]:
        return [placed for placed in self.blocks if placed.is_thinking]


def find_open_server_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Server tool calls that have no result yet."""
    blocks = [block for message in messages for block in content_blocks(message["content"])]
    answered = {block.get("tool_use_id") for block in blocks if str(block["type"]).endswith("_tool_result")}
    return [block for block in blocks if block["type"] == "server_tool_use" and block["id"] not in answered]


def content_blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a message, of `system` or of a tool result. A string stands for one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def place_blocks(messages: Sequence[dict[str, Any]]) -> list[PlacedBlock]:
    return [
        PlacedBlock(message=number, index=index, role=message["role"], block=block)
        for number, message in enumerate(messages)
        for index, block in enumerate(content_blocks(message["content"]))
    ]


def join_runs(messages: Sequence[dict[str, Any]]) -> list[MessageRun]:
    """The messages, with neighbours of the same role joined."""
    return [
        _join(role, [number for number, _ in run], messages)
        for role, run in ((role, list(run)) for role, run in groupby(enumerate(messages), key=_role_of))
    ]


def _role_of(numbered: tuple[int, dict[str, Any]]) -> str:
    return str(numbered[1]["role"])


def _join(role: str, numbers: Sequence[int], messages: Sequence[dict[str, Any]]) -> MessageRun:
    blocks = tuple(
        PlacedBlock(message=number, index=index, role=role, block=block)
        for number in numbers
        for index, block in enumerate(content_blocks(messages[number]["content"]))
    )
    return MessageRun(role=role, blocks=blocks, first=numbers[0], last=numbers[-1])


def find_open_tool_step(messages: Sequence[dict[str, Any]]) -> MessageRun | None:
    """The assistant message whose tool results end the request, if any."""
    steps = _find_open_steps(messages)
    return steps[-1] if steps else None


def find_open_turn(messages: Sequence[dict[str, Any]]) -> MessageRun | None:
    """The first assistant message of the current tool loop; everything after it belongs to the same turn."""
    steps = _find_open_steps(messages)
    return steps[0] if steps else None


def _find_open_steps(messages: Sequence[dict[str, Any]]) -> list[MessageRun]:
    """The assistant messages since the newest user text, if the request ends with tool results."""
    spoken = [run for run in join_runs(messages) if run.role != "system"]
    if len(spoken) <= 1 or spoken[-1].role != "user" or "tool_result" not in spoken[-1].block_types:
        return []
    steps: list[MessageRun] = []
    for run in reversed(spoken[:-1]):
        if run.role == "assistant":
            steps.insert(0, run)
        elif run.block_types != {"tool_result"}:
            break
    return steps


def read_text(content: str | list[dict[str, Any]]) -> str:
    """The text of all text blocks."""
    return "\n".join(block["text"] for block in content_blocks(content) if block["type"] == "text")
