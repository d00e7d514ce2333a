"""What was sent to a provider, for a page: member by member, and against the request before it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.payload import ManifestEntry
from server.inspection.call_view import CallInspection, RebuiltRequest
from server.inspection.json_outline import ReadableText, outline_document, outline_json, read_json
from server.inspection.manifest_difference import BlockChange, DifferenceRow, summarize_difference
from server.inspection.text_difference import LinePart, TextDifference, compare_lines, shorten_line
from server.web.admin.page_budget import PageBudget, Window, open_window

_MEMBER_BYTES: Final = 8_000
_MEMBERS: Final = 40
_ITEM_BYTES: Final = 6_000
_ITEM_HEAD: Final = 4
_ITEM_TAIL: Final = 12
_ROW_HEAD: Final = 30
_ROW_TAIL: Final = 20
_TEXTS: Final = 10
"""Of so many blocks that are not the same it is shown what they say."""
_COMPARED_CHARACTERS: Final = 200_000
_SHOWN_LINES: Final = 60
_CONTEXT_LINES: Final = 2
_PIECE_CHARACTERS: Final = 240
_EXCERPT_BYTES: Final = 1_500
_LINE_BYTES: Final = 1_000
_LINE_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownItem:
    """One of a list, such as a message."""

    role: str
    readable: ReadableText


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMember:
    """A member of the request: a list item by item, anything else as it is."""

    name: str
    items: Window[ShownItem] | None
    readable: ReadableText | None

    @property
    def is_large(self) -> bool:
        """Whether it takes more than a line."""
        return self.readable is None or self.readable.is_cut or len(self.readable.text) > _LINE_CHARACTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row of the difference with what its blocks say, where that is known and there is room for it."""

    row: DifferenceRow
    texts: TextDifference | None = None
    excerpt: ReadableText | None = None

    @property
    def entry(self) -> ManifestEntry | None:
        """The block to be named: the newer one, unless it was removed."""
        return self.row.current or self.row.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDifference:
    """How the request before became this one."""

    rows: Window[ShownRow]
    counts: Mapping[BlockChange, int]
    """Blocks by what became of them."""
    first_break: DifferenceRow | None


def show_request(body: bytes, budget: PageBudget) -> tuple[ShownMember, ...]:
    """The members of the request; long ones in part."""
    value = read_json(body)
    if not isinstance(value, dict):
        readable = budget.fit(outline_document(body, limit=_MEMBER_BYTES), _MEMBER_BYTES)
        return (ShownMember(name="body", items=None, readable=readable),)
    members = list(value.items())[:_MEMBERS]
    return tuple(_show_member(name, item, budget) for name, item in members)


def show_difference(found: CallInspection, previous: RebuiltRequest | None, budget: PageBudget) -> ShownDifference:
    """The difference to the call before. `previous` is its request, made again."""
    rows = summarize_difference(found.difference)
    named = {place: row for place, row in enumerate(rows) if row.change is not BlockChange.SAME}
    told = dict(list(named.items())[:_TEXTS])
    before = {} if previous is None else previous.contents
    shown = [
        _show_row(row, before, found.request.contents, budget) if place in told else ShownRow(row=row)
        for place, row in enumerate(rows)
    ]
    return ShownDifference(
        rows=open_window(shown, head=_ROW_HEAD, tail=_ROW_TAIL),
        counts={change: sum(row.count for row in rows if row.change is change) for change in BlockChange},
        first_break=next((row for row in rows if row.is_first_break), None),
    )


def _show_member(name: str, value: JsonValue, budget: PageBudget) -> ShownMember:
    label = budget.fit_line(name[:_EXCERPT_BYTES], _EXCERPT_BYTES)
    if isinstance(value, list):
        window = open_window(value, head=_ITEM_HEAD, tail=_ITEM_TAIL)
        return ShownMember(name=label, items=window.map(lambda item: _show_item(item, budget)), readable=None)
    return ShownMember(
        name=label, items=None, readable=budget.fit(outline_json(value, limit=_MEMBER_BYTES), _MEMBER_BYTES)
    )


def _show_item(item: JsonValue, budget: PageBudget) -> ShownItem:
    role = next((str(item[name]) for name in ("role", "type", "name") if name in item), "") if _is_object(item) else ""
    return ShownItem(
        role=budget.fit_line(role[:_EXCERPT_BYTES], _EXCERPT_BYTES),
        readable=budget.fit(outline_json(item, limit=_ITEM_BYTES), _ITEM_BYTES),
    )


def _is_object(item: JsonValue) -> bool:
    return isinstance(item, dict)


def _show_row(
    row: DifferenceRow, previous: Mapping[str, bytes], current: Mapping[str, bytes], budget: PageBudget
) -> ShownRow:
    before = None if row.previous is None else previous.get(row.previous.hash)
    after = None if row.current is None else current.get(row.current.hash)
    if before is not None and after is not None:
        found = compare_lines(_readable(before), _readable(after), context_lines=_CONTEXT_LINES, max_rows=_SHOWN_LINES)
        return ShownRow(row=row, texts=_fit_lines(found, budget))
    content = before if before is not None else after
    if content is None:
        return ShownRow(row=row)
    excerpt = budget.fit(outline_document(content, limit=_EXCERPT_BYTES), _EXCERPT_BYTES)
    return ShownRow(row=row, excerpt=excerpt)


def _readable(content: bytes) -> str:
    """Over several lines, with its strings whole: what changed may stand at the end of one."""
    return outline_document(content, limit=_COMPARED_CHARACTERS, string_limit=_COMPARED_CHARACTERS).text


def _fit_lines(found: TextDifference, budget: PageBudget) -> TextDifference:
    def fit(part: LinePart) -> LinePart:
        return replace(part, text=budget.fit_line(part.text, _LINE_BYTES))

    rows = [replace(row, parts=tuple(map(fit, shorten_line(row, _PIECE_CHARACTERS)))) for row in found.rows]
    return replace(found, rows=tuple(rows))
