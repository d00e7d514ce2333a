"""The bars on the page of a call: layers, cache and times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.inspection.calls import InspectedCall, SentBlock, TimeSpan
from server.inspection.manifest_difference import LayerShare
from server.web.admin.page_budget import Window, open_window

WIDTH: Final = 1000
"""The width of a whole bar, in SVG units."""
_MAX_LAYER_BLOCKS: Final = 5


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
