"""Transcripts: turns as they are told once they have left the buffer.

A transcript says what a reader needs in order to go on: what the user said, what was answered, which tools were called
and what they gave. It never holds reasoning, nor anything that tells that there was some.

Its text goes into the prompt, and parts of it were written by people and tools that may wish to look like somebody
else. So nobody's words stand at the beginning of a line: `quote` puts a mark before every line of a text, and
`write_json` gives a value on one line. What `templates/history_segment.j2` makes of both can be read back without doubt
about who said what; `read_transcript` in the tests does.
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
"""All that anybody takes for the end of a line."""
_HIDDEN: Final = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NOTES: Final[Mapping[TurnState, str]] = {
    TurnState.COMPLETE: "",
    TurnState.CANCELLED: "stopped on request before its end",
    TurnState.INTERRUPTED: "broken off before its end",
    TurnState.FAILED: "failed before its end",
}


class PieceKind(StrEnum):
    """What a piece of a transcript is."""

    TEXT = "text"
    IMAGE = "image"
    CALL = "call"
    NO_RESULT = "no_result"
    """A call that was given up, or that nobody has answered."""
    RESULT = "result"
    ERROR = "error"
    """A result that says that the tool failed."""
    UNSHOWN = "unshown"
    """Something that this release cannot put into words."""
    NOTHING = "nothing"
    """A turn in which nothing was said."""
    NO_ROOM = "no_room"
    """Turns that are left out altogether."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptPiece:
    """A piece of a turn, in words."""

    kind: PieceKind
    text: str = ""
    """Of a text and of a result that is text: as it is, of any number of lines. Of all others: one line."""
    is_json: bool = False
    """Of results: the text is one line of JSON."""
    place: int | None = None
    """Of calls: which one of the turn, from 1. Of results: which call of the turn before; None for one to no call."""
    name: str = ""
    """Of calls: of the tool."""
    left_out_chars: int = 0
    """Of results: how much of the end is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTurn:
    """A turn, or several that are told as one."""

    label: str
    """Its number, or the first and the last: `1-40`."""
    speaker: str
    """`user`, `assistant`, `tools`, `summary`, or `left out`."""
    note: str = ""
    """What is out of the ordinary about it."""
    pieces: tuple[TranscriptPiece, ...]


def build_transcript(turns: Sequence[Turn], *, result_limit_chars: int = 0) -> tuple[TranscriptTurn, ...]:
    """The turns in words. A result longer than the limit loses its end; 0 is no limit."""
    told = []
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
        # Providers want the partial output of a refusal discarded: text of the history would bring it back.
        refused = isinstance(turn, ModelResponseTurn) and turn.stop_reason is StopReason.REFUSAL
        blocks = () if refused else turn.blocks
        pieces = tuple(_merge(_tell(blocks, _places(before), _answered(after), result_limit_chars)))
        told.append(
            TranscriptTurn(
                label=str(turn.seq),
                speaker=speaker,
                note=note,
                pieces=pieces or (TranscriptPiece(kind=PieceKind.NOTHING),),
            )
        )
    return tuple(told)


def build_summary(first_seq: int, last_seq: int, text: str) -> TranscriptTurn:
    """Turns that are told by a summary."""
    piece = TranscriptPiece(kind=PieceKind.TEXT, text=text)
    return TranscriptTurn(label=f"{first_seq}-{last_seq}", speaker="summary", pieces=(piece,))


def build_gap(first_seq: int, last_seq: int) -> TranscriptTurn:
    """Turns of which nothing is told."""
    piece = TranscriptPiece(kind=PieceKind.NO_ROOM)
    return TranscriptTurn(label=f"{first_seq}-{last_seq}", speaker="left out", pieces=(piece,))


def transcript_turn_from_json(item: Mapping[str, Any]) -> TranscriptTurn:
    """The inverse of `dataclasses.asdict` for a turn, after a way as JSON."""
    pieces = tuple(TranscriptPiece(**{**piece, "kind": PieceKind(piece["kind"])}) for piece in item["pieces"])
    return TranscriptTurn(**{**item, "pieces": pieces})


def quote(text: str) -> str:
    """The text with a mark before each of its lines, whatever ends them."""
    return QUOTE_MARK + LINE_ENDS.sub(lambda match: match.group() + QUOTE_MARK, text)


def write_json(value: JsonValue) -> str:
    """The value on one line, keys in their order. What could pass for the end of a line is written as an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _HIDDEN.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _tell(
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
                yield _tell_result(block, places, result_limit_chars)
            case UnknownBlock():
                # Not even its name: it may be a new kind of reasoning.
                yield TranscriptPiece(kind=PieceKind.UNSHOWN)
            case _:
                assert_never(block)


def _tell_result(block: ToolResultBlock, places: Mapping[str, int], limit_chars: int) -> TranscriptPiece:
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
    """Texts that follow one another are one text: providers cut them where they like."""
    held: list[str] = []
    for piece in pieces:
        if piece.kind is PieceKind.TEXT:
            held.append(piece.text)
            continue
        if held:
            yield TranscriptPiece(kind=PieceKind.TEXT, text="".join(held))
            held.clear()
        yield piece
    if held:
        yield TranscriptPiece(kind=PieceKind.TEXT, text="".join(held))


def _places(before: Turn | None) -> Mapping[str, int]:
    """Of the calls of a turn, by their ids."""
    calls = [] if before is None else [block.id for block in before.blocks if isinstance(block, ToolCallBlock)]
    return {call_id: place for place, call_id in enumerate(calls, start=1)}


def _answered(after: Turn | None) -> frozenset[str]:
    results = () if after is None else after.blocks
    return frozenset(block.tool_call_id for block in results if isinstance(block, ToolResultBlock))


def _name(name: str) -> str:
    """A name that comes from outside, as a word or as JSON."""
    return name if _PLAIN_NAME.fullmatch(name) else write_json(name)
