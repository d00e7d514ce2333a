"""Server-sent events are parsed as the standard defines, for any split of the bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.web.client.stream import Frame, FrameReader
from tests.unit.providers.wire.splitting import split

ENDS = [b"\n", b"\r\n", b"\r"]
LINES = st.lists(
    st.sampled_from(
        [b"data: {}", b"data:x", b"data", b"event: ping", b": comment", b"id: 1", b"id", b"retry: 5", b"", b"", b"x"]
    )
    | st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line),
    max_size=20,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def read(*pieces: bytes) -> tuple[list[Frame], int]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)], reader.comment_count


@pytest.mark.parametrize("end", ENDS)
def test_a_record_has_its_number_its_event_and_its_data(end: bytes) -> None:
    body = end.join([b"id: 7", b"event: text.delta", b"data: 1", b"data:  2", b"", b"data: 3", b"", b""])
    assert read(body) == ([Frame(id="7", event="text.delta", data="1\n 2"), Frame(id="7", event="", data="3")], 0)


def test_comments_are_counted_and_give_no_event() -> None:
    assert read(b": keep-alive\n\n:\n\n") == ([], 2)


def test_a_record_without_data_gives_no_event_and_its_name_is_dropped() -> None:
    assert read(b"event: x\n\ndata: 1\n\n") == ([Frame(id="", event="", data="1")], 0)


def test_a_record_without_its_blank_line_gives_no_event() -> None:
    assert read(b"data: 1\n\ndata: 2\n") == ([Frame(id="", event="", data="1")], 0)


def test_an_id_with_a_nul_is_ignored() -> None:
    assert read(b"id: 1\nid: 2\x003\ndata: x\n\n") == ([Frame(id="1", event="", data="x")], 0)


def test_a_byte_order_mark_is_not_part_of_the_first_line() -> None:
    assert read(b"\xef", b"\xbb\xbfdata: x\n\n") == ([Frame(id="", event="", data="x")], 0)


def test_a_line_ending_of_two_bytes_may_be_split() -> None:
    assert read(b"data: x\r", b"", b"\n\r", b"\ndata: y\r\n\r\n") == read(b"data: x\r\n\r\ndata: y\r\n\r\n")


@given(LINES, st.lists(st.sampled_from(ENDS), min_size=20, max_size=20), st.data())
def test_any_split_gives_the_same_frames(lines: list[bytes], ends: list[bytes], data: st.DataObject) -> None:
    body = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    assert read(*data.draw(split(body))) == read(body)


@given(st.lists(st.tuples(TEXTS, TEXTS)), st.sampled_from(ENDS), st.data())
def test_written_records_are_read_back(records: list[tuple[str, str]], end: bytes, data: st.DataObject) -> None:
    clean = [(event.replace("\n", "").replace("\r", ""), text.replace("\r", "")) for event, text in records]
    body = b"".join(
        end.join(
            [
                f"id: {number}".encode(),
                f"event: {event}".encode(),
                *(b"data: " + line.encode() for line in text.split("\n")),
                b"",
                b"",
            ]
        )
        for number, (event, text) in enumerate(clean)
    )
    expected = [Frame(id=str(number), event=event, data=text) for number, (event, text) in enumerate(clean)]
    assert read(*data.draw(split(body))) == (expected, 0)
