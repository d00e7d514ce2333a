"""Epochs and segments: the frozen texts of the static layer.

The static text of an epoch is its base text followed by the segments of its generation up to `segment_count`. Within a
generation segments are only added, so the text of one epoch is a prefix of the next and stays in the provider's cache.
"""

from dataclasses import dataclass
from enum import StrEnum


class EpochReason(StrEnum):
    """Why the static layer changed."""

    STARTED = "started"
    ASSISTANT_CHANGED = "assistant_changed"
    ARGUMENTS_CHANGED = "arguments_changed"
    COMPACTED = "compacted"
    COMPACTION_UNDONE = "compaction_undone"
    SUMMARISED = "summarised"
    OLDEST_LEFT_OUT = "oldest_left_out"
    """A summary was wanted and could not be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The time in which the static layer does not change."""

    number: int
    reason: EpochReason
    assistant_version: int
    generation: int
    segment_count: int
    base_text: str
    static_hash: bytes
    """SHA-256 of the whole static text: what a process holds it by."""
    prefix_hash: bytes
    """SHA-256 of the static text and the tools: thinking on a prefix-bound model is valid behind this one alone."""
    arguments_hash: bytes
    """SHA-256 of the conversation's args that the text was rendered with: others begin a new epoch."""
    template_hash: bytes
    """SHA-256 of the template's source; the source itself is archived under it."""
    buffer_start_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A frozen piece of compacted history."""

    generation: int
    position: int
    first_seq: int
    last_seq: int
    text: str
    token_count: int
    summarises: tuple[int, int] | None = None
    """For a summary: the generation it replaces and how many of its segments."""
