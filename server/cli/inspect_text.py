"""The words and numbers that `strata inspect` is made of. Pure; nothing that it gives is obeyed by a terminal."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from rich.markup import escape
from rich.text import Text

from server.cli.chat_text import describe_call, harmless, one_line
from server.conversation.block import (
    Block,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.usage import Usage
from server.inspection.port import CallOutline

_SHOWN_TEXT: Final = 2000
_SHOWN_LINE: Final = 300


def describe_blocks(blocks: Sequence[Block]) -> Iterator[Text]:
    """The blocks of a turn, for reading."""
    for block in blocks:
        match block:
            case TextBlock():
                yield Text(harmless(block.text[:_SHOWN_TEXT]))
            case ThinkingBlock():
                yield Text(f"(thinking) {cut(block.text)}", style="dim italic")
            case ToolCallBlock():
                yield Text(f"→ {describe_call(block.name, block.arguments)}")
            case ToolResultBlock():
                yield Text(f"← {cut(json.dumps(block.output, ensure_ascii=False))}")
            case ImageBlock():
                yield Text(f"({one_line(block.media_type)}, {block.size_bytes:,} bytes)")
            case UnknownBlock():
                yield Text("(a block of a kind that this release does not know)")


def describe_outline(outline: CallOutline) -> str:
    """A call on one line."""
    ended = "runs" if outline.ended_at is None else f"{(outline.ended_at - outline.started_at).total_seconds():.2f} s"
    error = "" if outline.error_code is None else f", {outline.error_code}"
    warned = f", {', '.join(outline.warning_kinds)}" if outline.warning_kinds else ""
    return one_line(
        f"{outline.turn_seq}/{outline.attempt}: {outline.model}, status {outline.status}, {ended}{error}{warned}"
    )


def describe_tokens(usage: Usage) -> str:
    """What a call took."""
    read = f"{usage.input_tokens:,} in ({usage.cache_read_tokens:,} cached)"
    return f"{read}, {usage.output_tokens:,} out, {usage.reasoning_tokens:,} reasoning"


def show_usd(cost: Decimal | None) -> str:
    """Money; what is not known is said to be so."""
    return "unknown" if cost is None else f"{cost:,.4f}"


def show_time(moment: datetime) -> str:
    """A moment in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def cut(text: str) -> str:
    """The beginning of a text, on one line."""
    line = one_line(text[: 4 * _SHOWN_LINE])
    return line if len(line) <= _SHOWN_LINE else f"{line[:_SHOWN_LINE]}…"


def safe(text: str) -> str:
    """A text that is no markup and that no terminal obeys."""
    return escape(one_line(text))
