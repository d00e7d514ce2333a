"""The contents of a call on its page, within the size limit: request, difference, response, notes, and the bars."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from server.conversation.block import (
    Block,
    JsonValue,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    block_to_json,
)
from server.conversation.event import ProviderEvent, TextDelta, ThinkingDelta, ToolCallDelta
from server.inspection.calls import CallNote, InspectedCall, RebuiltRequest, SentBlock, TimeSpan
from server.inspection.differences import LinePart, TextDifference, compare_lines, shorten_line
from server.inspection.excerpts import (
    Excerpt,
    HexDump,
    dump_bytes,
    excerpt_document,
    excerpt_json,
    excerpt_text,
    read_json,
)
from server.inspection.manifest_difference import BlockChange, DifferenceRow, LayerShare
from server.web.admin.page_budget import PageBudget, Window, open_window
from server.web.api.call_views import name_event

_DUMP_HEAD: Final = 1536
_DUMP_TAIL: Final = 512
_FRAME_BYTES: Final = 4_000
_FRAME_HEAD: Final = 20
_FRAME_TAIL: Final = 10
_EVENT_BYTES: Final = 300
_EVENT_HEAD: Final = 80
_EVENT_TAIL: Final = 20
_FRAME_START_BYTES: Final = 160
_BLOCK_BYTES: Final = 12_000
_BLOCK_HEAD: Final = 20
_BLOCK_TAIL: Final = 10
_BODY_BYTES: Final = 16_000
_MEMBER_BYTES: Final = 8_000
_MAX_MEMBERS: Final = 40
_ITEM_BYTES: Final = 6_000
_ITEM_HEAD: Final = 4
_ITEM_TAIL: Final = 12
_SHORT_MEMBER_CHARACTERS: Final = 80
_ROW_HEAD: Final = 30
_ROW_TAIL: Final = 20
_MAX_COMPARED_ROWS: Final = 10
"""Rows of the difference whose contents are shown."""
_COMPARED_CHARACTERS: Final = 200_000
_MAX_LINES: Final = 60
_CONTEXT_LINES: Final = 2
_LINE_PART_CHARACTERS: Final = 240
_LINE_BYTES: Final = 1_000
_EXCERPT_BYTES: Final = 1_500
_MAX_NOTES: Final = 20
_NOTE_BYTES: Final = 3_000
_MAX_HEADERS: Final = 40
_HEADER_BYTES: Final = 500
WIDTH: Final = 1000
"""The width of a whole bar, in SVG units."""
_MAX_LAYER_BLOCKS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFrame:
    """A frame of the response."""

    event: str
    size_bytes: int
    start: str
    excerpt: Excerpt


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBlock:
    """A block of the answer."""

    kind: str
    excerpt: Excerpt


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """The response as bytes, frames, events and blocks."""

    dump: HexDump | None
    """None without any bytes."""
    body: Excerpt | None
    """A body that is not a stream, such as an error."""
    frames: Window[ShownFrame]
    events: Window[tuple[str, str]]
    """Names and texts."""
    blocks: Window[ShownBlock]
    stored_blocks: Window[ShownBlock] | None
    """The blocks of the stored turn, if they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMember:
    """A member of the request: a list with its items, or another value."""

    name: str
    items: Window[tuple[str, Excerpt]] | None
    """Roles and contents."""
    excerpt: Excerpt | None

    @property
    def is_large(self) -> bool:
        """Whether it takes more than a line."""
        return self.excerpt is None or self.excerpt.is_cut or len(self.excerpt.text) > _SHORT_MEMBER_CHARACTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row of the difference, with the contents of its blocks if they are known and fit."""

    row: DifferenceRow
    texts: TextDifference | None = None
    excerpt: Excerpt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDifference:
    """The difference from the previous request."""

    rows: Window[ShownRow]
    counts: Mapping[BlockChange, int]
    first_break: DifferenceRow | None


def show_answer(found: InspectedCall, budget: PageBudget) -> ShownAnswer:
    """Show the response. Blocks are fitted first."""
    raw = None if found.call.end is None else found.call.end.raw_response
    folded, turn = found.folded, found.turn
    blocks = _show_blocks(() if folded is None else folded.answer.blocks, budget)
    stored = _show_blocks(turn.blocks, budget) if turn is not None and found.differs_from_turn else None
    body = budget.fit(excerpt_document(raw, limit=_BODY_BYTES), _BODY_BYTES) if raw and folded is None else None
    events = open_window(() if folded is None else folded.events, head=_EVENT_HEAD, tail=_EVENT_TAIL)
    frames = open_window(found.frames, head=_FRAME_HEAD, tail=_FRAME_TAIL)
    return ShownAnswer(
        dump=dump_bytes(raw, head_bytes=_DUMP_HEAD, tail_bytes=_DUMP_TAIL) if raw else None,
        body=body,
        blocks=blocks,
        stored_blocks=stored,
        events=events.map(lambda event: _show_event(event, budget)),
        frames=frames.map(lambda frame: _show_frame(frame, budget)),
    )


def show_request(body: bytes, budget: PageBudget) -> tuple[ShownMember, ...]:
    """Show the members of the request body."""
    value = read_json(body)
    if not isinstance(value, dict):
        excerpt = budget.fit(excerpt_document(body, limit=_MEMBER_BYTES), _MEMBER_BYTES)
        return (ShownMember(name="body", items=None, excerpt=excerpt),)
    return tuple(_show_member(name, item, budget) for name, item in list(value.items())[:_MAX_MEMBERS])


def show_difference(found: InspectedCall, previous: RebuiltRequest | None, budget: PageBudget) -> ShownDifference:
    """Show the difference from the previous request. `previous` is that request, rebuilt."""
    rows = found.difference
    changed = [index for index, row in enumerate(rows) if row.change is not BlockChange.SAME]
    compared = set(changed[:_MAX_COMPARED_ROWS])
    before = {} if previous is None else previous.contents
    shown = [
        _show_row(row, before, found.request.contents, budget) if index in compared else ShownRow(row=row)
        for index, row in enumerate(rows)
    ]
    return ShownDifference(
        rows=open_window(shown, head=_ROW_HEAD, tail=_ROW_TAIL),
        counts={change: sum(row.count for row in rows if row.change is change) for change in BlockChange},
        first_break=next((row for row in rows if row.is_first_break), None),
    )


def show_notes(found: InspectedCall, budget: PageBudget) -> Window[tuple[CallNote, Excerpt]]:
    """Show repairs, template failures and warnings with their details."""

    def show(note: CallNote) -> tuple[CallNote, Excerpt]:
        details = excerpt_json(dict(note.details), limit=_NOTE_BYTES) if note.details else Excerpt(text="")
        return replace(note, kind=budget.fit_line(note.kind, _HEADER_BYTES)), budget.fit(details, _NOTE_BYTES)

    return open_window(found.notes, head=_MAX_NOTES, tail=_MAX_NOTES).map(show)


def show_headers(found: InspectedCall, budget: PageBudget) -> tuple[tuple[str, str], ...]:
    """Show the headers of the response."""
    headers = {} if found.call.end is None else found.call.end.headers
    return tuple(
        (budget.fit_line(name[:_HEADER_BYTES], _HEADER_BYTES), budget.fit_line(value[:_HEADER_BYTES], _HEADER_BYTES))
        for name, value in list(headers.items())[:_MAX_HEADERS]
    )


def show_usage(found: InspectedCall, budget: PageBudget) -> Excerpt | None:
    """Show the usage as the provider reported it."""
    reported = None if found.call.end is None else found.call.end.usage_reported
    return None if reported is None else budget.fit(excerpt_json(dict(reported), limit=_NOTE_BYTES), _NOTE_BYTES)


def _show_blocks(blocks: Sequence[Block], budget: PageBudget) -> Window[ShownBlock]:
    window = open_window(blocks, head=_BLOCK_HEAD, tail=_BLOCK_TAIL)
    return window.map(lambda block: _show_block(block, budget))


def _show_block(block: Block, budget: PageBudget) -> ShownBlock:
    encoded = block_to_json(block)
    match block:
        case TextBlock() | ThinkingBlock():
            excerpt = excerpt_text(block.text, limit=_BLOCK_BYTES)
        case ToolCallBlock():
            arguments = excerpt_json(dict(block.arguments), limit=_BLOCK_BYTES)
            excerpt = replace(arguments, text=f"{block.name} {arguments.text}")
        case ToolResultBlock():
            excerpt = excerpt_json(block.output, limit=_BLOCK_BYTES)
        case _:
            excerpt = excerpt_json(encoded, limit=_BLOCK_BYTES)
    return ShownBlock(kind=str(encoded["type"]), excerpt=budget.fit(excerpt, _BLOCK_BYTES))


def _show_event(event: ProviderEvent, budget: PageBudget) -> tuple[str, str]:
    match event:
        case TextDelta() | ThinkingDelta():
            text = event.text
        case ToolCallDelta():
            text = event.arguments_json
        case _:
            text = json.dumps(asdict(event), ensure_ascii=False)
    return name_event(event), budget.fit_line(text[:_EVENT_BYTES], _EVENT_BYTES)


def _show_frame(frame: tuple[str, bytes], budget: PageBudget) -> ShownFrame:
    name, data = frame
    return ShownFrame(
        event=budget.fit_line(name[:_EVENT_BYTES], _EVENT_BYTES),
        size_bytes=len(data),
        start=budget.fit_line(data[:_FRAME_START_BYTES].decode("utf-8", "replace"), _EVENT_BYTES),
        excerpt=budget.fit(excerpt_document(data, limit=_FRAME_BYTES), _FRAME_BYTES),
    )


def _show_member(name: str, value: JsonValue, budget: PageBudget) -> ShownMember:
    label = budget.fit_line(name[:_EXCERPT_BYTES], _EXCERPT_BYTES)
    if isinstance(value, list):
        window = open_window(value, head=_ITEM_HEAD, tail=_ITEM_TAIL)
        return ShownMember(name=label, items=window.map(lambda item: _show_item(item, budget)), excerpt=None)
    excerpt = budget.fit(excerpt_json(value, limit=_MEMBER_BYTES), _MEMBER_BYTES)
    return ShownMember(name=label, items=None, excerpt=excerpt)


def _show_item(item: JsonValue, budget: PageBudget) -> tuple[str, Excerpt]:
    members = item if isinstance(item, dict) else {}
    role = next((str(members[name]) for name in ("role", "type", "name") if name in members), "")
    return (
        budget.fit_line(role[:_EXCERPT_BYTES], _EXCERPT_BYTES),
        budget.fit(excerpt_json(item, limit=_ITEM_BYTES), _ITEM_BYTES),
    )


def _show_row(
    row: DifferenceRow, previous: Mapping[str, bytes], current: Mapping[str, bytes], budget: PageBudget
) -> ShownRow:
    before = None if row.previous is None else previous.get(row.previous.hash)
    after = None if row.current is None else current.get(row.current.hash)
    if before is not None and after is not None:
        texts = compare_lines(_readable(before), _readable(after), context_lines=_CONTEXT_LINES, max_rows=_MAX_LINES)
        return ShownRow(row=row, texts=_fit_lines(texts, budget))
    content = before if before is not None else after
    if content is None:
        return ShownRow(row=row)
    return ShownRow(row=row, excerpt=budget.fit(excerpt_document(content, limit=_EXCERPT_BYTES), _EXCERPT_BYTES))


def _readable(content: bytes) -> str:
    """Render a block over several lines with its strings in full: the change may be at the end of one."""
    return excerpt_document(content, limit=_COMPARED_CHARACTERS, string_limit=_COMPARED_CHARACTERS).text


def _fit_lines(texts: TextDifference, budget: PageBudget) -> TextDifference:
    def fit(part: LinePart) -> LinePart:
        return replace(part, text=budget.fit_line(part.text, _LINE_BYTES))

    rows = [replace(row, parts=tuple(map(fit, shorten_line(row, _LINE_PART_CHARACTERS)))) for row in texts.rows]
    return replace(texts, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A section of a bar."""

    start: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerColumn:
    """A layer and its blocks."""

    share: LayerShare
    bar: Bar
    percent: float
    blocks: Window[SentBlock]
    first_index: int | None
    """Index of its first block in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBars:
    """Expected and actual cache reads, relative to the whole request."""

    input_tokens: int
    read_width: int
    expected_width: int | None


def draw_layers(found: InspectedCall) -> tuple[LayerColumn, ...]:
    """Draw the four layers as sections of one bar."""
    total = sum(share.size_bytes for share in found.layers)
    columns = []
    for share, bar in zip(found.layers, _divide([share.size_bytes for share in found.layers]), strict=True):
        indexes = [index for index, block in enumerate(found.blocks) if block.entry.layer is share.layer]
        columns.append(
            LayerColumn(
                share=share,
                bar=bar,
                percent=100 * share.size_bytes / total if total else 0.0,
                blocks=open_window([found.blocks[index] for index in indexes], head=_MAX_LAYER_BLOCKS - 1, tail=1),
                first_index=indexes[0] if indexes else None,
            )
        )
    return tuple(columns)


def draw_cache(found: InspectedCall) -> CacheBars | None:
    """Draw the cache reads. None if the provider has reported no tokens."""
    cache, end = found.cache, found.call.end
    if end is None or cache.read_tokens is None:
        return None
    expected = cache.expected_tokens
    whole = max(end.usage.input_tokens, expected or 0)
    return CacheBars(
        input_tokens=end.usage.input_tokens,
        read_width=WIDTH * cache.read_tokens // whole,
        expected_width=None if expected is None else WIDTH * expected // whole,
    )


def draw_times(found: InspectedCall) -> Sequence[tuple[TimeSpan, Bar]]:
    """Draw the time spans as sections of one bar."""
    spans = found.spans
    return list(zip(spans, _divide([round(span.seconds * 1_000_000) for span in spans]), strict=True))


def _divide(sizes: Sequence[int]) -> list[Bar]:
    """Divide a whole bar in proportion to sizes."""
    total, seen, bars = sum(sizes), 0, []
    for size in sizes:
        start = WIDTH * seen // total if total else 0
        seen += size
        bars.append(Bar(start=start, width=(WIDTH * seen // total if total else 0) - start))
    return bars
