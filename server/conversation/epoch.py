"""Epochs and segments: the frozen texts of the static layer.

An epoch is a period in which the static layer does not change. Its static text is the base text, followed by the first
`segment_count` segments of its generation. Within a generation segments are only appended, so the text of one epoch is
a prefix of the next one's and stays in the provider's cache.

On models that sign summaries, an epoch may have a signed summary: the first message, which replaces turns that are
neither in the static text nor in the buffer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from server.conversation.block import JsonValue


class EpochReason(StrEnum):
    """Why the epoch began."""

    STARTED = "started"
    ASSISTANT_CHANGED = "assistant_changed"
    ARGUMENTS_CHANGED = "arguments_changed"
    COMPACTED = "compacted"
    SIGNED = "signed"
    """Turns were replaced by a signed summary."""
    COMPACTED_UNSIGNED = "compacted_unsigned"
    """A signed summary was not available: the turns became a segment."""
    SUMMARY_INLINED = "summary_inlined"
    """The text of a signed summary became a segment, because the provider rejected it or the window ran short."""
    SIGNATURES_REJECTED = "signatures_rejected"
    """The provider rejected signatures of the history. The static text is the same; the signatures are left out from
    now on."""
    COMPACTION_UNDONE = "compaction_undone"
    SUMMARISED = "summarised"
    OLDEST_LEFT_OUT = "oldest_left_out"
    """A summary was needed and not available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedSummary:
    """A block that the provider signed, in place of the oldest turns."""

    data: bytes
    """The message that contains it, in the provider's format. It is sent first, unchanged."""
    start_seq: int
    """The first turn that it replaces; the last is the one before the buffer."""
    text: str
    """Its content as a segment, for when the block can no longer be used."""
    token_count: int
    kept_prefix_hashes: tuple[bytes, ...] = ()
    """Thinking created with one of these prefixes is valid after the block too: those of the epochs in which the block
    was created, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """What a provider has rejected of a history. It is not sent again."""

    signatures_through_seq: int
    """Responses up to this turn are sent without signatures and thinking."""
    calls_through_seq: int = 0
    """Up to this turn, calls and results are sent as text too, because the provider rejected them without a
    signature."""


NOTHING_REJECTED: Final = Rejected(signatures_through_seq=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The period in which the static layer does not change."""

    number: int
    reason: EpochReason
    assistant_version: int
    generation: int
    segment_count: int
    base_text: str
    static_hash: bytes
    """SHA-256 of the whole static text, by which it is cached."""
    prefix_hash: bytes
    """SHA-256 of static text and tools. On a prefix-bound model, thinking is valid only with the prefix that it was
    created with.

    With a signed summary the hash also covers the epoch that introduced it, because thinking created after the block is
    not valid when the turns that it replaces are restored."""
    arguments_hash: bytes
    """SHA-256 of the conversation's args that the text was rendered with. A change begins a new epoch."""
    template_hash: bytes
    """SHA-256 of the template's source, which is archived under it."""
    buffer_start_seq: int
    signed_summary: SignedSummary | None = None
    """The message before the buffer; None if the buffer begins with a turn."""
    rejected: Mapping[str, Rejected] = field(default_factory=dict)
    """By provider. Later epochs have at least the same, because what was left out once must not be sent again."""
    args: Mapping[str, JsonValue] | None = None
    """The conversation's args that the base text was rendered with. None if they were not stored, and for a new epoch
    whose hash equals that of the epoch before it. Only loaded for past epochs."""


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
    """For a summary: the generation that it replaces, and how many of its segments."""


def inline_summary(epoch: Epoch) -> Segment | None:
    """Return the segment that replaces the epoch's signed summary, after all other segments. None if there is no signed
    summary.

    Its position is free: an epoch gets a signed summary only if the next position of its generation was never written.
    """
    if epoch.signed_summary is None:
        return None
    return Segment(
        generation=epoch.generation,
        position=epoch.segment_count,
        first_seq=epoch.signed_summary.start_seq,
        last_seq=epoch.buffer_start_seq - 1,
        text=epoch.signed_summary.text,
        token_count=epoch.signed_summary.token_count,
    )
