"""Server-sent events: an incremental parser from bytes to frames.

Pure. The frames do not depend on how the bytes are divided into pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One record of the stream."""

    event: str
    """Empty if the record has none."""
    data: bytes
    """The data lines, joined by newlines. The vendor's fold decodes them; they may be malformed."""


class FrameReader:
    """Parses frames from pieces of bytes. A frame is complete with its blank line; `rest` shows an incomplete one."""

    __slots__ = ("_buffer", "_data", "_event", "_searched", "_seen")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._event = ""
        self._data: list[bytes] = []
        self._seen = False
        self._searched = 0
        """How much of the buffer has been searched for a line end, so that a very long line is searched once."""

    def feed(self, piece: bytes) -> Iterator[Frame]:
        """Yield the frames that the piece completes."""
        self._buffer += piece
        start, search = 0, self._searched
        while (end := self._buffer.find(b"\n", search)) >= 0:
            line = bytes(self._buffer[start:end])
            start = search = end + 1
            frame = self._take_line(line[:-1] if line.endswith(b"\r") else line)
            if frame is not None:
                yield frame
        del self._buffer[:start]
        self._searched = len(self._buffer)

    @property
    def rest(self) -> bool:
        """Whether there are bytes that belong to no complete frame."""
        return bool(self._buffer) or self._seen

    def _take_line(self, line: bytes) -> Frame | None:
        if not line:
            return self._finish()
        if line.startswith(b":"):
            return None
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        self._seen = True
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        return None

    def _finish(self) -> Frame | None:
        event, data, seen = self._event, self._data, self._seen
        self._event, self._data, self._seen = "", [], False
        return Frame(event=event, data=b"\n".join(data)) if seen and data else None


def read_frames(body: bytes) -> list[tuple[str, bytes]]:
    """Return the complete frames of a body, each as event name and data."""
    return [(frame.event, frame.data) for frame in FrameReader().feed(body)]
