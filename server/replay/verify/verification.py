"""The result of a verification: counts, and mismatches with their first difference."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Final

from server.conversation.block import JsonValue

UNREADABLE: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions that reading a damaged value may raise: it does not parse, or parses as something else."""


def describe_unreadable(what: str, error: Exception) -> str:
    """Return a sentence about a value whose reading raised one of `UNREADABLE`."""
    return f"{what} cannot be read ({type(error).__name__})."


class Subject(StrEnum):
    """The kind of a mismatch."""

    ANSWER = "answer"
    """The stored answer differs from the raw bytes, parsed again."""
    REQUEST = "request"
    """The rebuilt request differs from the one that was sent."""
    BYTES = "bytes"
    """A stored value cannot be read, is missing, or does not match its hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A mismatch, with its first difference."""

    conversation_id: str
    turn_seq: int | None
    """Negative for a background call; None if the mismatch belongs to no call."""
    attempt: int | None
    subject: Subject
    position: str
    """A path into the answer, a block of the request, or a column."""
    note: str
    """A sentence."""
    stored: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much was checked. `call_count` counts each call once, regardless of what was compared."""

    conversation_count: int = 0
    call_count: int = 0
    request_count: int = 0
    """Calls whose request was rebuilt and compared."""
    answer_count: int = 0
    """Calls whose raw bytes were parsed again and compared."""
    without_bytes_count: int = 0
    """Calls whose raw bytes retention has removed."""
    running_count: int = 0
    """Calls that have not ended, or whose process died before it could record the end. They have no answer."""
    unknown_count: int = 0
    """Calls to providers that this release does not support."""
    raw_bytes: int = 0
    """The size of the parsed answers, before compression."""
    mismatch_count: int = 0
    unknown_providers: Mapping[str, int] = field(default_factory=dict)
    """The number of calls by provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result for some conversations."""

    counts: Counts = field(default_factory=Counts)
    mismatches: tuple[Mismatch, ...] = ()


def add_counts(one: Counts, other: Counts) -> Counts:
    """Add all counts."""
    names = [each.name for each in fields(Counts) if each.name != "unknown_providers"]
    providers = {
        name: one.unknown_providers.get(name, 0) + other.unknown_providers.get(name, 0)
        for name in {**one.unknown_providers, **other.unknown_providers}
    }
    return Counts(**{name: getattr(one, name) + getattr(other, name) for name in names}, unknown_providers=providers)


def join_verified(one: Verified, other: Verified, *, limit: int) -> Verified:
    """Add two results. At most `limit` mismatches are kept; all are counted."""
    return Verified(
        counts=add_counts(one.counts, other.counts), mismatches=(*one.mismatches, *other.mismatches)[:limit]
    )


def verified_to_json(verified: Verified) -> dict[str, JsonValue]:
    """Encode a result as in a report."""
    return {"counts": asdict(verified.counts), "mismatches": [asdict(mismatch) for mismatch in verified.mismatches]}


def verified_from_json(stored: Mapping[str, JsonValue]) -> Verified:
    """The inverse of `verified_to_json`."""
    mismatches: Sequence[Mapping[str, JsonValue]] = stored["mismatches"]
    return Verified(
        counts=Counts(**stored["counts"]),
        mismatches=tuple(Mismatch(**{**each, "subject": Subject(each["subject"])}) for each in mismatches),
    )
