"""Two requests side by side, block by block: what stayed, what came, what went."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

from server.conversation.payload import Layer, ManifestEntry


class BlockChange(StrEnum):
    """What became of a block from one request to the next."""

    SAME = "same"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBlock:
    """A block of either request; of both where it is the same."""

    change: BlockChange
    entry: ManifestEntry
    """The newer one's, unless it was removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """How much of a request a layer is."""

    layer: Layer
    block_count: int
    size_bytes: int
    token_count: int
    """The request's tokens, shared out by bytes."""


def compare_manifests(previous: Sequence[ManifestEntry], current: Sequence[ManifestEntry]) -> tuple[ComparedBlock, ...]:
    """All blocks of both, in their order; what was removed stands where it was. Cache markers do not count.

    What both begin with is the same, whatever else would be alike: a cache goes by that.
    """
    alike = find_difference(previous, current)
    compared = _changed(BlockChange.SAME, current[:alike])
    previous, current = previous[len(compared) :], current[len(compared) :]
    one, other = [_identity(entry) for entry in previous], [_identity(entry) for entry in current]
    for kind, first, last, start, end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind != "equal":
            compared += _changed(BlockChange.REMOVED, previous[first:last])
            compared += _changed(BlockChange.ADDED, current[start:end])
        else:
            compared += _changed(BlockChange.SAME, current[start:end])
    return tuple(compared)


def find_difference(expected: Sequence[ManifestEntry], found: Sequence[ManifestEntry]) -> int | None:
    """The place of the first block that differs; None where none does."""
    for place in range(max(len(expected), len(found))):
        pair = [blocks[place] if place < len(blocks) else None for blocks in (expected, found)]
        if pair[0] is None or pair[1] is None or _identity(pair[0]) != _identity(pair[1]):
            return place
    return None


def measure_blocks(manifest: Sequence[ManifestEntry]) -> tuple[int, ...]:
    """The bytes of each block. A dynamic block inside a message is among the message's bytes, and is taken out."""
    sizes = [entry.length for entry in manifest]
    for place, entry in enumerate(manifest[:-1]):
        if entry.kind == "dynamic" and entry.seq is not None:
            sizes[place + 1] = max(0, sizes[place + 1] - entry.length)
    return tuple(sizes)


def share_tokens(sizes: Sequence[int], token_count: int) -> tuple[int, ...]:
    """So many tokens shared out by bytes, to the last one."""
    total, given, seen = sum(sizes), 0, 0
    shares = []
    for size in sizes:
        seen += size
        reached = token_count * seen // total if total else 0
        shares.append(reached - given)
        given = reached
    return tuple(shares)


def share_layers(manifest: Sequence[ManifestEntry], token_count: int) -> tuple[LayerShare, ...]:
    """The four layers of a request, also those that are empty."""
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


def _identity(entry: ManifestEntry) -> tuple[str, str]:
    return entry.kind, entry.hash


def _changed(change: BlockChange, entries: Sequence[ManifestEntry]) -> list[ComparedBlock]:
    return [ComparedBlock(change=change, entry=entry) for entry in entries]
