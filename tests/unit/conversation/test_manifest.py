"""A manifest lists what was sent, and two manifests show where requests diverge."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.assistant import Tool
from server.conversation.manifest import (
    ManifestBase,
    NewManifest,
    build_manifest,
    decode_manifest,
    encode_manifest,
    encode_new_manifest,
    encode_tools,
    expand_manifest,
    find_base,
    find_prefix_break,
    list_contents,
    share_signed_summary,
)
from server.conversation.payload import Layer, LayerOrder, ManifestEntry, Payload, PayloadMessage

TOOL = Tool(name="f", description="Does.", parameters={"type": "object", "properties": {"z": {}, "a": {}}})
MESSAGES = (
    PayloadMessage(layer=Layer.BUFFERED, data=b"one", role="user", seq=1, dynamic='{"todos":[]}'),
    PayloadMessage(layer=Layer.BUFFERED, data=b"two", role="model", seq=2),
    PayloadMessage(layer=Layer.TRIGGER, data=b"three", role="tool", seq=3),
)
PAYLOAD = Payload(model="m", static_text="You help.", tools=(TOOL,), messages=MESSAGES, breakpoints=(1, 2))


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def test_the_blocks_are_in_the_order_of_the_provider() -> None:
    manifest = build_manifest(PAYLOAD, marks_static=True)
    assert [(entry.kind, entry.layer, entry.role, entry.seq, entry.marked) for entry in manifest] == [
        ("tools", Layer.STATIC, "system", None, False),
        ("static", Layer.STATIC, "system", None, True),
        ("dynamic", Layer.DYNAMIC, "user", 1, False),
        ("message", Layer.BUFFERED, "user", 1, False),
        ("message", Layer.BUFFERED, "model", 2, True),
        ("message", Layer.TRIGGER, "tool", 3, True),
    ]
    assert [entry.hash for entry in manifest[1:4]] == [hash_of(b"You help."), hash_of(b'{"todos":[]}'), hash_of(b"one")]
    assert [entry.length for entry in manifest[1:4]] == [9, 12, 3]


@pytest.mark.parametrize("static_text", ["You help.", "", f"{'x' * 17_000}\nAnd more."])
def test_the_content_of_every_block_is_found_by_its_hash(static_text: str) -> None:
    own = PayloadMessage(layer=Layer.DYNAMIC, data=b"now", role="user")
    payload = replace(PAYLOAD, static_text=static_text, messages=(own, *MESSAGES))
    contents = list_contents(payload)
    assert [len(contents[entry.hash]) for entry in build_manifest(payload)] == [
        entry.length for entry in build_manifest(payload)
    ]


def test_a_separate_dynamic_message_is_one_block() -> None:
    dynamic = PayloadMessage(layer=Layer.DYNAMIC, data=b"now", role="user")
    manifest = build_manifest(replace(PAYLOAD, static_text="", tools=(), messages=(dynamic,), breakpoints=()))
    assert manifest == (
        ManifestEntry(layer=Layer.DYNAMIC, kind="dynamic", role="user", hash=hash_of(b"now"), length=3),
    )


def test_tools_are_hashed_with_their_keys_in_order() -> None:
    other = replace(TOOL, parameters={"type": "object", "properties": {"a": {}, "z": {}}})
    assert encode_tools([TOOL]) != encode_tools([other])


def test_a_stored_manifest_is_compact_and_comes_back() -> None:
    manifest = build_manifest(PAYLOAD)
    stored = encode_manifest(manifest)
    assert set(stored[0]) == {"layer", "kind", "role", "hash", "length"}
    assert stored[-1]["marked"] is True
    assert decode_manifest(json.loads(json.dumps(stored))) == manifest


ENTRIES = st.lists(
    st.builds(
        ManifestEntry,
        layer=st.sampled_from(Layer),
        kind=st.sampled_from(["tools", "static", "dynamic", "message"]),
        role=st.sampled_from(["system", "user", "model", "tool"]),
        hash=st.sampled_from("ab"),
        length=st.integers(0, 9),
        seq=st.none() | st.integers(1, 9),
        marked=st.booleans(),
    ),
    max_size=6,
)


@given(ENTRIES)
def test_any_manifest_comes_back(manifest: list[ManifestEntry]) -> None:
    assert list(decode_manifest(encode_manifest(manifest))) == manifest


@given(ENTRIES, ENTRIES)
def test_a_request_that_continues_another_does_not_break_it(
    early: list[ManifestEntry], more: list[ManifestEntry]
) -> None:
    moved = [replace(entry, marked=not entry.marked) for entry in early]
    assert find_prefix_break(early, [*moved, *more], LayerOrder.APPEND_ONLY) is None


@given(ENTRIES, ENTRIES)
def test_a_break_is_the_first_block_that_differs(early: list[ManifestEntry], late: list[ManifestEntry]) -> None:
    broken = find_prefix_break(early, late, LayerOrder.APPEND_ONLY)
    same = [(one.kind, one.hash) == (two.kind, two.hash) for one, two in zip(early, late, strict=False)]
    first = same.index(False) if False in same else len(same)
    assert (broken is None) == (first == len(early))
    if broken is not None:
        assert (broken["kind"], broken["index"], broken["block"]) == ("prefix_break", first, early[first].kind)


@pytest.mark.parametrize(("order", "index"), [(LayerOrder.LAYERED, None), (LayerOrder.APPEND_ONLY, 4)])
def test_messages_may_change_only_in_the_layered_order(order: LayerOrder, index: int | None) -> None:
    changed = replace(PAYLOAD, messages=(MESSAGES[0], replace(MESSAGES[1], data=b"too"), MESSAGES[2]))
    broken = find_prefix_break(build_manifest(PAYLOAD), build_manifest(changed), order)
    assert (None if broken is None else broken["index"]) == index


@pytest.mark.parametrize("order", LayerOrder)
def test_another_static_text_is_a_break_in_every_order(order: LayerOrder) -> None:
    changed = replace(PAYLOAD, static_text="You harm.")
    assert find_prefix_break(build_manifest(PAYLOAD), build_manifest(changed), order) == {
        "kind": "prefix_break",
        "index": 1,
        "block": "static",
        "layer": "static",
        "role": "system",
        "seq": None,
        "expected_hash": hash_of(b"You help."),
        "found_hash": hash_of(b"You harm."),
    }
    assert find_prefix_break(build_manifest(PAYLOAD), (), order) is not None


def test_a_signed_summary_is_a_separate_block() -> None:
    signed_summary = PayloadMessage(layer=Layer.BUFFERED, data=b"signed", role="model", is_signed_summary=True)
    manifest = build_manifest(replace(PAYLOAD, messages=(signed_summary, *MESSAGES), breakpoints=()))
    other = build_manifest(
        replace(PAYLOAD, messages=(replace(signed_summary, data=b"else"), *MESSAGES), breakpoints=())
    )
    assert (manifest[2].kind, manifest[2].layer, manifest[2].role) == ("signed_summary", Layer.BUFFERED, "model")
    assert share_signed_summary(manifest, manifest[:-1])
    assert not share_signed_summary(manifest, other)
    assert not share_signed_summary(manifest, build_manifest(PAYLOAD))
    assert share_signed_summary(build_manifest(PAYLOAD), ())
    broken = find_prefix_break(manifest, other, LayerOrder.APPEND_ONLY)
    assert broken is not None
    assert (broken["index"], broken["block"]) == (2, "signed_summary")


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[ManifestEntry, ...]]:
    """The manifests of successive requests: each repeats some blocks of the one before."""
    hashes = st.sampled_from(["a", "b", "c"])
    static = st.builds(
        ManifestEntry,
        layer=st.just(Layer.STATIC),
        kind=st.just("static"),
        role=st.just("system"),
        hash=hashes,
        length=st.integers(0, 3),
        marked=st.booleans(),
    )
    own = st.builds(
        ManifestEntry,
        layer=st.just(Layer.DYNAMIC),
        kind=st.just("dynamic"),
        role=st.just("user"),
        hash=hashes,
        length=st.integers(0, 3),
    )
    message = st.builds(
        ManifestEntry,
        layer=st.sampled_from([Layer.BUFFERED, Layer.TRIGGER]),
        kind=st.just("message"),
        role=st.sampled_from(["user", "model"]),
        hash=hashes,
        length=st.integers(0, 3),
        seq=st.integers(1, 5),
        marked=st.booleans(),
    )
    manifests: list[tuple[ManifestEntry, ...]] = []
    messages: list[ManifestEntry] = []
    fixed = draw(st.lists(static, max_size=3))
    for _ in range(draw(st.integers(1, 6))):
        messages = [*messages[: draw(st.integers(0, len(messages)))], *draw(st.lists(message, max_size=25))]
        manifests.append((*fixed, *draw(st.lists(own, max_size=1)), *messages))
    return manifests


@given(chains())
def test_manifests_stored_by_their_differences_are_restored(
    manifests: list[tuple[ManifestEntry, ...]],
) -> None:
    base: ManifestBase | None = None
    chain: list[Any] = []
    restored: tuple[Mapping[str, object], ...] = ()
    for number, entries in enumerate(manifests, start=1):
        stored = json.loads(json.dumps(encode_new_manifest(NewManifest(entries=entries, base=base))))
        assert find_base(stored) == (None if base is None else (number - 1, 1))
        restored = expand_manifest([stored], restored)
        assert decode_manifest(restored) == entries
        chain.append(stored)
        assert expand_manifest(chain) == restored
        base = ManifestBase(turn_seq=number, attempt=1, entries=entries)


def test_a_manifest_stores_only_what_is_new() -> None:
    messages = tuple(
        PayloadMessage(layer=Layer.BUFFERED, data=b"%d" % seq, role="user", seq=seq) for seq in range(1, 500)
    )
    now = PayloadMessage(layer=Layer.DYNAMIC, data=b"now", role="user")
    later = replace(now, data=b"later")
    first = build_manifest(replace(PAYLOAD, messages=(now, *messages), breakpoints=()))
    added = PayloadMessage(layer=Layer.TRIGGER, data=b"new", role="user", seq=500)
    second = build_manifest(replace(PAYLOAD, messages=(later, *messages, added), breakpoints=(500,)))
    base = ManifestBase(turn_seq=2, attempt=1, entries=first)
    stored = encode_new_manifest(NewManifest(entries=second, base=base))
    assert isinstance(stored, dict)
    assert [entry["hash"] for entry in stored["entries"]] == [hash_of(b"new"), hash_of(b"later")]
    assert decode_manifest(expand_manifest([stored], encode_manifest(first))) == second
