"""Payloads: the content of a request, independent of any vendor's SDK.

A payload consists of pieces in the vendor's JSON format, each of which belongs to a layer. The pieces are bytes: stored
bytes are sent unchanged, and equal payloads are equal byte for byte.

The static text is sent in several blocks. Providers cache by blocks, so a growing text in one block would be a new
block each time, and its cache would be lost. `split_static` divides it such that the pieces of a text are also the
first pieces of every longer text that begins with it, except for the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from server.conversation.assistant import Tool
from server.conversation.block import JsonValue


class Layer(StrEnum):
    """From the most stable to the most volatile."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    BUFFERED = "buffered"
    TRIGGER = "trigger"


class LayerOrder(StrEnum):
    """The order of the four layers."""

    LAYERED = "layered"
    """Static, dynamic, buffered, trigger."""
    APPEND_ONLY = "append_only"
    """Static, buffered, dynamic, trigger. Everything that was sent is sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMessage:
    """One message object of the vendor's list."""

    layer: Layer
    """In the append-only order a message may contain a dynamic block too; it has the layer of its turn."""
    data: bytes
    """JSON in UTF-8, in the vendor's format."""
    role: str = ""
    """For the manifest: `user`, `model` or `tool`, independent of the vendor's name."""
    seq: int | None = None
    """Its turn; None for a separate dynamic message, and for one that a repair inserted."""
    dynamic: str | None = None
    """The dynamic block inside it, if any."""
    is_signed_summary: bool = False
    """A signed summary of turns before the buffer, see `server.conversation.epoch`."""
    is_continuation: bool = False
    """The paused output that the model should continue, see `server.providers.continuation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One block of a payload: its properties and hash, without its content. Stored with the call.

    Entries are in the order in which providers read and cache: tools, static text, messages. A dynamic block comes
    before the message that contains it.
    """

    layer: Layer
    kind: str
    """`tools`, `static`, `dynamic`, `signed_summary`, `message` or `continuation`."""
    role: str
    """`system`, `user`, `model` or `tool`."""
    hash: str
    """The first 32 hex digits of the SHA-256 of its bytes, without cache markers."""
    length: int
    """Bytes."""
    seq: int | None = None
    marked: bool = False
    """There is a cache marker after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Model settings of an assistant. None for the model's default."""

    max_output_tokens: int | None = None
    thinking: str | None = None
    """A level or effort, `off`, or a number of tokens as text, depending on the model's profile."""
    show_thinking: bool = True
    temperature: float | None = None
    stop_sequences: tuple[str, ...] = ()
    safety: Mapping[str, str] = field(default_factory=dict)
    """Thresholds by category. Only Gemini has them."""
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    """Members that are added to the vendor's request unchanged. Members that Strata sets take precedence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMessages:
    """Consecutive messages of a payload that were joined for an earlier request. They have no cache markers."""

    first: int
    """The index of the first one."""
    count: int
    data: bytes
    """Their bytes, separated by commas."""
    entries: tuple[ManifestEntry, ...]
    """Their blocks in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One request."""

    model: str
    static_text: str
    tools: tuple[Tool, ...]
    messages: tuple[PayloadMessage, ...]
    joined: JoinedMessages | None = None
    """A part of the messages in the form in which it is sent. It saves time and changes nothing."""
    settings: CallSettings = field(default_factory=CallSettings)
    cached_content: str | None = None
    """The name of an explicit cache that replaces the static text and the tools."""
    breakpoints: tuple[int, ...] = ()
    """Indexes of messages after which the provider should cache, if it supports markers."""
    marks_tools: bool = False
    """Whether the provider should also cache after the last tool. It always should after the static text."""
    cache_seconds: int = 300
    """The requested lifetime at the breakpoints."""
    static_cache_seconds: int = 0
    """The requested lifetime after tools and static text; never shorter than at the breakpoints, which come later."""
    requests_diagnosis: bool = False
    """Whether the provider should report why its cache missed, if it can."""
    previous_response_id: str | None = None
    """The response that the diagnosis compares with; None for the first one."""
    continues: tuple[int, ...] = ()
    """Attempts of the same turn, from 1, whose paused output the last message is."""
    container: str | None = None
    """The provider's container that an earlier answer of the conversation used, if the vendor has containers."""
    requests_summary: bool = False
    """Whether the messages are to be summarised in a signed block instead of answered. Only for models that
    support it."""

    @property
    def signed_summary(self) -> PayloadMessage | None:
        """The signed summary that the messages begin with."""
        first = self.messages[0] if self.messages else None
        return first if first is not None and first.is_signed_summary else None

    def join_messages(self, marked: Mapping[int, bytes] | None = None) -> bytes:
        """Return the messages separated by commas. `marked`: replacements by index, for messages with cache markers."""
        marked = marked or {}
        joined = self.joined
        if joined is None or any(joined.first <= index < joined.first + joined.count for index in marked):
            return b",".join(marked.get(index, message.data) for index, message in enumerate(self.messages))
        end = joined.first + joined.count
        before = [marked.get(index, self.messages[index].data) for index in range(joined.first)]
        after = [marked.get(index, self.messages[index].data) for index in range(end, len(self.messages))]
        return b",".join([*before, joined.data, *after])


PIECE_CHARACTERS: Final = 16_384
"""The minimum length of a piece, which ends at the end of its line. Must not change, because past requests are rebuilt
with it."""
_STATIC_MARKS: Final = 2


def split_static(text: str) -> tuple[str, ...]:
    """Divide the text into pieces. Empty for an empty text."""
    pieces: list[str] = []
    start = 0
    while (cut := text.find("\n", start + PIECE_CHARACTERS - 1) + 1) and cut < len(text):
        pieces.append(text[start:cut])
        start = cut
    return (*pieces, text[start:]) if text else ()


def count_static_breakpoints(piece_count: int, limit: int) -> int:
    """Return the number of cache markers in the static text: after its last piece, and after the one before it, which
    is still there when the text has grown.
    """
    return min(piece_count, _STATIC_MARKS, limit)
