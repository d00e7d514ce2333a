"""Server-sent events as the standard has them: bytes to frames, incrementally.

Pure. However the bytes are cut into pieces, the frames are the same. Lines end with LF, CR LF or CR; a record that no
blank line ended is none.
"""

import re
from dataclasses import dataclass
from typing import Final

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One record."""

    id: str
    """The newest id so far; empty where none has come."""
    event: str
    """Empty where the record names none."""
    data: str
    """The data lines, joined by newlines."""


class FrameReader:
    """Collects bytes and gives frames."""

    __slots__ = ("_after_cr", "_at_start", "_buffer", "_data", "_event", "_id", "comment_count")

    def __init__(self) -> None:
        self.comment_count = 0
        """Comments are how a server says that it is still there."""
        self._buffer = bytearray()
        self._at_start = True
        self._after_cr = False
        self._id = ""
        self._event = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that the piece completes."""
        if not piece:
            return []
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the second half of a line end whose first half ended the line already
        self._after_cr = False
        # Never more than is new is searched: a long line may come in many pieces.
        searched = len(self._buffer)
        self._buffer += piece
        frames = []
        start = 0
        for end in list(_LINE_END.finditer(self._buffer, searched)):
            self._after_cr = end.group() == b"\r" and end.end() == len(self._buffer)
            frame = self._take_line(bytes(self._buffer[start : end.start()]))
            start = end.end()
            if frame is not None:
                frames.append(frame)
        del self._buffer[:start]
        return frames

    def _take_line(self, line: bytes) -> Frame | None:
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._finish()
        if line.startswith(b":"):
            self.comment_count += 1
            return None
        name, _, rest = line.partition(b":")
        value = rest.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value
        elif name == b"id" and "\0" not in value:
            self._id = value
        return None

    def _finish(self) -> Frame | None:
        event, data = self._event, self._data
        self._event, self._data = "", []
        return Frame(id=self._id, event=event, data="\n".join(data)) if data else None
