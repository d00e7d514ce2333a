"""What came back from a provider, for a page: as bytes, as frames, as events, as the answer that they mean."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from server.conversation.block import Block, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock, block_to_json
from server.conversation.event import ProviderEvent, TextDelta, ThinkingDelta, ToolCallDelta
from server.inspection.call_view import CallInspection
from server.inspection.hex_dump import Dump, dump_bytes
from server.inspection.json_outline import ReadableText, outline_document, outline_json, outline_text
from server.web.admin.page_budget import PageBudget, Window, open_window
from server.web.api.call_views import name_event

_DUMP_HEAD: Final = 1536
_DUMP_TAIL: Final = 512
_FRAME_BYTES: Final = 4_000
_FRAME_HEAD: Final = 20
_FRAME_TAIL: Final = 10
_EVENT_BYTES: Final = 300
_LINE_BYTES: Final = 160
_EVENT_HEAD: Final = 80
_EVENT_TAIL: Final = 20
_BLOCK_BYTES: Final = 12_000
_BLOCK_HEAD: Final = 20
_BLOCK_TAIL: Final = 10
_BODY_BYTES: Final = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFrame:
    """A frame off the wire."""

    event: str
    size_bytes: int
    line: str
    """How it begins."""
    readable: ReadableText


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEvent:
    """What a part of the stream means, on one line."""

    name: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBlock:
    """A block of an answer."""

    kind: str
    readable: ReadableText


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """All forms of what came back."""

    dump: Dump | None
    """None: there are no bytes."""
    body: ReadableText | None
    """Of a body that is no stream: an error's."""
    frames: Window[ShownFrame]
    events: Window[ShownEvent]
    blocks: Window[ShownBlock]
    stored_blocks: Window[ShownBlock] | None
    """Of the stored turn, where they differ."""


def show_answer(found: CallInspection, budget: PageBudget) -> ShownAnswer:
    """As much of it as there is room for; what it means comes first."""
    raw = None if found.call.end is None else found.call.end.raw_response
    folded, turn = found.folded, found.turn
    blocks = _show_blocks(() if folded is None else folded.answer.blocks, budget)
    stored = _show_blocks(turn.blocks, budget) if turn is not None and found.differs_from_turn else None
    is_error = bool(raw) and folded is None
    body = budget.fit(outline_document(raw, limit=_BODY_BYTES), _BODY_BYTES) if raw and is_error else None
    frames = open_window(found.frames, head=_FRAME_HEAD, tail=_FRAME_TAIL)
    events = open_window(() if folded is None else folded.events, head=_EVENT_HEAD, tail=_EVENT_TAIL)
    return ShownAnswer(
        dump=dump_bytes(raw, head_bytes=_DUMP_HEAD, tail_bytes=_DUMP_TAIL) if raw else None,
        body=body,
        blocks=blocks,
        stored_blocks=stored,
        events=events.map(lambda event: _show_event(event, budget)),
        frames=frames.map(lambda frame: _show_frame(frame, budget)),
    )


def _show_blocks(blocks: Sequence[Block], budget: PageBudget) -> Window[ShownBlock]:
    window = open_window(blocks, head=_BLOCK_HEAD, tail=_BLOCK_TAIL)
    return window.map(lambda block: _show_block(block, budget))


def _show_block(block: Block, budget: PageBudget) -> ShownBlock:
    written = block_to_json(block)
    match block:
        case TextBlock() | ThinkingBlock():
            readable = outline_text(block.text, limit=_BLOCK_BYTES)
        case ToolCallBlock():
            arguments = outline_json(dict(block.arguments), limit=_BLOCK_BYTES)
            readable = ReadableText(text=f"{block.name} {arguments.text}", is_cut=arguments.is_cut)
        case ToolResultBlock():
            readable = outline_json(block.output, limit=_BLOCK_BYTES)
        case _:
            readable = outline_json(written, limit=_BLOCK_BYTES)
    return ShownBlock(kind=str(written["type"]), readable=budget.fit(readable, _BLOCK_BYTES))


def _show_event(event: ProviderEvent, budget: PageBudget) -> ShownEvent:
    match event:
        case TextDelta() | ThinkingDelta():
            words = event.text
        case ToolCallDelta():
            words = event.arguments_json
        case _:
            words = json.dumps(asdict(event), ensure_ascii=False)
    return ShownEvent(name=name_event(event), words=budget.fit_line(words[:_EVENT_BYTES], _EVENT_BYTES))


def _show_frame(frame: tuple[str, bytes], budget: PageBudget) -> ShownFrame:
    name, data = frame
    begins = data[:_LINE_BYTES].decode("utf-8", "replace")
    return ShownFrame(
        event=budget.fit_line(name[:_EVENT_BYTES], _EVENT_BYTES),
        size_bytes=len(data),
        line=budget.fit_line(begins, _EVENT_BYTES),
        readable=budget.fit(outline_document(data, limit=_FRAME_BYTES), _FRAME_BYTES),
    )
