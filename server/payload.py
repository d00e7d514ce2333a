"""Payloads: what is sent, before any vendor's SDK has seen it.

A payload is made of pieces in the vendor's own JSON, each of which belongs to a layer. The pieces are bytes: what was
stored is what leaves, and equal payloads are equal byte for byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from server.assistant import Tool
from server.block import JsonValue


class Layer(StrEnum):
    """From the most stable to the most volatile."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    BUFFERED = "buffered"
    TRIGGER = "trigger"


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMessage:
    """One message object of the vendor's list."""

    layer: Layer
    data: bytes
    """JSON in UTF-8, as the vendor speaks it."""


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
    cache_seconds: int = 300
    """Lifetime that is asked for at the breakpoints."""
