"""Decoding of the row of a payload source, with a cache of its immutable parts.

A version of an assistant never changes, and neither does the manifest of a call. A process that has run a turn of a
conversation therefore does not read them again for the next turn.
"""

from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg

from server.conversation.assistant import Assistant
from server.conversation.block import Blob, Block, block_from_json, decode_blocks
from server.conversation.call import CallStart
from server.conversation.lru import LruCache
from server.conversation.payload import ManifestEntry
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import Native, TurnKind, TurnState
from server.postgres.codec import decode_json, decode_text
from server.postgres.rows import (
    assistant_from,
    cache_from,
    conversation_from,
    epoch_from,
    json_or_none,
    order_or_none,
    text_or_none,
    trace_from,
)

Manifest: TypeAlias = tuple[ManifestEntry, ...]
_ASSISTANTS: Final = 500
_CONVERSATIONS: Final = 20_000
_MANIFEST_ENTRIES: Final = 100_000
"""The maximum of all manifests together: about 40 MB."""
_TURN_COLUMNS: Final = (
    "turn_seqs",
    "turn_kinds",
    "turn_states",
    "turn_natives",
    "turn_dialects",
    "turn_blocks",
    "turn_providers",
    "turn_models",
    "turn_model_versions",
    "turn_accounts",
    "turn_languages",
    "turn_args",
    "turn_prefix_hashes",
    "turn_dynamics",
    "turn_input_times",
    "turn_output_tokens",
    "turn_reasoning_tokens",
    "turn_times",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The cached parts of a conversation, which the statement does not return."""

    assistant: Assistant | None
    """A conversation keeps its assistant; only the version changes."""
    request_hash: bytes
    """The hash of the call whose manifest is cached; empty if none is."""
    manifest: Manifest


class RowCache:
    """The cache of one process."""

    def __init__(self) -> None:
        self._assistants: LruCache[tuple[UUID, int], Assistant] = LruCache(_ASSISTANTS)
        self._newest: LruCache[UUID, Assistant] = LruCache(_CONVERSATIONS)
        self._manifests: LruCache[UUID, tuple[bytes, Manifest]] = LruCache(
            _MANIFEST_ENTRIES, weigh=lambda entry: len(entry[1])
        )

    def find(self, conversation: UUID | None) -> Known:
        """Return the cached parts of a conversation."""
        if conversation is None:
            return Known(assistant=None, request_hash=b"", manifest=())
        request_hash, manifest = self._manifests.get(conversation) or (b"", ())
        return Known(assistant=self._newest.get(conversation), request_hash=request_hash, manifest=manifest)

    def put_manifest(self, conversation: UUID, start: CallStart) -> None:
        """Cache the manifest of the newest call, which the next payload is compared with."""
        if start.new_manifest is not None:
            self._manifests.put(conversation, (start.request_hash, start.new_manifest.entries))

    def read(self, row: asyncpg.Record, manifest: Manifest, known: Assistant | None = None) -> PayloadSource:
        """Build the source from a row, the previous manifest, and the assistant that the row omits."""
        return _source(row, self._read_assistant(row, known), manifest)

    def _read_assistant(self, row: asyncpg.Record, known: Assistant | None) -> Assistant:
        if known is not None and known.version == row["chosen_version"]:
            return known
        key = (row["assistant_id"], row["chosen_version"])
        assistant = self._assistants.get(key)
        if assistant is None:
            assistant = assistant_from(row)
            self._assistants.put(key, assistant)
        self._newest.put(row["id"], assistant)
        return assistant


def _source(row: asyncpg.Record, assistant: Assistant, manifest: Manifest) -> PayloadSource:
    epoch = None if row["epoch_number"] is None else epoch_from(row)
    static_text = None
    if epoch is not None and not row["static_held"]:
        static_text = epoch.base_text + "".join(decode_text(text) for text in row["segment_texts"] or ())
    return PayloadSource(
        conversation=conversation_from(row),
        assistant=assistant,
        epoch=epoch,
        static_text=static_text,
        buffered=_buffered(row),
        blobs={
            sha256.hex(): Blob(sha256=sha256, media_type=decode_text(media_type), data=data)
            for sha256, media_type, data in _columns(row, "blob_hashes", "blob_types", "blob_data")
        },
        previous_manifest=manifest,
        previous_order=order_or_none(row["previous_order"]),
        previous_prefix_hash=row["previous_prefix_hash"],
        previous_epoch=row["previous_epoch"],
        previous_key=None if row["previous_attempt"] is None else (row["previous_turn_seq"], row["previous_attempt"]),
        previous_container=json_or_none(row["previous_container"]),
        previous_call=None if row["previous_provider"] is None else trace_from(row),
        recent_call_times=tuple(row["recent_call_times"]),
        cache=None if row["cache_id"] is None else cache_from(row),
        exchange_count=row["counted_exchanges"],
    )


def _buffered(row: asyncpg.Record) -> tuple[BufferedTurn, ...]:
    return tuple(
        BufferedTurn(
            seq=seq,
            kind=TurnKind(kind),
            state=TurnState(state),
            native=Native(dialect=dialect, data=native),
            blocks=_blocks(kind, native, blocks),
            provider=text_or_none(provider),
            model=text_or_none(model),
            model_version=text_or_none(model_version),
            account=text_or_none(account),
            language=text_or_none(language),
            args=json_or_none(args),
            prefix_hash=prefix_hash,
            dynamic=dynamic,
            input_time=text_or_none(input_time),
            output_tokens=output_tokens,
            reasoning_tokens=reasoning_tokens,
            created_at=created_at,
        )
        for (
            seq,
            kind,
            state,
            native,
            dialect,
            blocks,
            provider,
            model,
            model_version,
            account,
            language,
            args,
            prefix_hash,
            dynamic,
            input_time,
            output_tokens,
            reasoning_tokens,
            created_at,
        ) in _columns(row, *_TURN_COLUMNS)
    )


def _blocks(kind: str, native: bytes, blocks: str | None) -> tuple[Block, ...] | None:
    if kind != TurnKind.MODEL_RESPONSE:
        return decode_blocks(native)
    return None if blocks is None else tuple(block_from_json(item) for item in decode_json(blocks))


def _columns(row: asyncpg.Record, *names: str) -> Any:
    """Transpose arrays of the same length into rows. An empty array is NULL."""
    return zip(*(row[name] or () for name in names), strict=True)
