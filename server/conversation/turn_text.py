"""The text of a turn, for the search.

It contains texts, reasoning, the names and arguments of tools, and their results. Characters that the search cannot
store (NUL bytes, lone surrogates) become spaces. A very long turn is truncated, because the size of an index entry is
limited.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, assert_never

from server.conversation.block import (
    Block,
    ImageBlock,
    JsonValue,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)

TEXT_LIMIT_BYTES: Final = 200_000
"""The words of a text of this size fit into an index entry of a megabyte, however short they are."""
EXCERPT_LIMIT: Final = 160
_UNREADABLE: Final = re.compile("[\x00\ud800-\udfff\U0010ffff]")


def read_text(blocks: Sequence[Block]) -> str:
    """Return the text of the turn, truncated at the limit."""
    text = _UNREADABLE.sub(" ", "\n".join(_pieces(blocks)))
    if len(text) * 4 <= TEXT_LIMIT_BYTES:
        return text
    return text.encode()[:TEXT_LIMIT_BYTES].decode(errors="ignore")


def read_excerpt(blocks: Sequence[Block]) -> str:
    """Return the beginning of the turn's texts, on one line."""
    words = " ".join(block.text[: 4 * EXCERPT_LIMIT] for block in blocks if isinstance(block, TextBlock))
    line = " ".join(_UNREADABLE.sub(" ", words).split())
    return line if len(line) <= EXCERPT_LIMIT else f"{line[: EXCERPT_LIMIT - 1]}…"


def _pieces(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        match block:
            case TextBlock() | ThinkingBlock():
                yield block.text
            case ToolCallBlock():
                yield f"{block.name} {_write(block.arguments)}"
            case ToolResultBlock():
                yield _write(block.output)
            case ImageBlock() | UnknownBlock():
                continue
            case _:
                assert_never(block)


def _write(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
