"""Transcripts: turns as text, after they have left the buffer.

A transcript contains what a model needs to continue: the user's messages, the answers, and the tool calls with their
results. It contains no reasoning and no trace of it.

Its text becomes part of the prompt, and users and tools may try to imitate other speakers. So no foreign text begins a
line: `quote` puts a mark before every line of a text, and `write_json` writes a value on one line. The output of
`templates/history_segment.j2` can therefore be parsed unambiguously, and `read_transcript` in the tests does that.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

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
from server.conversation.turn import ModelResponseTurn, StopReason, ToolResponseTurn, Turn, TurnState, UserTaskTurn

QUOTE_MARK: Final = "> "
LINE_ENDS: Final = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
"""All characters that any reader treats as the end of a line."""
_HIDDEN: Final = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NOTES: Final[Mapping[TurnState, str]] = {
    TurnState.COMPLETE: "",
    TurnState.CANCELLED: "stopped on request before its end",
    TurnState.INTERRUPTED: "broken off before its end",
    TurnState.FAILED: "failed before its end",
}


class PieceKind(StrEnum):
    """The kind of a piece of a transcript."""

    TEXT = "text"
    IMAGE = "image"
    CALL = "call"
    NO_RESULT = "no_result"
    """A call that was abandoned or not answered."""
    RESULT = "result"
    ERROR = "error"
    """A result that reports a failure of the tool."""
    UNSHOWN = "unshown"
    """A block that this release cannot describe."""
    NOTHING = "nothing"
    """A turn without content."""
    NO_ROOM = "no_room"
    """Turns that are left out completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptPiece:
    """A piece of a turn, as text."""

    kind: PieceKind
    text: str = ""
    """A message or a text result: any number of lines. Any other kind: one line."""
    is_json: bool = False
    """For results: the text is one line of JSON."""
    place: int | None = None
    """For calls: the number within the turn, from 1. For results: the call of the previous turn; None for no call."""
    name: str = ""
    """For calls: the name of the tool."""
    left_out_chars: int = 0
    """For results: the number of characters that were truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTurn:
    """A turn, or several turns described as one."""

    label: str
    """Its number, or the first and the last: `1-40`."""
    speaker: str
    """`user`, `assistant`, `tools`, `summary`, or `left out`."""
    note: str = ""
    """Anything unusual about it."""
    pieces: tuple[TranscriptPiece, ...]


def build_transcript(turns: Sequence[Turn], *, result_limit_chars: int = 0) -> tuple[TranscriptTurn, ...]:
    """Describe the turns. A result longer than the limit is truncated; 0 means no limit."""
    described = []
    for turn, before, after in zip(turns, [None, *turns[:-1]], [*turns[1:], None], strict=True):
        match turn:
            case UserTaskTurn():
                speaker, note = "user", ""
            case ToolResponseTurn():
                speaker, note = "tools", ""
            case ModelResponseTurn():
                speaker, note = "assistant", _NOTES[turn.state]
            case _:
                assert_never(turn)
        # Providers require that the partial output of a refusal is discarded; the history must not repeat it.
        refused = isinstance(turn, ModelResponseTurn) and turn.stop_reason is StopReason.REFUSAL
        blocks = () if refused else turn.blocks
        pieces = tuple(
            _merge(_describe_blocks(blocks, _call_indexes(before), _answered_ids(after), result_limit_chars))
        )
        described.append(
            TranscriptTurn(
                label=str(turn.seq),
                speaker=speaker,
                note=note,
                pieces=pieces or (TranscriptPiece(kind=PieceKind.NOTHING),),
            )
        )
    return tuple(described)


def build_summary(first_seq: int, last_seq: int, text: str) -> TranscriptTurn:
    """Describe turns by a summary."""
    piece = TranscriptPiece(kind=PieceKind.TEXT, text=text)
    return TranscriptTurn(label=f"{first_seq}-{last_seq}", speaker="summary", pieces=(piece,))


def build_gap(first_seq: int, last_seq: int) -> TranscriptTurn:
    """Describe turns that are left out."""
    piece = TranscriptPiece(kind=PieceKind.NO_ROOM)
    return TranscriptTurn(label=f"{first_seq}-{last_seq}", speaker="left out", pieces=(piece,))


def transcript_turn_from_json(item: Mapping[str, Any]) -> TranscriptTurn:
    """The inverse of `dataclasses.asdict` for a turn that was encoded as JSON."""
    pieces = tuple(TranscriptPiece(**{**piece, "kind": PieceKind(piece["kind"])}) for piece in item["pieces"])
    return TranscriptTurn(**{**item, "pieces": pieces})


def quote(text: str) -> str:
    """Put a mark before each line of the text, whatever ends the lines."""
    return QUOTE_MARK + LINE_ENDS.sub(lambda match: match.group() + QUOTE_MARK, text)


def write_json(value: JsonValue) -> str:
    """Write the value on one line, keys in order. Characters that could end a line are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _HIDDEN.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _describe_blocks(
    blocks: Sequence[Block], places: Mapping[str, int], answered: frozenset[str], result_limit_chars: int
) -> Iterator[TranscriptPiece]:
    calls = 0
    for block in blocks:
        match block:
            case TextBlock():
                if block.text:
                    yield TranscriptPiece(kind=PieceKind.TEXT, text=block.text)
            case ImageBlock():
                facts = f"{_name(block.media_type)}, {block.size_bytes} bytes, sha256 {_name(block.sha256)}"
                yield TranscriptPiece(kind=PieceKind.IMAGE, text=facts)
            case ThinkingBlock():
                pass
            case ToolCallBlock():
                calls += 1
                written = write_json(block.arguments)
                yield TranscriptPiece(kind=PieceKind.CALL, place=calls, name=_name(block.name), text=written)
                if block.id not in answered:
                    yield TranscriptPiece(kind=PieceKind.NO_RESULT, place=calls)
            case ToolResultBlock():
                yield _describe_result(block, places, result_limit_chars)
            case UnknownBlock():
                # Its name is omitted too, because it may be a new kind of reasoning.
                yield TranscriptPiece(kind=PieceKind.UNSHOWN)
            case _:
                assert_never(block)


def _describe_result(block: ToolResultBlock, places: Mapping[str, int], limit_chars: int) -> TranscriptPiece:
    is_text = isinstance(block.output, str)
    text = block.output if is_text else write_json(block.output)
    shown = text[:limit_chars] if limit_chars else text
    return TranscriptPiece(
        kind=PieceKind.ERROR if block.is_error else PieceKind.RESULT,
        place=places.get(block.tool_call_id),
        text=shown,
        is_json=not is_text,
        left_out_chars=len(text) - len(shown),
    )


def _merge(pieces: Iterator[TranscriptPiece]) -> Iterator[TranscriptPiece]:
    """Join consecutive texts, because providers split them arbitrarily."""
    texts: list[str] = []
    for piece in pieces:
        if piece.kind is PieceKind.TEXT:
            texts.append(piece.text)
            continue
        if texts:
            yield TranscriptPiece(kind=PieceKind.TEXT, text="".join(texts))
            texts.clear()
        yield piece
    if texts:
        yield TranscriptPiece(kind=PieceKind.TEXT, text="".join(texts))


def _call_indexes(before: Turn | None) -> Mapping[str, int]:
    """The calls of a turn, by their ids."""
    calls = [] if before is None else [block.id for block in before.blocks if isinstance(block, ToolCallBlock)]
    return {call_id: place for place, call_id in enumerate(calls, start=1)}


def _answered_ids(after: Turn | None) -> frozenset[str]:
    results = () if after is None else after.blocks
    return frozenset(block.tool_call_id for block in results if isinstance(block, ToolResultBlock))


def _name(name: str) -> str:
    """A name from outside, as a word or as JSON."""
    return name if _PLAIN_NAME.fullmatch(name) else write_json(name)
