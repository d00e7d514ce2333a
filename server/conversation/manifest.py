"""Manifests: the blocks of a payload, by hash.

A manifest is stored with every call. It shows operators what was sent without storing it twice, a rebuilt request is
compared with it, and it shows the first block that differs between two requests that should begin alike.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from server.conversation.assistant import Tool
from server.conversation.block import JsonValue
from server.conversation.payload import Layer, LayerOrder, ManifestEntry, Payload, PayloadMessage, split_static

SIGNED_SUMMARY: Final = "signed_summary"
CONTINUATION: Final = "continuation"


def build_manifest(payload: Payload, *, marks_static: bool = False) -> tuple[ManifestEntry, ...]:
    """List the blocks of a payload. `marks_static`: the static text has cache markers."""
    return tuple(_entries(payload, marks_static=marks_static))


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


def find_prefix_break(
    previous: Sequence[ManifestEntry], current: Sequence[ManifestEntry], order: LayerOrder
) -> dict[str, JsonValue] | None:
    """Return the first block of the previous request that the current one does not repeat, or None.

    In the append-only order all blocks have to be repeated, in the layered order the tools and the static text. Markers
    may move. Only for requests with the same order and prefix, because a new epoch changes blocks on purpose.
    """
    if order is LayerOrder.LAYERED:
        previous = [entry for entry in previous if entry.layer is Layer.STATIC]
    for index, expected in enumerate(previous):
        found = current[index] if index < len(current) else None
        if found is None or (found.kind, found.hash) != (expected.kind, expected.hash):
            return {
                "kind": "prefix_break",
                "index": index,
                "block": expected.kind,
                "layer": str(expected.layer),
                "role": expected.role,
                "seq": expected.seq,
                "expected_hash": expected.hash,
                "found_hash": None if found is None else found.hash,
            }
    return None


def extend_manifest(manifest: Sequence[ManifestEntry], payload: Payload) -> tuple[ManifestEntry, ...]:
    """Return the manifest of a request that continues a paused answer, given that of the paused request."""
    added = (message for message in payload.messages if message.is_continuation)
    return (*manifest, *(_message_entry(message, kind=CONTINUATION, marked=False) for message in added))


def without_continuation(manifest: Sequence[ManifestEntry]) -> tuple[ManifestEntry, ...]:
    """Remove the blocks of a continuation, because the next turn repeats a paused answer as a part of the whole one."""
    return tuple(entry for entry in manifest if entry.kind != CONTINUATION)


def share_signed_summary(one: Sequence[ManifestEntry], other: Sequence[ManifestEntry]) -> bool:
    """Return whether both requests begin with the same signed summary, or neither with any."""
    return _signed_summary_hash(one) == _signed_summary_hash(other)


def _signed_summary_hash(manifest: Sequence[ManifestEntry]) -> str | None:
    return next((entry.hash for entry in manifest if entry.kind == SIGNED_SUMMARY), None)


def _entries(payload: Payload, *, marks_static: bool) -> Iterator[ManifestEntry]:
    if payload.tools:
        tools = encode_tools(payload.tools)
        yield _entry(tools, layer=Layer.STATIC, kind="tools", role="system", marked=payload.marks_tools)
    pieces = _outline_static(payload.static_text)
    # After the last one and the one before it, see `server.caching.policy`.
    marked_from = len(pieces) - 2 if marks_static else len(pieces)
    yield from pieces[: max(0, marked_from)]
    yield from (replace(piece, marked=True) for piece in pieces[max(0, marked_from) :])
    joined = payload.joined
    if joined is None:
        yield from list_message_entries(payload.messages, payload.breakpoints)
        return
    yield from list_message_entries(payload.messages[: joined.first], payload.breakpoints)
    yield from joined.entries
    end = joined.first + joined.count
    yield from list_message_entries(payload.messages[end:], [index - end for index in payload.breakpoints])


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
