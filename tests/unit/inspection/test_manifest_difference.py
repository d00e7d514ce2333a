"""Two requests side by side."""

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
def test_one_block_more_is_the_first_difference(manifest: list[ManifestEntry], more: ManifestEntry) -> None:
    assert find_difference(manifest, [*manifest, more]) == len(manifest)
    assert find_difference([*manifest, more], manifest) == len(manifest)


@given(sizes=st.lists(st.integers(0, 1000), max_size=8), tokens=st.integers(0, 10_000))
def test_tokens_are_shared_out_to_the_last_one(sizes: list[int], tokens: int) -> None:
    shares = share_tokens(sizes, tokens)

    assert sum(shares) == (tokens if sum(sizes) else 0)
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for share, size in zip(shares, sizes, strict=True) if size == 0)


@given(manifest=manifests, tokens=st.integers(0, 10_000))
def test_the_layers_are_the_whole(manifest: list[ManifestEntry], tokens: int) -> None:
    layers = share_layers(manifest, tokens)

    assert [share.layer for share in layers] == list(Layer)
    assert sum(share.block_count for share in layers) == len(manifest)
    assert sum(share.size_bytes for share in layers) == sum(measure_blocks(manifest))


def test_a_dynamic_block_inside_a_message_counts_once() -> None:
    dynamic = ManifestEntry(layer=Layer.DYNAMIC, kind="dynamic", role="user", hash="a", length=30, seq=1)
    message = ManifestEntry(layer=Layer.TRIGGER, kind="message", role="user", hash="b", length=100, seq=1)
    assert measure_blocks([dynamic, message]) == (30, 70)
