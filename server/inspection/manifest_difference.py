"""The difference between the manifests of two requests, and the size of each block and layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import groupby

from server.conversation.payload import Layer, ManifestEntry
from server.inspection.differences import count_common_prefix


class BlockChange(StrEnum):
    """How a block changed from one request to the next."""

    SAME = "same"
    CHANGED = "changed"
    """Replaced by another block of the same kind. Only in `DifferenceRow`."""
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBlock:
    """One block of either request."""

    change: BlockChange
    entry: ManifestEntry
    """The newer request's entry, unless the block was removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceRow:
    """A run of equal blocks, or one block that differs."""

    change: BlockChange
    count: int = 1
    index: int
    """Index of the first block in the newer request. For a removed block: the index at which it would be."""
    previous: ManifestEntry | None = None
    current: ManifestEntry | None = None
    is_first_break: bool = False
    """The requests begin alike up to here. The provider cannot read what follows from its cache."""

    @property
    def entry(self) -> ManifestEntry | None:
        """The newer request's entry, unless the block was removed."""
        return self.current or self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """The size of one layer of a request."""

    layer: Layer
    block_count: int
    size_bytes: int
    token_count: int
    """The layer's share of the request's tokens, in proportion to bytes."""


def compare_manifests(previous: Sequence[ManifestEntry], current: Sequence[ManifestEntry]) -> tuple[ComparedBlock, ...]:
    """List the blocks of both requests in order. Cache markers are not compared.

    The common prefix is always reported as the same, because a cache matches prefixes.
    """
    prefix = count_common_prefix(_identities(previous), _identities(current))
    compared = _mark(BlockChange.SAME, current[:prefix])
    previous, current = previous[prefix:], current[prefix:]
    matcher = SequenceMatcher(None, _identities(previous), _identities(current), autojunk=False)
    for kind, first, last, start, end in matcher.get_opcodes():
        if kind == "equal":
            compared += _mark(BlockChange.SAME, current[start:end])
        else:
            compared += _mark(BlockChange.REMOVED, previous[first:last])
            compared += _mark(BlockChange.ADDED, current[start:end])
    return tuple(compared)


def find_difference(expected: Sequence[ManifestEntry], found: Sequence[ManifestEntry]) -> int | None:
    """Return the index of the first block that differs, or None if all are equal."""
    prefix = count_common_prefix(_identities(expected), _identities(found))
    return None if prefix == len(expected) == len(found) else prefix


def summarize_difference(compared: Sequence[ComparedBlock]) -> tuple[DifferenceRow, ...]:
    """Collapse runs of equal blocks and pair removed blocks with the added ones that replaced them.

    No row is the first break if the newer request only appends blocks.
    """
    rows = list(_list_rows(compared))
    first = next((place for place, row in enumerate(rows) if row.change is not BlockChange.SAME), None)
    if first is not None and any(row.change is not BlockChange.ADDED for row in rows[first:]):
        rows[first] = replace(rows[first], is_first_break=True)
    return tuple(rows)


def measure_blocks(manifest: Sequence[ManifestEntry]) -> tuple[int, ...]:
    """Return the bytes of each block. A dynamic block inside a message is not counted again as part of it."""
    sizes = [entry.length for entry in manifest]
    for index, entry in enumerate(manifest[:-1]):
        if entry.kind == "dynamic" and entry.seq is not None:
            sizes[index + 1] = max(0, sizes[index + 1] - entry.length)
    return tuple(sizes)


def share_tokens(sizes: Sequence[int], token_count: int) -> tuple[int, ...]:
    """Divide tokens in proportion to bytes. The shares add up to `token_count`, unless all sizes are zero."""
    total, given, seen = sum(sizes), 0, 0
    shares = []
    for size in sizes:
        seen += size
        reached = token_count * seen // total if total else 0
        shares.append(reached - given)
        given = reached
    return tuple(shares)


def share_layers(manifest: Sequence[ManifestEntry], token_count: int) -> tuple[LayerShare, ...]:
    """Measure the four layers of a request, including empty ones."""
    sizes = measure_blocks(manifest)
    tokens = share_tokens(sizes, token_count)
    return tuple(
        LayerShare(
            layer=layer,
            block_count=sum(entry.layer is layer for entry in manifest),
            size_bytes=sum(size for entry, size in zip(manifest, sizes, strict=True) if entry.layer is layer),
            token_count=sum(count for entry, count in zip(manifest, tokens, strict=True) if entry.layer is layer),
        )
        for layer in Layer
    )


def _identities(entries: Sequence[ManifestEntry]) -> list[tuple[str, str]]:
    return [(entry.kind, entry.hash) for entry in entries]


def _mark(change: BlockChange, entries: Sequence[ManifestEntry]) -> list[ComparedBlock]:
    return [ComparedBlock(change=change, entry=entry) for entry in entries]


def _list_rows(compared: Sequence[ComparedBlock]) -> Iterator[DifferenceRow]:
    index = 0
    for is_same, blocks in groupby(compared, key=lambda block: block.change is BlockChange.SAME):
        run = list(blocks)
        if is_same:
            yield DifferenceRow(change=BlockChange.SAME, count=len(run), index=index, current=run[0].entry)
        else:
            yield from _pair(run, index)
        index += sum(block.change is not BlockChange.REMOVED for block in run)


def _pair(run: Sequence[ComparedBlock], index: int) -> Iterator[DifferenceRow]:
    """Pair each added block with the first removed block of the same kind."""
    removed = [block.entry for block in run if block.change is BlockChange.REMOVED]
    for block in run:
        if block.change is BlockChange.REMOVED:
            continue
        replaced = next((entry for entry in removed if _kind(entry) == _kind(block.entry)), None)
        if replaced is None:
            yield DifferenceRow(change=BlockChange.ADDED, index=index, current=block.entry)
        else:
            before = removed[: removed.index(replaced)]
            yield from (DifferenceRow(change=BlockChange.REMOVED, index=index, previous=entry) for entry in before)
            removed = removed[len(before) + 1 :]
            yield DifferenceRow(change=BlockChange.CHANGED, index=index, previous=replaced, current=block.entry)
        index += 1
    yield from (DifferenceRow(change=BlockChange.REMOVED, index=index, previous=entry) for entry in removed)


def _kind(entry: ManifestEntry) -> tuple[str, str, int | None]:
    """Messages pair only if they belong to the same turn; messages that a repair inserted have no turn."""
    return entry.kind, entry.role, entry.seq if entry.kind == "message" else None
