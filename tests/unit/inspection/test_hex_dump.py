"""Bytes for reading."""

from hypothesis import given
from hypothesis import strategies as st

from server.inspection.hex_dump import LINE_BYTES, dump_bytes


@given(data=st.binary(max_size=400), head=st.integers(1, 6), tail=st.integers(1, 4))
def test_every_byte_is_shown_or_counted(data: bytes, head: int, tail: int) -> None:
    dump = dump_bytes(data, head_bytes=head * LINE_BYTES, tail_bytes=tail * LINE_BYTES)

    lines = (*dump.head, *dump.tail)
    shown = b"".join(bytes.fromhex(line.numbers) for line in lines)
    assert len(shown) + dump.left_out_bytes == len(data) == dump.size_bytes
    assert len(lines) <= head + tail
    for line in lines:
        piece = data[line.offset : line.offset + LINE_BYTES]
        assert bytes.fromhex(line.numbers) == piece
        assert len(line.letters) == len(piece)
        assert all(" " <= letter <= "~" for letter in line.letters)


def test_letters_stand_beside_their_numbers() -> None:
    [line] = dump_bytes(b'data: {"a":1}\r\n\x1b[', head_bytes=32, tail_bytes=16).head[:1]

    assert line.numbers == "64 61 74 61 3a 20 7b 22  61 22 3a 31 7d 0d 0a 1b"
    assert line.letters == 'data: {"a":1}...'
