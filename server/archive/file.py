"""The file format of exported conversations: one JSON object per line, UTF-8, complete enough for an exact import.

    archive                                    once: the format and its version
    conversation                               then for each conversation, in this order:
        assistant template epoch segment blob turn blob_reference call
    end                                        the number of its lines, and the SHA-256 of all of them
    close                                      once: the number of conversations in the file

So a reader needs one line at a time, recognises the end of a conversation and of the file, and detects every line that
is missing, added or altered. The same conversation gives the same bytes. Columns are written as follows:
- bytes in base64; responses of providers as received, not compressed;
- text that Postgres cannot store (NUL, a lone surrogate) with the same escapes as there: U+10FFFF and four hex digits;
- JSON as JSON if that gives exactly the same text again, else as text, `{"$text": "..."}`;
- ids with their prefixes, times in UTC, money as text.

The file contains no data of the tenant, of a running turn or of a provider's cache.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NoReturn

from server.archive.values import Field, decode_value, encode_value
from server.conversation.errors import ArchiveInvalid

ARCHIVE_FORMAT: Final = "strata-archive"
ARCHIVE_VERSION: Final = 1
ARCHIVE_MEDIA_TYPE: Final = "application/x-ndjson"
LINE_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""The maximum length of a line, far above that of any value from a provider or a client."""


class RecordKind(StrEnum):
    """The kind of a line, in the order of the file."""

    ARCHIVE = "archive"
    CONVERSATION = "conversation"
    ASSISTANT = "assistant"
    TEMPLATE = "template"
    EPOCH = "epoch"
    SEGMENT = "segment"
    BLOB = "blob"
    TURN = "turn"
    BLOB_REFERENCE = "blob_reference"
    CALL = "call"
    END = "end"
    CLOSE = "close"


Fields = Mapping[RecordKind, Sequence[Field]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line that was read, with values for columns."""

    kind: RecordKind
    line_number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedConversation:
    """A conversation that an import has written, or would write in a dry run."""

    source_id: str
    conversation_id: str
    """The id after the import: the same, or a new one if that was requested."""
    turn_count: int


class ArchiveWriter:
    """Builds the lines of an archive, and counts and hashes those of each conversation."""

    __slots__ = ("_conversation_count", "_count", "_digest", "_fields")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._conversation_count = 0
        self._begin()

    def header(self) -> bytes:
        """Build the first line of a file."""
        return _line({"record": RecordKind.ARCHIVE, "format": ARCHIVE_FORMAT, "version": ARCHIVE_VERSION})

    def record(self, kind: RecordKind, row: Mapping[str, Any]) -> bytes:
        """Build the line of a row."""
        members = {each.name: encode_value(each, row[each.name]) for each in self._fields[kind]}
        line = _line({"record": kind, **members})
        self._digest.update(line)
        self._count += 1
        return line

    def end(self) -> bytes:
        """Build the line that ends a conversation."""
        line = _line({"record": RecordKind.END, "lines": self._count, "sha256": self._digest.hexdigest()})
        self._conversation_count += 1
        self._begin()
        return line

    def close(self) -> bytes:
        """Build the last line of a file."""
        return _line({"record": RecordKind.CLOSE, "conversations": self._conversation_count})

    def _begin(self) -> None:
        self._digest = hashlib.sha256()
        self._count = 0


@dataclass(slots=True, kw_only=True)
class _Reading:
    """The state of reading a file."""

    line_number: int = 0
    latest: RecordKind | None = None
    count: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    next_seq: int = 1
    """The number of the next expected turn."""
    turn_end: int = 1
    """The number after that of the last turn."""
    conversation_count: int = 0

    def refuse(self, message: str) -> NoReturn:
        raise ArchiveInvalid(f"Line {self.line_number}: {message}.", line=self.line_number)


def read_archive(lines: Iterable[bytes], fields: Fields) -> Iterator[Record]:
    """Iterate over the records of a file, including the `end` of each conversation. Each is checked first.

    The caller must commit the records of a conversation only after its `end`. Raises `ArchiveInvalid` with the number
    of the line: for an unknown format, member or value, a wrong order, a blob that does not match its hash, turns that
    are not numbered 1, 2, 3, and a conversation that is incomplete or was altered.
    """
    reading = _Reading()
    for line in lines:
        reading.line_number += 1
        kind, members = _parse(reading, line)
        _check_order(reading, kind)
        reading.latest = kind
        if kind in {RecordKind.ARCHIVE, RecordKind.CLOSE}:
            _check_frame(reading, kind, members)
            continue
        if kind is RecordKind.END:
            _check_end(reading, members)
            yield Record(kind=kind, line_number=reading.line_number, values={})
            continue
        if kind is RecordKind.CONVERSATION:
            reading.digest, reading.count, reading.next_seq = hashlib.sha256(), 0, 1
        reading.digest.update(line)
        reading.count += 1
        values = _decode(reading, fields[kind], members)
        _check_values(reading, kind, values)
        yield Record(kind=kind, line_number=reading.line_number, values=values)
    reading.line_number += 1
    if reading.latest is None:
        reading.refuse("the file is empty")
    if reading.latest is not RecordKind.CLOSE:
        reading.refuse("the file is truncated")


def _parse(reading: _Reading, line: bytes) -> tuple[RecordKind, dict[str, Any]]:
    if len(line) > LINE_LIMIT_BYTES:
        reading.refuse("the line is too long")
    if not line.endswith(b"\n"):
        reading.refuse("the line is truncated")
    try:
        members = json.loads(line)
    except (ValueError, RecursionError):
        reading.refuse("the line is not JSON")
    if not isinstance(members, dict):
        reading.refuse("the line is not a JSON object")
    name = members.pop("record", None)
    if name not in set(RecordKind):
        reading.refuse("the kind of record is unknown to this release")
    return RecordKind(name), members


def _check_order(reading: _Reading, kind: RecordKind) -> None:
    order = list(RecordKind)
    match reading.latest:
        case None:
            fits = kind is RecordKind.ARCHIVE
        case RecordKind.ARCHIVE | RecordKind.END:
            fits = kind in {RecordKind.CONVERSATION, RecordKind.CLOSE}
        case RecordKind.CLOSE:
            fits = False
        case latest:
            within = kind not in {RecordKind.CONVERSATION, RecordKind.CLOSE}
            fits = within and order.index(kind) >= order.index(latest)
    if not fits:
        reading.refuse(f"a record `{kind}` is not allowed here")


def _check_frame(reading: _Reading, kind: RecordKind, members: Mapping[str, Any]) -> None:
    if kind is RecordKind.CLOSE:
        if members != {"conversations": reading.conversation_count}:
            reading.refuse("the number of conversations differs from that of the export")
        return
    if members.get("format") != ARCHIVE_FORMAT:
        reading.refuse("the file is not an archive of conversations")
    if members.get("version") != ARCHIVE_VERSION or len(members) != len({"format", "version"}):
        reading.refuse(f"the version of the archive is unknown to this release, which reads version {ARCHIVE_VERSION}")


def _check_end(reading: _Reading, members: Mapping[str, Any]) -> None:
    if members != {"lines": reading.count, "sha256": reading.digest.hexdigest()}:
        reading.refuse("the conversation that ends here was altered")
    if reading.next_seq != reading.turn_end:
        reading.refuse("turns of the conversation that ends here are missing")
    reading.conversation_count += 1


def _check_values(reading: _Reading, kind: RecordKind, values: Mapping[str, Any]) -> None:
    match kind:
        case RecordKind.CONVERSATION:
            reading.turn_end = values["next_seq"]
        case RecordKind.TURN:
            if values["seq"] != reading.next_seq:
                reading.refuse(f"turn {reading.next_seq} is expected here")
            reading.next_seq += 1
        case RecordKind.BLOB if hashlib.sha256(values["data"]).digest() != values["sha256"]:
            reading.refuse("the bytes of the blob do not match its hash")
        case RecordKind.CALL:
            _check_call(reading, values)
        case _:
            pass


def _check_call(reading: _Reading, values: Mapping[str, Any]) -> None:
    raw = values["raw_response"]
    if raw is not None and len(raw) != values["raw_length"]:
        reading.refuse("the length of the raw response differs from raw_length")
    # Empty if the process died before it had recorded the request.
    if len(values["request_hash"]) not in {0, hashlib.sha256().digest_size}:
        reading.refuse("request_hash is not a SHA-256 hash")


def _decode(reading: _Reading, fields: Sequence[Field], members: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for each in fields:
        if each.name in members:
            try:
                values[each.name] = decode_value(each, members.pop(each.name))
            except (ValueError, TypeError, OverflowError, RecursionError):
                reading.refuse(f"{each.name} has an invalid value")
        elif not each.optional:
            reading.refuse(f"{each.name} is missing")
    if members:
        reading.refuse(f"the member {min(members)} is unknown to this release")
    return values


def _line(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
