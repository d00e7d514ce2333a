"""How one request became the next, for reading: what stayed is one line, what changed is set beside what it was."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from server.conversation.payload import ManifestEntry
from server.inspection.manifest_difference import BlockChange, ComparedBlock


class BlockFate(StrEnum):
    """What became of blocks."""

    SAME = "same"
    CHANGED = "changed"
    """Another of the same kind stands in its place."""
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceRow:
    """A run of blocks that are the same, or one block that is not."""

    fate: BlockFate
    count: int = 1
    place: int
    """Of the first of them in the newer request; of one that was removed, where it would stand."""
    previous: ManifestEntry | None = None
    current: ManifestEntry | None = None
    is_first_break: bool = False
    """Up to here the newer request begins like the older one. What stands behind it is read anew by the provider."""


def outline_difference(compared: Sequence[ComparedBlock]) -> tuple[DifferenceRow, ...]:
    """The rows in the order of the newer request. None of them is the break where it only goes on at the end."""
    rows = list(_walk(compared))
    first = next((place for place, row in enumerate(rows) if row.fate is not BlockFate.SAME), None)
    if first is not None and any(row.fate is not BlockFate.ADDED for row in rows[first:]):
        rows[first] = replace(rows[first], is_first_break=True)
    return tuple(rows)


def _walk(compared: Sequence[ComparedBlock]) -> Iterator[DifferenceRow]:
    place, at = 0, 0
    while at < len(compared):
        end = at
        is_same = compared[at].change is BlockChange.SAME
        while end < len(compared) and (compared[end].change is BlockChange.SAME) is is_same:
            end += 1
        run = compared[at:end]
        if is_same:
            yield DifferenceRow(fate=BlockFate.SAME, count=len(run), place=place, current=run[0].entry)
        else:
            yield from _pair(run, place)
        place += sum(block.change is not BlockChange.REMOVED for block in run)
        at = end


def _pair(run: Sequence[ComparedBlock], place: int) -> Iterator[DifferenceRow]:
    """What went and what came in one place: each that came takes the first of its kind that went."""
    gone = [block.entry for block in run if block.change is BlockChange.REMOVED]
    for block in run:
        if block.change is BlockChange.REMOVED:
            continue
        kin = next((entry for entry in gone if _kind(entry) == _kind(block.entry)), None)
        if kin is None:
            yield DifferenceRow(fate=BlockFate.ADDED, place=place, current=block.entry)
        else:
            before = gone[: gone.index(kin)]
            yield from (DifferenceRow(fate=BlockFate.REMOVED, place=place, previous=entry) for entry in before)
            gone = gone[len(before) + 1 :]
            yield DifferenceRow(fate=BlockFate.CHANGED, place=place, previous=kin, current=block.entry)
        place += 1
    yield from (DifferenceRow(fate=BlockFate.REMOVED, place=place, previous=entry) for entry in gone)


def _kind(entry: ManifestEntry) -> tuple[str, str, int | None]:
    """A message stands for its turn; one that a repair put in, for any such."""
    return entry.kind, entry.role, entry.seq if entry.kind == "message" else None
