"""What a verification finds: how much of what is stored holds, and where the rest differs first."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Final

from server.conversation.block import JsonValue

UNREADABLE: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a damaged value may raise: it parses no longer, or parses as something else."""


def tell_unreadable(what: str, error: Exception) -> str:
    """A sentence for what has raised one of these."""
    return f"{what} cannot be read ({type(error).__name__})."


class Subject(StrEnum):
    """What does not hold."""

    ANSWER = "answer"
    """The raw bytes, read again, say something else than what was stored of them."""
    REQUEST = "request"
    """The request, made again, is another one."""
    BYTES = "bytes"
    """Something stored cannot be read, is missing, or is not what its own hash says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Something that does not hold, with its first difference."""

    conversation_id: str
    turn_seq: int | None
    """Below zero for a call of no turn, as the call has it; None where it belongs to no call."""
    attempt: int | None
    subject: Subject
    place: str
    """Where: a path into the answer, a block of the request, a column."""
    note: str
    """What is wrong, as a sentence."""
    stored: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much was looked at. A call is in `call_count` once, whatever was compared of it."""

    conversation_count: int = 0
    call_count: int = 0
    request_count: int = 0
    """Calls whose request was made again and compared."""
    answer_count: int = 0
    """Calls whose bytes were read again and compared."""
    without_bytes_count: int = 0
    """Calls whose raw bytes retention has removed."""
    running_count: int = 0
    """Calls that have not ended, or whose process died before it could say; they have no answer to compare."""
    unknown_count: int = 0
    """Calls to providers that this release does not know."""
    raw_bytes: int = 0
    """Of the answers that were read again, before compression."""
    mismatch_count: int = 0
    unknown_providers: Mapping[str, int] = field(default_factory=dict)
    """Their names, each with its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What came of some conversations."""

    counts: Counts = field(default_factory=Counts)
    mismatches: tuple[Mismatch, ...] = ()


def add_counts(one: Counts, other: Counts) -> Counts:
    """Both together."""
    names = [each.name for each in fields(Counts) if each.name != "unknown_providers"]
    providers = {
        name: one.unknown_providers.get(name, 0) + other.unknown_providers.get(name, 0)
        for name in {**one.unknown_providers, **other.unknown_providers}
    }
    return Counts(**{name: getattr(one, name) + getattr(other, name) for name in names}, unknown_providers=providers)


def join_verified(one: Verified, other: Verified, *, limit: int) -> Verified:
    """Both together. More than `limit` mismatches are counted, and not kept."""
    return Verified(
        counts=add_counts(one.counts, other.counts), mismatches=(*one.mismatches, *other.mismatches)[:limit]
    )


def verified_to_json(verified: Verified) -> dict[str, JsonValue]:
    """As a report has it."""
    return {"counts": asdict(verified.counts), "mismatches": [asdict(mismatch) for mismatch in verified.mismatches]}


def verified_from_json(stored: Mapping[str, JsonValue]) -> Verified:
    """The inverse of `verified_to_json`."""
    mismatches: Sequence[Mapping[str, JsonValue]] = stored["mismatches"]
    return Verified(
        counts=Counts(**stored["counts"]),
        mismatches=tuple(Mismatch(**{**each, "subject": Subject(each["subject"])}) for each in mismatches),
    )
