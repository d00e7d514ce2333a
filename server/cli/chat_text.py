"""What a chat shows, as text. Pure.

Whatever a model, a tool or a server said passes `harmless` before it reaches a terminal: a terminal obeys control
characters, and a model can be talked into writing them.
"""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

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
from server.conversation.turn import StopReason, TurnState, describe_ending
from server.conversation.usage import Usage
from server.web.client import ClientError, StrataProblem, Turn

_SHOWN_ARGUMENTS: Final = 500
_DELETE: Final = 0x7F
_UNUSUAL_STOPS: Final[Mapping[str, str]] = {
    StopReason.LENGTH: "The answer reached its length limit.",
    StopReason.REFUSAL: "The model declined to answer.",
    StopReason.PAUSED: "The model paused; send anything to go on.",
}
_LONE: Final = "\N{REPLACEMENT CHARACTER}"


def _build_table() -> dict[int, str]:
    """Control characters as pictures of themselves; what turns the direction of text goes, and so do lone surrogates.

    Per character, so that a text may come in any pieces.
    """
    table = {code: chr(0x2400 + code) for code in range(0x20)} | {_DELETE: "\N{SYMBOL FOR DELETE}"}
    table |= dict.fromkeys(range(0x80, 0xA0), _LONE) | dict.fromkeys(range(0xD800, 0xE000), _LONE)
    table |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "")
    return table | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


_TABLE: Final = _build_table()


def harmless(text: str) -> str:
    """The text without anything that a terminal would obey, but for line ends and tabs."""
    return text.translate(_TABLE)


def one_line(text: str) -> str:
    """The same on one line."""
    return " ".join(harmless(text).split())


def describe_call(name: str, arguments: Mapping[str, JsonValue]) -> str:
    """A call as a programmer would write it, shortened where it is long."""
    written = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    shown = written if len(written) <= _SHOWN_ARGUMENTS else f"{written[:_SHOWN_ARGUMENTS]}…"
    return one_line(f"{name}({shown})")


def describe_error(error: ClientError) -> str:
    """One sentence, what to do, and the code to look up."""
    code = f" [{error.code}]" if isinstance(error, StrataProblem) else ""
    return one_line(f"{error}{code}")


def describe_end(turn: Turn) -> str | None:
    """A sentence where a turn ended in another way than by itself."""
    match turn.state:
        case TurnState.CANCELLED:
            return "Cancelled. What had arrived is kept."
        case TurnState.INTERRUPTED | TurnState.FAILED:
            error = turn.error
            said = f"{error.message} {error.hint} [{error.code}]" if error else "The turn failed."
            return one_line(f"{said} {_describe_why(turn)}")
        case _:
            said = _UNUSUAL_STOPS.get(turn.stop_reason or "", "")
            return one_line(f"{said} {_describe_why(turn)}") or None


def _describe_why(turn: Turn) -> str:
    """What the provider said about the end."""
    error = turn.error
    told = (
        {}
        if error is None
        else {
            "provider_message": error.provider_message,
            "retry_after_seconds": error.retry_after_seconds,
        }
    )
    return describe_ending({**told, "stop_details": turn.stop_details})


def describe_turn(turn: Turn) -> str:
    """Which turn it was and what it took, on one line."""
    parts = [f"turn {turn.seq}"]
    if turn.usage is not None:
        parts += _tokens(turn.usage)
    parts.append(_cost(turn.cost_usd))
    if turn.model:
        parts.append(one_line(turn.model))
    return " · ".join(parts)


def describe_blocks(turn: Turn) -> list[str]:
    """A stored turn block by block, for reading; reasoning is left out."""
    return [text for block in turn.blocks if (text := _describe_block(block))]


def _describe_block(block: Block) -> str:
    match block:
        case TextBlock():
            return harmless(block.text)
        case ToolCallBlock():
            return f"→ {describe_call(block.name, block.arguments)}"
        case ToolResultBlock():
            return f"← {one_line(json.dumps(block.output, ensure_ascii=False))[:_SHOWN_ARGUMENTS]}"
        case ImageBlock():
            return f"({one_line(block.media_type)}, {block.size_bytes:,} bytes)"
        case ThinkingBlock() | UnknownBlock():
            return ""


def _tokens(usage: Usage) -> list[str]:
    cached = f" ({100 * usage.cache_read_tokens / usage.input_tokens:.0f} % cached)" if usage.input_tokens else ""
    thinking = [f"{usage.reasoning_tokens:,} thinking"] if usage.reasoning_tokens else []
    return [f"{usage.input_tokens:,} in{cached}", f"{usage.output_tokens:,} out", *thinking]


def _cost(cost_usd: Decimal | None) -> str:
    if cost_usd is None:
        return "price not known"
    return f"${cost_usd:.4f}" if cost_usd >= Decimal("0.0001") or not cost_usd else "<$0.0001"
