"""The difference between the manifests of two requests."""

from hypothesis import given
from hypothesis import strategies as st

from server.conversation.payload import Layer, ManifestEntry
from server.inspection.manifest_difference import (
    BlockChange,
    compare_manifests,
    find_difference,
    measure_blocks,
    share_layers,
    share_tokens,
    summarize_difference,
)

entries = st.builds(
    ManifestEntry,
    layer=st.sampled_from(Layer),
    kind=st.sampled_from(["static", "message", "dynamic"]),
    role=st.just("user"),
    hash=st.sampled_from("abc"),
    length=st.integers(0, 100),
    seq=st.none() | st.integers(1, 5),
    marked=st.booleans(),
)
manifests = st.lists(entries, max_size=8)


@given(previous=manifests, current=manifests)
def test_both_requests_can_be_read_from_the_difference(
    previous: list[ManifestEntry], current: list[ManifestEntry]
) -> None:
    compared = compare_manifests(previous, current)

    newer = [block.entry for block in compared if block.change is not BlockChange.REMOVED]
    older = [block.entry for block in compared if block.change is not BlockChange.ADDED]
    assert newer == current
    assert [(entry.kind, entry.hash) for entry in older] == [(entry.kind, entry.hash) for entry in previous]


@given(manifest=manifests)
def test_a_request_does_not_differ_from_itself(manifest: list[ManifestEntry]) -> None:
    assert find_difference(manifest, manifest) is None
    assert {block.change for block in compare_manifests(manifest, manifest)} <= {BlockChange.SAME}


@given(manifest=manifests, more=entries)
def test_an_additional_block_is_the_first_difference(manifest: list[ManifestEntry], more: ManifestEntry) -> None:
    assert find_difference(manifest, [*manifest, more]) == len(manifest)
    assert find_difference([*manifest, more], manifest) == len(manifest)


@given(sizes=st.lists(st.integers(0, 1000), max_size=8), tokens=st.integers(0, 10_000))
def test_all_tokens_are_distributed(sizes: list[int], tokens: int) -> None:
    shares = share_tokens(sizes, tokens)

    assert sum(shares) == (tokens if sum(sizes) else 0)
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for share, size in zip(shares, sizes, strict=True) if size == 0)


@given(manifest=manifests, tokens=st.integers(0, 10_000))
def test_the_layers_add_up_to_the_request(manifest: list[ManifestEntry], tokens: int) -> None:
    layers = share_layers(manifest, tokens)

    assert [share.layer for share in layers] == list(Layer)
    assert sum(share.block_count for share in layers) == len(manifest)
    assert sum(share.size_bytes for share in layers) == sum(measure_blocks(manifest))


def test_a_dynamic_block_inside_a_message_counts_once() -> None:
    dynamic = ManifestEntry(layer=Layer.DYNAMIC, kind="dynamic", role="user", hash="a", length=30, seq=1)
    message = ManifestEntry(layer=Layer.TRIGGER, kind="message", role="user", hash="b", length=100, seq=1)
    assert measure_blocks([dynamic, message]) == (30, 70)


def entry(kind: str, digest: str, seq: int | None = None) -> ManifestEntry:
    return ManifestEntry(layer=Layer.BUFFERED, kind=kind, role="user", hash=digest, length=1, seq=seq)


@given(previous=manifests, current=manifests)
def test_every_block_of_both_is_in_one_row(previous: list[ManifestEntry], current: list[ManifestEntry]) -> None:
    rows = summarize_difference(compare_manifests(previous, current))

    counts = {change: sum(row.count for row in rows if row.change is change) for change in BlockChange}
    kept = counts[BlockChange.SAME] + counts[BlockChange.CHANGED]
    assert kept + counts[BlockChange.ADDED] == len(current)
    assert kept + counts[BlockChange.REMOVED] == len(previous)
    for row in rows:
        if row.current is not None:
            assert (current[row.index].kind, current[row.index].hash) == (row.current.kind, row.current.hash)


@given(previous=manifests, current=manifests)
def test_the_break_is_at_the_first_block_that_differs(
    previous: list[ManifestEntry], current: list[ManifestEntry]
) -> None:
    rows = summarize_difference(compare_manifests(previous, current))

    alike = 0
    for one, other in zip(previous, current, strict=False):
        if (one.kind, one.hash) != (other.kind, other.hash):
            break
        alike += 1
    broken = [row for row in rows if row.is_first_break]
    assert len(broken) <= 1
    assert bool(broken) is (alike < len(previous))
    assert all(row.index == alike for row in broken)


def test_a_changed_block_is_shown_next_to_its_old_version_and_the_rest_is_one_line() -> None:
    before = [entry("tools", "t"), entry("static", "s"), entry("dynamic", "10:00"), entry("message", "a", 1)]
    after = [*before[:2], entry("dynamic", "10:05"), before[3], entry("message", "b", 2), entry("message", "c", 3)]

    rows = summarize_difference(compare_manifests(before, after))

    assert [(row.change, row.count, row.index) for row in rows] == [
        (BlockChange.SAME, 2, 0),
        (BlockChange.CHANGED, 1, 2),
        (BlockChange.SAME, 1, 3),
        (BlockChange.ADDED, 1, 4),
        (BlockChange.ADDED, 1, 5),
    ]
    assert (rows[1].previous, rows[1].current, rows[1].is_first_break) == (before[2], after[2], True)
