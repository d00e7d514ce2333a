"""Server-sent events are the same for any split of the bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.providers.wire.frames import Frame, FrameReader
from tests.recordings.catalogue import RECORDINGS, Recorded
from tests.unit.providers.wire.splitting import split

LINES = st.lists(
    st.sampled_from(
        [b"data: {}", b"data:x", b"data: ", b"data", b"event: ping", b": comment", b"id: 1", b"", b"", b"x"]
    )
    | st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line),
    max_size=20,
)


def read(*pieces: bytes) -> tuple[list[Frame], bool]:
    reader = FrameReader()
    frames = [frame for piece in pieces for frame in reader.feed(piece)]
    return frames, reader.rest


def read_by_line(body: bytes) -> tuple[list[Frame], bool]:
    """The same, one line after the other."""
    frames: list[Frame] = []
    event, data, seen = "", list[bytes](), False
    *lines, rest = body.split(b"\n")
    for line in (line.removesuffix(b"\r") for line in lines):
        if not line:
            frames += [Frame(event, b"\n".join(data))] if data else []
            event, data, seen = "", [], False
        elif not line.startswith(b":"):
            name, _, value = line.partition(b":")
            seen, value = True, value.removeprefix(b" ")
            data += [value] if name == b"data" else []
            event = value.decode("utf-8", "replace") if name == b"event" else event
    return frames, bool(rest) or seen


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_record_has_its_event_and_its_data(end: bytes) -> None:
    body = end.join([b"event: ping", b"data: {}", b"", b"data: 1", b"data:  2", b"", b""])
    assert read(body) == ([Frame(event="ping", data=b"{}"), Frame(event="", data=b"1\n 2")], False)


def test_comments_and_other_fields_are_no_frames() -> None:
    assert read(b": hello\n\nid: 7\nretry: 10\n\nevent: x\n\n") == ([], False)


def test_a_record_without_its_blank_line_is_a_remainder_and_no_frame() -> None:
    assert read(b"data: 1\n\ndata: 2\n") == ([Frame(event="", data=b"1")], True)
    assert read(b"data: 1\n\nda") == ([Frame(event="", data=b"1")], True)
    assert read(b"data: 1\r\n\r") == ([], True)
    assert read(b"") == ([], False)


def test_data_is_unchanged_even_if_it_is_not_text() -> None:
    assert read(b"data: \xff\xfe\n\n") == ([Frame(event="", data=b"\xff\xfe")], False)


@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_any_split_gives_the_same_frames(lines: list[bytes], end: bytes, data: st.DataObject) -> None:
    body = end.join([*lines, b""])
    assert read(*data.draw(split(body))) == read(body)


@given(st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r\r\n"])), max_size=3), st.binary(max_size=3))
def test_records_with_any_line_ends_are_read_as_line_by_line(
    parts: list[tuple[list[bytes], bytes]], rest: bytes
) -> None:
    body = b"".join(line + end for lines, end in parts for line in lines) + rest
    assert read(body) == read_by_line(body)


@pytest.mark.parametrize("recorded", RECORDINGS, ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_any_split_of_a_recording_gives_the_same_frames(recorded: Recorded, data: st.DataObject) -> None:
    assert read(*data.draw(split(recorded.body))) == read(recorded.body)
