"""The numbers of a call as figures: how large its layers are, what came from the cache, where the time went."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from server.inspection.call_view import CallInspection, SentBlock
from server.inspection.manifest_difference import LayerShare
from server.web.admin.page_budget import Window, open_window

WIDTH: Final = 1000
"""Of a bar, in its own units."""
_LAYER_BLOCKS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A piece of a bar."""

    name: str
    start: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerColumn:
    """A layer, and what it is made of."""

    share: LayerShare
    bar: Bar
    percent: float
    blocks: Window[SentBlock]
    first_place: int | None
    """Of its first block in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """A part of the time that a call took."""

    bar: Bar
    words: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBars:
    """What should have come from the cache and what came, against the whole request."""

    input_tokens: int
    read_tokens: int
    expected_tokens: int | None
    read: Bar
    expected: Bar | None


def draw_layers(found: CallInspection) -> tuple[LayerColumn, ...]:
    """The four layers with their shares of one bar."""
    widths = _share([share.size_bytes for share in found.layers])
    total = sum(share.size_bytes for share in found.layers)
    columns = []
    for share, (start, width) in zip(found.layers, widths, strict=True):
        places = [place for place, block in enumerate(found.blocks) if block.entry.layer is share.layer]
        columns.append(
            LayerColumn(
                share=share,
                bar=Bar(name=share.layer, start=start, width=width),
                percent=100 * share.size_bytes / total if total else 0.0,
                blocks=open_window([found.blocks[place] for place in places], head=_LAYER_BLOCKS - 1, tail=1),
                first_place=places[0] if places else None,
            )
        )
    return tuple(columns)


def draw_cache(found: CallInspection) -> CacheBars | None:
    """None where the provider has reported no tokens."""
    end, expected = found.call.end, found.call.start.cache_expected_tokens
    if end is None or not end.usage.input_tokens:
        return None
    usage = end.usage
    whole = max(usage.input_tokens, expected or 0)
    read = Bar(name="read", start=0, width=WIDTH * usage.cache_read_tokens // whole)
    wanted = None if expected is None else Bar(name="expected", start=0, width=WIDTH * expected // whole)
    return CacheBars(
        input_tokens=usage.input_tokens,
        read_tokens=usage.cache_read_tokens,
        expected_tokens=expected,
        read=read,
        expected=wanted,
    )


def draw_times(found: CallInspection) -> tuple[TimeSpan, ...]:
    """From what it waited for to its end; nothing behind the request's start while it runs."""
    spans = [("before", _words_before(found), _seconds_before(found))]
    end, started_at = found.call.end, found.call.start.started_at
    if end is not None:
        first = end.first_byte_at or end.ended_at
        spans.append(("waiting", "the provider thought about it", _between(started_at, first)))
        if end.first_byte_at is not None:
            spans.append(("streaming", "the answer came", _between(end.first_byte_at, end.ended_at)))
    widths = _share([round(seconds * 1_000_000) for _, _, seconds in spans])
    return tuple(
        TimeSpan(bar=Bar(name=name, start=start, width=width), words=words, seconds=seconds)
        for (name, words, seconds), (start, width) in zip(spans, widths, strict=True)
    )


def _words_before(found: CallInspection) -> str:
    return "since the attempt before it ended" if _before(found) else "since the input was stored"


def _seconds_before(found: CallInspection) -> float:
    since = _before(found) or found.asked_at
    return 0.0 if since is None else _between(since, found.call.start.started_at)


def _before(found: CallInspection) -> datetime | None:
    """When the attempt before ended."""
    earlier = [outline for outline in found.attempts if outline.attempt < found.call.start.attempt]
    return earlier[-1].ended_at if earlier else None


def _between(start: datetime, end: datetime) -> float:
    """Never below zero: the two may be of different clocks."""
    return max(0.0, (end - start).total_seconds())


def _share(sizes: list[int]) -> list[tuple[int, int]]:
    """Start and width of each; together they are the whole bar."""
    total, seen, shares = sum(sizes), 0, []
    for size in sizes:
        start = WIDTH * seen // total if total else 0
        seen += size
        shares.append((start, (WIDTH * seen // total if total else 0) - start))
    return shares
