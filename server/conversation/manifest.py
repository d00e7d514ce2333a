"""Manifests: the blocks of a payload, by hash.

A manifest is stored with every call. It shows operators what was sent without storing it twice, a rebuilt request is
compared with it, and it shows the first block that differs between two requests that should begin alike.

The manifest of a long conversation is long, and that of the next call is nearly the same. So a call stores only what
differs from the manifest of an earlier call of its epoch (`encode_new_manifest`), and `expand_manifest` restores the
whole. For the comparison a separate dynamic message counts as the last block: it is new in most requests.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from server.conversation.assistant import Tool
from server.conversation.block import JsonValue
from server.conversation.payload import Layer, LayerOrder, ManifestEntry, Payload, PayloadMessage, split_static

SIGNED_SUMMARY: Final = "signed_summary"
CONTINUATION: Final = "continuation"
_COMPARED: Final = 16
"""The blocks at the end of a manifest that are compared one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestBase:
    """The call whose manifest that of another one is compared with."""

    turn_seq: int
    attempt: int
    entries: tuple[ManifestEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewManifest:
    """The manifest of a call that is to be stored."""

    entries: tuple[ManifestEntry, ...]
    base: ManifestBase | None
    """None for the first call of an epoch."""


def build_manifest(payload: Payload, *, marks_static: bool = False) -> tuple[ManifestEntry, ...]:
    """List the blocks of a payload. `marks_static`: the static text has cache markers."""
    tools: tuple[ManifestEntry, ...] = ()
    if payload.tools:
        encoded = encode_tools(payload.tools)
        tools = (_entry(encoded, layer=Layer.STATIC, kind="tools", role="system", marked=payload.marks_tools),)
    pieces = _outline_static(payload.static_text)
    # After the last one and the one before it, see `server.caching.policy`.
    marked_from = max(0, len(pieces) - 2) if marks_static else len(pieces)
    static = (*tools, *pieces[:marked_from], *(replace(piece, marked=True) for piece in pieces[marked_from:]))
    joined = payload.joined
    if joined is None:
        return (*static, *list_message_entries(payload.messages, payload.breakpoints))
    end = joined.first + joined.count
    return (
        *static,
        *list_message_entries(payload.messages[: joined.first], payload.breakpoints),
        *joined.entries,
        *list_message_entries(payload.messages[end:], [index - end for index in payload.breakpoints]),
    )


def list_contents(payload: Payload) -> Mapping[str, bytes]:
    """Return the contents of a payload's blocks, by their hashes in the manifest."""
    contents = [encode_tools(payload.tools)] if payload.tools else []
    contents += [piece.encode("utf-8", "surrogatepass") for piece in split_static(payload.static_text)]
    for message in payload.messages:
        contents += [] if message.dynamic is None else [message.dynamic.encode("utf-8", "surrogatepass")]
        contents.append(message.data)
    return {_hash(content): content for content in contents}


def encode_tools(tools: Sequence[Tool]) -> bytes:
    """Encode the tools as one text, keys in the order in which they are sent."""
    listed = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools]
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def encode_manifest(manifest: Sequence[ManifestEntry]) -> tuple[dict[str, JsonValue], ...]:
    """Encode a manifest to be stored. Members with default values are omitted."""
    return tuple(_encode_entry(entry) for entry in manifest)


def decode_manifest(stored: Sequence[Mapping[str, JsonValue]]) -> tuple[ManifestEntry, ...]:
    """The inverse of `encode_manifest`."""
    return tuple(
        ManifestEntry(
            layer=Layer(entry["layer"]),
            kind=entry["kind"],
            role=entry["role"],
            hash=entry["hash"],
            length=entry["length"],
            seq=entry.get("seq"),
            marked=entry.get("marked", False),
        )
        for entry in stored
    )


def encode_new_manifest(manifest: NewManifest) -> Sequence[JsonValue] | Mapping[str, JsonValue]:
    """Encode a manifest to be stored: as a list of its blocks, or as an object with what differs from its base."""
    base = manifest.base
    if base is None:
        return encode_manifest(manifest.entries)
    entries, dynamic_index = _move_dynamic(manifest.entries)
    before, _ = _move_dynamic(base.entries)
    kept = count_shared(before, entries)
    return {
        "turn_seq": base.turn_seq,
        "attempt": base.attempt,
        "kept": kept,
        "entries": [_encode_entry(replace(entry, marked=False)) for entry in entries[kept:]],
        "dynamic_index": dynamic_index,
        "marked": [index for index, entry in enumerate(manifest.entries) if entry.marked],
    }


def find_base(stored: JsonValue) -> tuple[int, int] | None:
    """Return the turn and the attempt whose manifest a stored one is based on; None for a complete one."""
    return (int(stored["turn_seq"]), int(stored["attempt"])) if isinstance(stored, Mapping) else None


def expand_manifest(
    chain: Sequence[JsonValue], base: Sequence[Mapping[str, JsonValue]] = ()
) -> tuple[Mapping[str, JsonValue], ...]:
    """Restore the whole list of the last of these stored manifests. Each is based on the one before it, and the first
    on `base`, which is not used if it is complete.
    """
    entries = _without_markers(base)
    for stored in chain[:-1]:
        _apply(stored, entries)
    last = chain[-1]
    if not isinstance(last, Mapping):
        return tuple(last)
    _apply(last, entries)
    if last["dynamic_index"] is not None:
        entries.insert(last["dynamic_index"], entries.pop())
    for index in last["marked"]:
        entries[index] = {**entries[index], "marked": True}
    return tuple(entries)


def _apply(stored: JsonValue, entries: list[Mapping[str, JsonValue]]) -> None:
    """Change the list of a base, with a separate dynamic message last, to that of a stored manifest."""
    if isinstance(stored, Mapping):
        del entries[stored["kept"] :]
        entries += stored["entries"]
    else:
        entries[:] = _without_markers(stored)


def _without_markers(manifest: Sequence[Mapping[str, JsonValue]]) -> list[Mapping[str, JsonValue]]:
    entries: list[Mapping[str, JsonValue]] = [
        {name: value for name, value in entry.items() if name != "marked"} if "marked" in entry else entry
        for entry in manifest
    ]
    separate = next((index for index, entry in enumerate(entries) if _is_separate_dynamic(entry)), None)
    if separate is not None:
        entries.append(entries.pop(separate))
    return entries


def _is_separate_dynamic(entry: Mapping[str, JsonValue]) -> bool:
    return entry["kind"] == "dynamic" and entry.get("seq") is None


def _move_dynamic(entries: tuple[ManifestEntry, ...]) -> tuple[tuple[ManifestEntry, ...], int | None]:
    """Move a separate dynamic message to the end."""
    separate = find_separate_dynamic(entries)
    if separate is None:
        return entries, None
    index = entries.index(separate)
    return (*entries[:index], *entries[index + 1 :], separate), index


def count_shared(one: Sequence[ManifestEntry], other: Sequence[ManifestEntry], *, by_hash: bool = False) -> int:
    """Count the blocks that both manifests begin with. Cache markers do not count; with `by_hash`, nor does the layer,
    which the trigger of a request changes in the next one.
    """
    length = min(len(one), len(other))
    # Long manifests share most of their objects, and comparing those takes almost no time.
    count = max(0, length - _COMPARED)
    if one[:count] != other[:count]:
        count = 0
    while count < length and _is_same(one[count], other[count], by_hash=by_hash):
        count += 1
    return count


def _is_same(one: ManifestEntry, other: ManifestEntry, *, by_hash: bool) -> bool:
    if one is other:
        return True
    if (one.kind, one.hash) != (other.kind, other.hash):
        return False
    return by_hash or (one.layer, one.role, one.length, one.seq) == (other.layer, other.role, other.length, other.seq)


def find_separate_dynamic(manifest: Sequence[ManifestEntry]) -> ManifestEntry | None:
    """Return the dynamic message that precedes the turns in the layered order. Only a signed summary may precede it."""
    for entry in manifest:
        if entry.kind == "dynamic" and entry.seq is None:
            return entry
        if entry.layer is not Layer.STATIC and entry.kind != SIGNED_SUMMARY:
            break
    return None


def is_content_of(entry: ManifestEntry, data: bytes) -> bool:
    """Return whether a block consists of these bytes."""
    return entry.length == len(data) and entry.hash == _hash(data)


def repeats_all(previous: Sequence[ManifestEntry], current: Sequence[ManifestEntry], order: LayerOrder) -> bool:
    """Return whether a request should begin with the whole previous one. In the layered order it does unless the
    dynamic block is another one.
    """
    if order is LayerOrder.APPEND_ONLY:
        return True
    one, other = find_separate_dynamic(previous), find_separate_dynamic(current)
    return one is not None and other is not None and one.hash == other.hash


def find_prefix_break(
    previous: Sequence[ManifestEntry], current: Sequence[ManifestEntry], order: LayerOrder
) -> dict[str, JsonValue] | None:
    """Return the first block of the previous request that the current one does not repeat, or None.

    All blocks have to be repeated; in the layered order only the tools and the static text if the dynamic block has
    changed. Markers may move. Only for requests with the same order and prefix, because a new epoch changes blocks on
    purpose.
    """
    if not repeats_all(previous, current, order):
        previous = list_static(previous)
    index = count_shared(previous, current, by_hash=True)
    if index == len(previous):
        return None
    expected = previous[index]
    return {
        "kind": "prefix_break",
        "index": index,
        "block": expected.kind,
        "layer": str(expected.layer),
        "role": expected.role,
        "seq": expected.seq,
        "expected_hash": expected.hash,
        "found_hash": current[index].hash if index < len(current) else None,
    }


def list_static(manifest: Sequence[ManifestEntry]) -> Sequence[ManifestEntry]:
    """Return the blocks of the static layer, which come first."""
    end = next((index for index, entry in enumerate(manifest) if entry.layer is not Layer.STATIC), len(manifest))
    return manifest[:end]


def extend_manifest(manifest: Sequence[ManifestEntry], payload: Payload) -> tuple[ManifestEntry, ...]:
    """Return the manifest of a request that continues a paused answer, given that of the paused request."""
    added = (message for message in payload.messages if message.is_continuation)
    return (*manifest, *(_message_entry(message, kind=CONTINUATION, marked=False) for message in added))


def without_continuation(manifest: Sequence[ManifestEntry]) -> tuple[ManifestEntry, ...]:
    """Remove the blocks of a continuation, because the next turn repeats a paused answer as a part of the whole one.

    They are the last ones.
    """
    end = len(manifest)
    while end and manifest[end - 1].kind == CONTINUATION:
        end -= 1
    return tuple(manifest[:end])


def share_signed_summary(one: Sequence[ManifestEntry], other: Sequence[ManifestEntry]) -> bool:
    """Return whether both requests begin with the same signed summary, or neither with any."""
    return _signed_summary_hash(one) == _signed_summary_hash(other)


def _signed_summary_hash(manifest: Sequence[ManifestEntry]) -> str | None:
    """It is the first message."""
    for entry in manifest:
        if entry.kind == SIGNED_SUMMARY:
            return entry.hash
        if entry.kind == "message":
            break
    return None


def list_message_entries(
    messages: Sequence[PayloadMessage], breakpoints: Sequence[int] = ()
) -> Iterator[ManifestEntry]:
    """Yield the blocks of messages. `breakpoints`: the indexes of those that have cache markers."""
    for index, message in enumerate(messages):
        if message.layer is Layer.DYNAMIC:
            yield _message_entry(message, kind="dynamic", marked=index in breakpoints)
            continue
        if message.dynamic is not None:
            dynamic = message.dynamic.encode("utf-8", "surrogatepass")
            yield _entry(dynamic, layer=Layer.DYNAMIC, kind="dynamic", role="user", seq=message.seq)
        kind = SIGNED_SUMMARY if message.is_signed_summary else CONTINUATION if message.is_continuation else "message"
        yield _message_entry(message, kind=kind, marked=index in breakpoints)


@lru_cache(maxsize=64)
def _outline_static(static_text: str) -> tuple[ManifestEntry, ...]:
    """The pieces of a static text, which is the same with each call of an epoch and may be very long."""
    return tuple(
        _entry(piece.encode("utf-8", "surrogatepass"), layer=Layer.STATIC, kind="static", role="system")
        for piece in split_static(static_text)
    )


def _message_entry(message: PayloadMessage, *, kind: str, marked: bool) -> ManifestEntry:
    return _entry(message.data, layer=message.layer, kind=kind, role=message.role, seq=message.seq, marked=marked)


def _entry(
    data: bytes, *, layer: Layer, kind: str, role: str, seq: int | None = None, marked: bool = False
) -> ManifestEntry:
    return ManifestEntry(
        layer=layer,
        kind=kind,
        role=role,
        hash=_hash(data),
        length=len(data),
        seq=seq,
        marked=marked,
    )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _encode_entry(entry: ManifestEntry) -> dict[str, JsonValue]:
    encoded: dict[str, JsonValue] = {
        "layer": str(entry.layer),
        "kind": entry.kind,
        "role": entry.role,
        "hash": entry.hash,
        "length": entry.length,
    }
    if entry.seq is not None:
        encoded["seq"] = entry.seq
    if entry.marked:
        encoded["marked"] = True
    return encoded
