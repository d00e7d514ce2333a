"""The archive format: what was written can be read, and invalid content is refused with its line number."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.archive.file import ArchiveWriter, RecordKind, read_archive
from server.archive.values import Field, FieldKind, decode_value, encode_value
from server.conversation.errors import ArchiveInvalid
from server.conversation.identifiers import CONVERSATION, encode_id
from tests.support.strategies import json_values

ID = UUID("01930000-0000-7000-8000-000000000000")
FIELDS = {
    RecordKind.CONVERSATION: (
        Field(name="id", kind=FieldKind.UUID, prefix=CONVERSATION),
        Field(name="next_seq", kind=FieldKind.INTEGER),
        Field(name="note", kind=FieldKind.TEXT, nullable=True, optional=True),
    ),
    RecordKind.BLOB: (Field(name="sha256", kind=FieldKind.BYTES), Field(name="data", kind=FieldKind.BYTES)),
    RecordKind.TURN: (Field(name="seq", kind=FieldKind.INTEGER), Field(name="args", kind=FieldKind.JSON)),
}
stored_text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)


def archive(next_seq: int = 3, count: int = 1) -> list[bytes]:
    writer = ArchiveWriter(FIELDS)
    lines = [writer.header()]
    for number in range(count):
        row = {"id": UUID(int=ID.int + number), "next_seq": next_seq, "note": None}
        lines.append(writer.record(RecordKind.CONVERSATION, row))
        lines += [
            writer.record(RecordKind.TURN, {"seq": seq, "args": '{"b":1,"a":[2.50]}'}) for seq in range(1, next_seq)
        ]
        lines.append(writer.end())
    return [*lines, writer.close()]


def kinds(lines: list[bytes]) -> list[str]:
    return [record.kind.value for record in read_archive(lines, FIELDS)]


def test_records_come_back_in_their_order_with_their_lines() -> None:
    records = list(read_archive(archive(count=2), FIELDS))
    assert [(record.kind, record.line_number) for record in records[:4]] == [
        (RecordKind.CONVERSATION, 2),
        (RecordKind.TURN, 3),
        (RecordKind.TURN, 4),
        (RecordKind.END, 5),
    ]
    assert records[0].values == {"id": ID, "next_seq": 3, "note": None}
    assert records[1].values == {"seq": 1, "args": '{"b":1,"a":[2.50]}'}


def test_ids_have_their_prefixes_and_json_is_json_unless_that_would_change_it() -> None:
    lines = [json.loads(line) for line in archive()]
    assert lines[1]["id"] == encode_id(CONVERSATION, ID)
    # 2.50 would come back as 2.5.
    assert lines[2]["args"] == {"$text": '{"b":1,"a":[2.50]}'}
    assert encode_value(Field(name="x", kind=FieldKind.JSON), '{"b":1,"a":[2.5]}') == {"b": 1, "a": [2.5]}
    assert encode_value(Field(name="x", kind=FieldKind.JSONB), '{"b": 1, "a": [2.5]}') == {"b": 1, "a": [2.5]}


def test_a_file_without_conversations_is_one() -> None:
    assert kinds(archive(count=0)) == []


WRONG: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int, str]] = {
    "nothing": (lambda lines: lines[:0], 1, "empty"),
    "no header": (lambda lines: lines[1:], 1, "is not allowed here"),
    "two headers": (lambda lines: [lines[0], *lines], 2, "is not allowed here"),
    "no conversation": (lambda lines: [lines[0], *lines[2:]], 2, "is not allowed here"),
    "two ends": (lambda lines: [*lines[:5], *lines[4:]], 6, "is not allowed here"),
    "no end": (lambda lines: lines[:4], 5, "the file is truncated"),
    "no end and a close": (lambda lines: [*lines[:4], lines[5]], 5, "is not allowed here"),
    "no close": (lambda lines: lines[:5], 6, "the file is truncated"),
    "two closes": (lambda lines: [*lines, lines[-1]], 7, "is not allowed here"),
    "a conversation less": (lambda lines: [lines[0], lines[-1]], 2, "number of conversations"),
    "half an end": (lambda lines: [*lines[:4], lines[4][:-1]], 5, "the line is truncated"),
    "a turn less at the front": (lambda lines: [*lines[:2], lines[3], lines[4]], 3, "turn 1 is expected here"),
    "a turn less at the back": (lambda lines: [*lines[:3], lines[4]], 4, "was altered"),
    "a newer version": (lambda lines: [lines[0].replace(b"1", b"2"), *lines[1:]], 1, "version"),
    "another format": (lambda lines: [lines[0].replace(b"strata-archive", b"else"), *lines[1:]], 1, "not an archive"),
    "a number as text": (
        lambda lines: [lines[0], lines[1].replace(b'"next_seq":3', b'"next_seq":"3"')],
        2,
        "next_seq has an invalid value",
    ),
    "a member less": (lambda lines: [lines[0], lines[1].replace(b"next_seq", b"other_seq")], 2, "next_seq is missing"),
    "a member more": (
        lambda lines: [lines[0], lines[1].replace(b'"note"', b'"noise"')],
        2,
        "the member noise is unknown",
    ),
    "an id of something else": (
        lambda lines: [lines[0], lines[1].replace(b"conv_", b"asst_")],
        2,
        "id has an invalid value",
    ),
    "an unknown record": (lambda lines: [*lines[:2], b'{"record":"dance"}\n'], 3, "kind of record is unknown"),
    "a list": (lambda lines: [*lines[:2], b"[]\n"], 3, "not a JSON object"),
    "no text": (lambda lines: [*lines[:2], b"\xff\n"], 3, "not JSON"),
    "too deep": (lambda lines: [*lines[:2], b"[" * 100_000 + b"\n"], 3, "not JSON"),
    "another digit": (
        lambda lines: [*lines[:2], lines[2].replace(b"2.50", b"2.51"), *lines[3:]],
        5,
        "was altered",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_reported_with_its_line(name: str) -> None:
    change, line, message = WRONG[name]
    with pytest.raises(ArchiveInvalid, match=message) as refused:
        kinds(change(archive()))
    assert refused.value.details == {"line": line}


def test_a_member_that_a_later_release_added_may_be_missing_and_only_such() -> None:
    writer = ArchiveWriter({**FIELDS, RecordKind.CONVERSATION: FIELDS[RecordKind.CONVERSATION][:2]})
    row = {"id": ID, "next_seq": 1}
    older = [writer.header(), writer.record(RecordKind.CONVERSATION, row), writer.end(), writer.close()]
    [conversation, _] = read_archive(older, FIELDS)
    assert conversation.values == {"id": ID, "next_seq": 1}


def test_missing_turns_are_detected() -> None:
    writer = ArchiveWriter(FIELDS)
    row = {"id": ID, "next_seq": 3, "note": None}
    lines = [writer.header(), writer.record(RecordKind.CONVERSATION, row), writer.end()]
    with pytest.raises(ArchiveInvalid, match="are missing"):
        kinds(lines)


def test_a_blob_must_match_its_hash() -> None:
    writer = ArchiveWriter(FIELDS)
    lines = [
        writer.header(),
        writer.record(RecordKind.CONVERSATION, {"id": ID, "next_seq": 1, "note": None}),
        writer.record(RecordKind.BLOB, {"sha256": bytes(32), "data": b"x"}),
    ]
    with pytest.raises(ArchiveInvalid, match="do not match its hash"):
        kinds(lines)


def round_trip(field: Field, value: Any) -> Any:
    return decode_value(field, json.loads(json.dumps(encode_value(field, value), ensure_ascii=False)))


@given(
    text=stored_text,
    data=st.binary(max_size=50),
    number=st.integers(-(2**63), 2**63 - 1),
    uuid=st.uuids(),
    money=st.decimals(-(10**9), 10**9, places=10),
    moment=st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))])),
    texts=st.lists(stored_text, max_size=3),
)
def test_every_value_comes_back(**values: Any) -> None:
    for name, kind in {
        "text": FieldKind.TEXT,
        "data": FieldKind.BYTES,
        "number": FieldKind.INTEGER,
        "uuid": FieldKind.UUID,
        "money": FieldKind.MONEY,
        "moment": FieldKind.INSTANT,
        "texts": FieldKind.TEXTS,
    }.items():
        assert round_trip(Field(name=name, kind=kind), values[name]) == values[name]


@given(value=json_values, compact=st.booleans())
def test_every_json_text_comes_back_unchanged(*, value: Any, compact: bool) -> None:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":") if compact else (", ", ": "))
    if "\\u0000" in text or "\\ud" in text.lower():
        return
    assert round_trip(Field(name="x", kind=FieldKind.JSON), text) == text
    assert json.loads(round_trip(Field(name="x", kind=FieldKind.JSONB), text)) == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FieldKind.INTEGER, 2**63),
        (FieldKind.INTEGER, True),
        (FieldKind.INTEGER, 1.0),
        (FieldKind.TEXT, "NUL \x00"),
        (FieldKind.TEXT, "lone \ud800"),
        (FieldKind.TEXT, 3),
        (FieldKind.TEXTS, "text"),
        (FieldKind.TEXTS, [1]),
        (FieldKind.BYTES, "not base64!"),
        (FieldKind.UUID, "nonsense"),
        (FieldKind.INSTANT, "2026-01-01T00:00:00"),
        (FieldKind.MONEY, "NaN"),
        (FieldKind.MONEY, "much"),
        (FieldKind.MONEY, 1.5),
        (FieldKind.JSON, "NUL \x00"),
        (FieldKind.JSON, {"$text": 3}),
        (FieldKind.TEXT, None),
    ],
    ids=repr,
)
def test_a_value_that_no_column_could_have_is_refused(kind: FieldKind, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_value(Field(name="x", kind=kind), value)


def test_amounts_keep_their_decimal_places() -> None:
    field = Field(name="x", kind=FieldKind.MONEY)
    assert round_trip(field, Decimal("0.0000000000")).as_tuple() == Decimal("0.0000000000").as_tuple()
    assert encode_value(field, Decimal("1E-10")) == "0.0000000001"


def test_times_are_written_in_utc() -> None:
    moment = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert encode_value(Field(name="x", kind=FieldKind.INSTANT), moment) == "2026-01-01T00:00:00+00:00"
