"""Conversations as a file: one JSON object a line, UTF-8, complete enough to become the same conversation elsewhere.

    archive                                    once: the format and its version
    conversation                               then for each conversation, in this order:
        assistant template epoch segment blob turn blob_reference call
    end                                        how many lines it had, and the SHA-256 of all of them
    close                                      once: how many conversations the file has

So a reader needs one line at a time, knows when it has a whole conversation and a whole file, and sees every line that
was lost, added or altered. The same conversation gives the same bytes. Of the columns:
- bytes stand in base64; the answers of providers are those that came from the wire, not compressed;
- text that Postgres cannot hold (NUL, a lone surrogate) stands as it does there: U+10FFFF and four hex digits;
- JSON stands as JSON where it can be written back to the letter, and else as text, `{"$text": "..."}`;
- ids have their prefixes; times are those of UTC; money is text.

What belongs to a tenant, to a running turn or to a provider's cache is not in it.
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
"""Of one line. Nothing that a provider or a client sends comes near it."""


class RecordKind(StrEnum):
    """What a line holds, in the order of the file."""

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
    """A line that was read. Its values are as columns take them."""

    kind: RecordKind
    line_number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedConversation:
    """One that an import has written, or would have."""

    source_id: str
    conversation_id: str
    """The same, or a new one where that was asked for."""
    turn_count: int


class ArchiveWriter:
    """Lines of an archive. Counts them and hashes them, conversation by conversation."""

    __slots__ = ("_conversation_count", "_count", "_digest", "_fields")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._conversation_count = 0
        self._begin()

    def header(self) -> bytes:
        """The first line of a file."""
        return _line({"record": RecordKind.ARCHIVE, "format": ARCHIVE_FORMAT, "version": ARCHIVE_VERSION})

    def record(self, kind: RecordKind, row: Mapping[str, Any]) -> bytes:
        """A line for a row."""
        members = {each.name: encode_value(each, row[each.name]) for each in self._fields[kind]}
        line = _line({"record": kind, **members})
        self._digest.update(line)
        self._count += 1
        return line

    def end(self) -> bytes:
        """The line that ends a conversation. The next record begins another."""
        line = _line({"record": RecordKind.END, "lines": self._count, "sha256": self._digest.hexdigest()})
        self._conversation_count += 1
        self._begin()
        return line

    def close(self) -> bytes:
        """The last line of a file."""
        return _line({"record": RecordKind.CLOSE, "conversations": self._conversation_count})

    def _begin(self) -> None:
        self._digest = hashlib.sha256()
        self._count = 0


@dataclass(slots=True, kw_only=True)
class _Reading:
    """How far a file was read."""

    line_number: int = 0
    latest: RecordKind | None = None
    count: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    next_seq: int = 1
    """Of the turn that has to come next."""
    turn_end: int = 1
    """The first number that is no turn's."""
    conversation_count: int = 0

    def refuse(self, message: str) -> NoReturn:
        raise ArchiveInvalid(f"Line {self.line_number}: {message}.", line=self.line_number)


def read_archive(lines: Iterable[bytes], fields: Fields) -> Iterator[Record]:
    """The records of a file, conversation by conversation, `end` included, each checked before it is given.

    Whoever writes what comes must not keep any of it before `end` has come. Raises `ArchiveInvalid` with the number of
    the line: for another format, order, member or value, for a blob that is not its hash, for turns that
    are not numbered 1, 2, 3, and for a conversation that is not whole or not as it was written.
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
        reading.refuse("the file ends too early")


def _parse(reading: _Reading, line: bytes) -> tuple[RecordKind, dict[str, Any]]:
    if len(line) > LINE_LIMIT_BYTES:
        reading.refuse("it is too long")
    if not line.endswith(b"\n"):
        reading.refuse("it is cut off")
    try:
        members = json.loads(line)
    except (ValueError, RecursionError):
        reading.refuse("it is not JSON")
    if not isinstance(members, dict):
        reading.refuse("it is no JSON object")
    name = members.pop("record", None)
    if name not in set(RecordKind):
        reading.refuse("it is no record that this release knows")
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
        reading.refuse(f"{kind} cannot stand here")


def _check_frame(reading: _Reading, kind: RecordKind, members: Mapping[str, Any]) -> None:
    if kind is RecordKind.CLOSE:
        if members != {"conversations": reading.conversation_count}:
            reading.refuse("the file has more or fewer conversations than it had")
        return
    if members.get("format") != ARCHIVE_FORMAT:
        reading.refuse("the file is no archive of conversations")
    if members.get("version") != ARCHIVE_VERSION or len(members) != len({"format", "version"}):
        reading.refuse(f"the archive has a version that this release does not read; it reads {ARCHIVE_VERSION}")


def _check_end(reading: _Reading, members: Mapping[str, Any]) -> None:
    if members != {"lines": reading.count, "sha256": reading.digest.hexdigest()}:
        reading.refuse("the conversation that ends here is not as it was written")
    if reading.next_seq != reading.turn_end:
        reading.refuse("the conversation that ends here lacks turns")
    reading.conversation_count += 1


def _check_values(reading: _Reading, kind: RecordKind, values: Mapping[str, Any]) -> None:
    match kind:
        case RecordKind.CONVERSATION:
            reading.turn_end = values["next_seq"]
        case RecordKind.TURN:
            if values["seq"] != reading.next_seq:
                reading.refuse(f"turn {reading.next_seq} should come here")
            reading.next_seq += 1
        case RecordKind.BLOB if hashlib.sha256(values["data"]).digest() != values["sha256"]:
            reading.refuse("the bytes of the blob are not those of its hash")
        case RecordKind.CALL:
            _check_call(reading, values)
        case _:
            pass


def _check_call(reading: _Reading, values: Mapping[str, Any]) -> None:
    raw = values["raw_response"]
    if raw is not None and len(raw) != values["raw_length"]:
        reading.refuse("the answer is not as long as it was")
    # Empty: the process died before it had recorded the request.
    if len(values["request_hash"]) not in {0, hashlib.sha256().digest_size}:
        reading.refuse("request_hash is no SHA-256")


def _decode(reading: _Reading, fields: Sequence[Field], members: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for each in fields:
        if each.name in members:
            try:
                values[each.name] = decode_value(each, members.pop(each.name))
            except (ValueError, TypeError, OverflowError, RecursionError):
                reading.refuse(f"{each.name} has a value that it cannot have")
        elif not each.optional:
            reading.refuse(f"{each.name} is missing")
    if members:
        reading.refuse(f"{min(members)} is no member that this release knows")
    return values


def _line(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
