"""Images: the format and size of image bytes, independent of the media type that a client claims.

The magic number alone is not sufficient: the header with the size has to follow. The rest of the image is not checked;
the provider does that.

| format | begins with            | the size is read from                       |
|--------|------------------------|---------------------------------------------|
| PNG    | the PNG signature      | the IHDR chunk, which has to be the first   |
| JPEG   | an SOI marker          | the first SOF segment, before any scan      |
| GIF    | GIF87a or GIF89a       | the logical screen                          |
| WebP   | RIFF … WEBP            | the first chunk: VP8, VP8L or VP8X          |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PNG: Final = "image/png"
JPEG: Final = "image/jpeg"
GIF: Final = "image/gif"
WEBP: Final = "image/webp"
IMAGE_TYPES: Final = (PNG, JPEG, WEBP, GIF)

_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER: Final = b"\x00\x00\x00\rIHDR"
_MAX_PNG_SIDE: Final = 2**31 - 1
_JPEG_SIZES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""The SOF markers. The three others in this range define tables or are reserved."""
_JPEG_BARE: Final = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a segment."""
_JPEG_SCAN: Final = frozenset({0xD8, 0xD9, 0xDA})
"""A second image, the end, a scan: none of these may come before the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """The format and size of an image."""

    media_type: str
    width: int
    height: int


def find_image_header(data: bytes) -> ImageHeader | None:
    """Return the header of a PNG, JPEG, GIF or WebP image; None for anything else, and without a size."""
    for media_type, read_size in _READERS:
        size = read_size(data)
        if size is not None and min(size) > 0:
            return ImageHeader(media_type=media_type, width=size[0], height=size[1])
    return None


def _png_size(data: bytes) -> tuple[int, int] | None:
    if not data.startswith(_PNG_SIGNATURE + _PNG_HEADER) or len(data) < 33:  # noqa: PLR2004  reason: signature and IHDR with its checksum
        return None
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    return (width, height) if max(width, height) <= _MAX_PNG_SIDE else None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:  # noqa: PLR2004  reason: every marker begins with this byte
        marker = data[offset + 1]
        if marker == 0xFF:  # noqa: PLR2004  reason: markers may be padded
            offset += 1
        elif marker in _JPEG_BARE:
            offset += 2
        elif marker in _JPEG_SIZES:
            segment = data[offset + 4 : offset + 9]
            return (int.from_bytes(segment[3:5]), int.from_bytes(segment[1:3])) if len(segment) == 5 else None  # noqa: PLR2004  reason: precision, height, width
        elif marker in _JPEG_SCAN or marker == 0:
            return None
        else:
            offset += 2 + max(int.from_bytes(data[offset + 2 : offset + 4]), 2)
    return None


def _gif_size(data: bytes) -> tuple[int, int] | None:
    if not data.startswith((b"GIF87a", b"GIF89a")) or len(data) < 13:  # noqa: PLR2004  reason: signature and logical screen
        return None
    return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:  # noqa: PLR2004  reason: the longest of the three headers
        return None
    match data[12:16]:
        case b"VP8X":
            return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
        case b"VP8L" if data[20] == 0x2F:  # noqa: PLR2004  reason: the format's signature byte
            bits = int.from_bytes(data[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
        case _:
            return None


_READERS: Final[tuple[tuple[str, Callable[[bytes], tuple[int, int] | None]], ...]] = (
    (PNG, _png_size),
    (JPEG, _jpeg_size),
    (GIF, _gif_size),
    (WEBP, _webp_size),
)
