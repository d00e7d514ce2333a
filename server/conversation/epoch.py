"""Epochs and segments: the frozen texts of the static layer.

The static text of an epoch is its base text followed by the segments of its generation up to `segment_count`. Within a
generation segments are only added, so the text of one epoch is a prefix of the next and stays in the provider's cache.

On models that sign summaries of their own an epoch may have a signed summary: the first message, which stands for
turns that are neither in the static text nor in the buffer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from server.conversation.block import JsonValue


class EpochReason(StrEnum):
    """Why the static layer changed."""

    STARTED = "started"
    ASSISTANT_CHANGED = "assistant_changed"
    ARGUMENTS_CHANGED = "arguments_changed"
    COMPACTED = "compacted"
    SIGNED = "signed"
    """Turns gave way to a block that the provider has signed."""
    COMPACTED_UNSIGNED = "compacted_unsigned"
    """A signed block was wanted and could not be had: the turns became a segment."""
    SUMMARY_INLINED = "summary_inlined"
    """What a signed block tells is text of the history now: the provider refused it, or the window ran short."""
    SIGNATURES_REJECTED = "signatures_rejected"
    """The provider rejected signatures of the history. The static text is the same; they are left out from now on."""
    COMPACTION_UNDONE = "compaction_undone"
    SUMMARISED = "summarised"
    OLDEST_LEFT_OUT = "oldest_left_out"
    """A summary was wanted and could not be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedSummary:
    """A signed block in the place of the oldest turns, on the models that give one."""

    data: bytes
    """The message that holds it, as the provider spoke it: sent first, byte for byte."""
    start_seq: int
    """The first turn that it stands for; the last is the one before the buffer."""
    text: str
    """What it tells, as the segment that takes its place where the block is worth nothing any more."""
    token_count: int
    kept_prefix_hashes: tuple[bytes, ...] = ()
    """Thinking that was made behind one of these prefixes is valid behind the block too: those of the epochs that the
    block was made in, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """What one provider has rejected of a history, and is not sent again."""

    signatures_through_seq: int
    """Answers up to this turn go back without signatures and thinking."""
    calls_through_seq: int = 0
    """Up to this turn also the calls and their results are sent as text: the provider rejected them without a
    signature too."""


NOTHING_REJECTED: Final = Rejected(signatures_through_seq=0)


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
    """SHA-256 of the static text and the tools: thinking on a prefix-bound model is valid behind this one alone.

    With a signed summary also of the epoch that the signed summary began with: what was made behind a signed block is
    not valid once the turns that it stands for are back.
    """
    arguments_hash: bytes
    """SHA-256 of the conversation's args that the text was rendered with: others begin a new epoch."""
    template_hash: bytes
    """SHA-256 of the template's source; the source itself is archived under it."""
    buffer_start_seq: int
    signed_summary: SignedSummary | None = None
    """Stands before the buffer; None where the buffer begins with a turn."""
    rejected: Mapping[str, Rejected] = field(default_factory=dict)
    """By provider. Every later epoch has at least the same: what was left out once must not come back."""
    args: Mapping[str, JsonValue] | None = None
    """The conversation's args that the base text was rendered with. None where they were not kept, and for an epoch
    that is to begin: those of the one before, where the hash is the same. Only past ones are read with theirs."""


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


def inline_summary(epoch: Epoch) -> Segment | None:
    """The segment that takes the place of the epoch's signed summary, behind all others. None where there is no signed
    summary.

    No segment was ever written there: whoever gives an epoch a signed summary sees to that.
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
