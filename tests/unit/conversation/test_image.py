import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.image import GIF, IMAGE_TYPES, JPEG, PNG, WEBP, ImageHeader, find_image_header


def png(width: int = 3, height: int = 2) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + b"rest"


def jpeg(width: int = 3, height: int = 2, *, before: bytes = b"", marker: int = 0xC0) -> bytes:
    size = struct.pack(">BHHB", 8, height, width, 3)
    return b"\xff\xd8" + before + bytes([0xFF, marker]) + struct.pack(">H", len(size) + 2) + size + b"rest"


def gif(width: int = 3, height: int = 2, version: bytes = b"GIF89a") -> bytes:
    return version + struct.pack("<HHBBB", width, height, 0, 0, 0) + b"rest"


def webp(kind: bytes, data: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 100) + b"WEBP" + kind + struct.pack("<I", 50) + data + b"rest of the file"


APP0 = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF" + bytes(10)
LOSSY = webp(b"VP8 ", b"\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 3, 2))
LOSSLESS = webp(b"VP8L", b"\x2f" + struct.pack("<I", 2 | 1 << 14))
EXTENDED = webp(b"VP8X", bytes(4) + (2).to_bytes(3, "little") + (1).to_bytes(3, "little"))


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (png(), PNG),
        (jpeg(before=APP0), JPEG),
        (jpeg(before=APP0 + b"\xff\xff\xff\xd0", marker=0xC2), JPEG),
        (gif(), GIF),
        (gif(version=b"GIF87a"), GIF),
        (LOSSY, WEBP),
        (LOSSLESS, WEBP),
        (EXTENDED, WEBP),
    ],
    ids=["png", "jpeg", "progressive jpeg", "gif 89a", "gif 87a", "webp lossy", "webp lossless", "webp extended"],
)
def test_the_type_of_an_image_is_detected_from_its_bytes(data: bytes, media_type: str) -> None:
    assert find_image_header(data) == ImageHeader(media_type=media_type, width=3, height=2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"BM" + bytes(60),
        b"\x89PNG\r\n\x1a\n",
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        png(width=0),
        png(height=2**31),
        gif(height=0),
        b"GIF89a",
        b"\xff\xd8\xff",
        b"\xff\xd8" + APP0,
        b"\xff\xd8" + APP0 + b"\xff\xda" + bytes(20),
        jpeg(before=b"\xff\xd8"),
        jpeg(width=0),
        jpeg()[:8],
        jpeg(marker=0xC4),
        webp(b"VP9 ", bytes(20)),
        webp(b"VP8L", bytes(20)),
        webp(b"VP8 ", bytes(20)),
        b"RIFF" + bytes(4) + b"WAVE" + bytes(40),
    ],
)
def test_bytes_without_a_valid_header_are_no_image(data: bytes) -> None:
    assert find_image_header(data) is None


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff", b"GIF89a", b"\x89PNG\r\n\x1a\n", EXTENDED[:16]]))
def test_any_bytes_can_be_examined(data: bytes, beginning: bytes) -> None:
    found = find_image_header(beginning + data)
    assert found is None or (found.media_type in IMAGE_TYPES and found.width > 0 and found.height > 0)


@given(st.binary(min_size=2, max_size=40), st.integers(0, 200))
def test_an_image_with_a_truncated_header_is_none(tail: bytes, length: int) -> None:
    whole = jpeg(before=b"\xff\xe1" + struct.pack(">H", len(tail) + 2) + tail)
    found = find_image_header(whole[:length])
    assert found in {None, ImageHeader(media_type=JPEG, width=3, height=2)}
