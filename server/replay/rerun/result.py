"""Results of replays: what became of each answer of a candidate, beside the one that was recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias

from server.conversation.block import Block
from server.conversation.turn import StopReason
from server.conversation.usage import Usage

AnswerPlace: TypeAlias = tuple[int, int]
"""The number of an item, and a place in it."""
CallPlace: TypeAlias = tuple[int, int]
"""The turn of a call, below zero for those of no turn, and its attempt."""


class Outcome(StrEnum):
    """What became of one answer."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"
    """There is nothing that it could be compared with: `note` says why."""
    FAILED = "failed"
    """The candidate gave none."""


class DivergenceKind(StrEnum):
    """In what two answers differ."""

    TEXT = "text"
    TOOL_NAME = "tool_name"
    TOOL_ARGUMENTS = "tool_arguments"
    TOOL_MISSING = "tool_missing"
    """A call that was recorded was not made, or one more was."""
    STOP_REASON = "stop_reason"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """What an answer took, whoever gave it."""

    stop_reason: StopReason | None = None
    error_code: str | None = None
    usage: Usage = field(default_factory=Usage)
    cost_usd: Decimal | None = None
    latency_ms: int | None = None
    """From the request to the last byte, of the call that gave it."""
    first_byte_ms: int | None = None

    @property
    def output_tokens(self) -> int:
        """Including reasoning tokens, as in the report."""
        return self.usage.output_tokens + self.usage.reasoning_tokens

    @property
    def cache_share(self) -> float | None:
        """The part of the input that came from the cache; None where there was no input."""
        total = self.usage.input_tokens
        return self.usage.cache_read_tokens / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionResult:
    """How an assertion went."""

    name: str
    passed: bool
    message: str = ""
    """Why it did not pass."""
    error_code: str | None = None
    """If it could not be decided whether it holds: one of `evaluation_failed`, `evaluation_timed_out`,
    `evaluation_too_large` and `not_evaluated`. None if it holds or does not.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeResult:
    """What the judge said."""

    score: float | None
    """From 0 to 1; None where it gave none."""
    reason: str = ""
    error_code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What became of one answer of the candidate's. Its blocks are apart: see `Replays.load_answers`."""

    place: int
    """1, 2, 3 within the item: the order in which it was asked."""
    source_seq: int | None
    """The recorded answer beside it; None where a free-running candidate is where nobody was."""
    replay_seq: int | None
    """The turn of the replay conversation whose calls were made for it; None where none was made."""
    attempt: int | None
    """The call that gave it."""
    outcome: Outcome
    kinds: tuple[DivergenceKind, ...] = ()
    similarity: float | None = None
    """Of the texts, from 0 to 1; None where they were not compared."""
    severity: float = 0.0
    """From 0, the same, to 1: worst first is by this."""
    note: str | None = None
    """A short word on what is special, such as why nothing was compared."""
    recorded: AnswerFacts | None = None
    candidate: AnswerFacts | None = None
    assertions: Sequence[AssertionResult] = ()
    judge: JudgeResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """A result in a list."""

    number: int
    """The item's."""
    conversation_id: str
    repetition: int
    replay_conversation_id: str | None
    result: TurnResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBlocks:
    """What was said in the place of a result."""

    task: tuple[Block, ...]
    """What the user had asked last; empty where nobody has."""
    recorded: tuple[Block, ...] | None
    """None where there is no recorded answer."""
    candidate: tuple[Block, ...]


class ResultOrder(StrEnum):
    """How results are listed."""

    PLACE = "place"
    """Item by item, as they were asked."""
    WORST = "worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFilter:
    """Which results. What is None does not matter."""

    number: int | None = None
    first_place: int | None = None
    """From this one on."""
    outcome: Outcome | None = None
    kind: DivergenceKind | None = None
    has_failed_assertion: bool = False
    order: ResultOrder = ResultOrder.PLACE
