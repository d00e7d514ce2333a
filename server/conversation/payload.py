"""Payloads: what is sent, before any vendor's SDK has seen it.

A payload is made of pieces in the vendor's own JSON, each of which belongs to a layer. The pieces are bytes: what was
stored is what leaves, and equal payloads are equal byte for byte.
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
    """In which order the four layers stand."""

    LAYERED = "layered"
    """Static, dynamic, buffered, trigger."""
    APPEND_ONLY = "append_only"
    """Static, buffered, dynamic, trigger; what was sent once is sent for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMessage:
    """One message object of the vendor's list."""

    layer: Layer
    """In the append-only order a message may hold a dynamic block too; it counts as what it answers or asks."""
    data: bytes
    """JSON in UTF-8, as the vendor speaks it."""
    role: str = ""
    """Who speaks, for the manifest: `user`, `model` or `tool`, whatever the vendor calls it."""
    seq: int | None = None
    """The turn that it is made of; None for a dynamic message of its own, and for one that a repair put in."""
    dynamic: str | None = None
    """The dynamic block inside it, if there is one."""
    is_signed_summary: bool = False
    """It is a signed block that stands for turns before the buffer, see `server.conversation.epoch`."""
    is_continuation: bool = False
    """It is what the model had said when it paused, for it to go on, see `server.providers.continuation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One block of a payload, by what it is and not by what it says. Stored with the call.

    In the order in which providers read and cache: the tools, the static text, then message by message; a dynamic
    block stands before the message that holds it.
    """

    layer: Layer
    kind: str
    """`tools`, `static`, `dynamic`, `signed_summary`, `message` or `continuation`."""
    role: str
    """`system`, `user`, `model` or `tool`."""
    hash: str
    """The first 32 hex digits of the SHA-256 of its bytes, without any cache marker."""
    length: int
    """Bytes."""
    seq: int | None = None
    marked: bool = False
    """A cache marker stands behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What an assistant asks of a model beside the prompt. None leaves it to the model."""

    max_output_tokens: int | None = None
    thinking: str | None = None
    """A level or an effort, `off`, or a number of tokens as text, as the model's profile has it."""
    show_thinking: bool = True
    temperature: float | None = None
    stop_sequences: tuple[str, ...] = ()
    safety: Mapping[str, str] = field(default_factory=dict)
    """Category to threshold, where the vendor has such; Gemini does."""
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    """Members for the vendor's request as they are; what Strata sets itself wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One request."""

    model: str
    static_text: str
    tools: tuple[Tool, ...]
    messages: tuple[PayloadMessage, ...]
    settings: CallSettings = field(default_factory=CallSettings)
    cached_content: str | None = None
    """Name of an explicit cache that stands for the static text and the tools."""
    breakpoints: tuple[int, ...] = ()
    """Indexes of messages behind which the provider should cache, where it takes markers."""
    marks_tools: bool = False
    """Whether it should cache behind the last tool too; behind the static text it always should."""
    cache_seconds: int = 300
    """Lifetime that is asked for at the breakpoints."""
    static_cache_seconds: int = 0
    """Lifetime behind the tools and the static text; never shorter than at the breakpoints, which stand behind them."""
    requests_diagnosis: bool = False
    """Whether the provider should say why its cache missed, where it can."""
    previous_response_id: str | None = None
    """The answer that it should compare with; None: the first that it can."""
    continues: tuple[int, ...] = ()
    """Attempts of the same turn, from 1, whose paused answer the last message is."""
    container: str | None = None
    """The provider's container that an earlier answer of the conversation used, where the vendor has such."""
    requests_summary: bool = False
    """Whether the messages are to be summed up in a signed block, and not answered. Only for models that do it."""

    @property
    def signed_summary(self) -> PayloadMessage | None:
        """The signed block that the messages begin with."""
        first = self.messages[0] if self.messages else None
        return first if first is not None and first.is_signed_summary else None


PIECE_CHARACTERS: Final = 16_384
"""A piece is at least so long and ends with its line. Never changed: past requests are rebuilt with it."""
_STATIC_MARKS: Final = 2


def split_static(text: str) -> tuple[str, ...]:
    """The pieces, which together are the text. None for an empty one."""
    pieces: list[str] = []
    start = 0
    while (cut := text.find("\n", start + PIECE_CHARACTERS - 1) + 1) and cut < len(text):
        pieces.append(text[start:cut])
        start = cut
    return (*pieces, text[start:]) if text else ()


def count_static_breakpoints(piece_count: int, limit: int) -> int:
    """How many markers the static text has: behind its last piece, and behind the one before it, the last that is still
    there when the text has grown.
    """
    return min(piece_count, _STATIC_MARKS, limit)
