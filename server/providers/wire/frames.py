"""Server-sent events: an incremental parser from bytes to frames.

Pure. The frames do not depend on how the bytes are divided into pieces.
"""

from typing import NamedTuple


class Frame(NamedTuple):
    """One record of the stream. A tuple, because every streamed chunk makes one."""

    event: str
    """Empty if the record has none."""
    data: bytes
    """The data lines, joined by newlines. The vendor's fold decodes them; they may be malformed."""


class FrameReader:
    """Parses frames from pieces of bytes. A frame is complete with its blank line; `rest` shows an incomplete one.

    A record that is one data line, or one event line and one data line, is split without a loop over its lines.
    """

    __slots__ = ("_data", "_event", "_incomplete_line", "_seen")

    def __init__(self) -> None:
        self._incomplete_line: list[bytes] = []
        """Pieces without a line end, joined when it arrives, so that the bytes of a very long line are copied once."""
        self._event = ""
        self._data: list[bytes] = []
        self._seen = False
        """Whether a record has begun and its blank line has not arrived."""

    def feed(self, piece: bytes) -> list[Frame]:
        """Return the frames that the piece completes."""
        end = piece.rfind(b"\n") + 1
        if not end:
            if piece:
                self._incomplete_line.append(piece)
            return []
        text = b"".join((*self._incomplete_line, piece[:end]))
        self._incomplete_line = [piece[end:]] if end < len(piece) else []
        frames: list[Frame] = []
        blank = b"\r\n\r\n" if b"\r\n\r\n" in text else b"\n\n"
        *records, rest = text.split(blank)
        for record in records:
            frame = None if self._seen else _read_usual(record)
            if frame is not None:
                frames.append(frame)
            else:
                self._take_lines(record + blank, frames)
        if rest:
            self._take_lines(rest, frames)
        return frames

    @property
    def rest(self) -> bool:
        """Whether there are bytes that belong to no complete frame."""
        return bool(self._incomplete_line) or self._seen

    def _take_lines(self, text: bytes, frames: list[Frame]) -> None:
        for line in text.replace(b"\r\n", b"\n").split(b"\n")[:-1]:
            if not line:
                if self._seen and self._data:
                    frames.append(Frame(self._event, b"\n".join(self._data)))
                self._event, self._data, self._seen = "", [], False
                continue
            if line.startswith(b":"):
                continue
            name, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            self._seen = True
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._event = value.decode("utf-8", "replace")


def _read_usual(record: bytes) -> Frame | None:
    """Return the frame of a record that is one data line, after at most one event line; None for any other record."""
    event, end, data = b"", b"", record
    if record.startswith(b"event: "):
        event, end, data = record.partition(b"\n")
    if not data.startswith(b"data: ") or b"\n" in data or b"\r" in record:
        return None
    return Frame(event[7:].decode("utf-8", "replace") if end else "", data[6:])


def read_frames(body: bytes) -> list[tuple[str, bytes]]:
    """Return the complete frames of a body, each as event name and data."""
    return [*FrameReader().feed(body)]
