"""How one request became the next."""

from hypothesis import given

from server.conversation.payload import Layer, ManifestEntry
from server.inspection.manifest_difference import compare_manifests
from server.inspection.request_difference import BlockFate, outline_difference
from tests.unit.inspection.test_manifest_difference import manifests


def entry(kind: str, digest: str, seq: int | None = None) -> ManifestEntry:
    return ManifestEntry(layer=Layer.BUFFERED, kind=kind, role="user", hash=digest, length=1, seq=seq)


@given(previous=manifests, current=manifests)
def test_every_block_of_both_is_in_one_row(previous: list[ManifestEntry], current: list[ManifestEntry]) -> None:
    rows = outline_difference(compare_manifests(previous, current))

    counts = {fate: sum(row.count for row in rows if row.fate is fate) for fate in BlockFate}
    kept = counts[BlockFate.SAME] + counts[BlockFate.CHANGED]
    assert kept + counts[BlockFate.ADDED] == len(current)
    assert kept + counts[BlockFate.REMOVED] == len(previous)
    for row in rows:
        if row.current is not None:
            assert (current[row.place].kind, current[row.place].hash) == (row.current.kind, row.current.hash)


@given(previous=manifests, current=manifests)
def test_the_break_is_where_both_stop_to_be_alike(previous: list[ManifestEntry], current: list[ManifestEntry]) -> None:
    rows = outline_difference(compare_manifests(previous, current))

    alike = 0
    for one, other in zip(previous, current, strict=False):
        if (one.kind, one.hash) != (other.kind, other.hash):
            break
        alike += 1
    broken = [row for row in rows if row.is_first_break]
    assert len(broken) <= 1
    assert bool(broken) is (alike < len(previous))
    assert all(row.place == alike for row in broken)


def test_a_changed_block_stands_beside_what_it_was_and_the_rest_is_one_line() -> None:
    before = [entry("tools", "t"), entry("static", "s"), entry("dynamic", "10:00"), entry("message", "a", 1)]
    after = [*before[:2], entry("dynamic", "10:05"), before[3], entry("message", "b", 2), entry("message", "c", 3)]

    rows = outline_difference(compare_manifests(before, after))

    assert [(row.fate, row.count, row.place) for row in rows] == [
        (BlockFate.SAME, 2, 0),
        (BlockFate.CHANGED, 1, 2),
        (BlockFate.SAME, 1, 3),
        (BlockFate.ADDED, 1, 4),
        (BlockFate.ADDED, 1, 5),
    ]
    assert (rows[1].previous, rows[1].current, rows[1].is_first_break) == (before[2], after[2], True)
