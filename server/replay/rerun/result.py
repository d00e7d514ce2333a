"""Results of replays: one per answer of the candidate, compared with the recorded answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias

from server.conversation.block import Block
from server.conversation.turn import StopReason
from server.conversation.usage import Usage

AnswerPosition: TypeAlias = tuple[int, int]
"""The number of an item, and the position of a result in it."""
CallPosition: TypeAlias = tuple[int, int]
"""The turn of a call, negative for background calls, and its attempt."""


class Outcome(StrEnum):
    """The outcome of one answer."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"
    """There is no recorded answer to compare with: `note` says why."""
    FAILED = "failed"
    """The candidate's call failed."""


class DivergenceKind(StrEnum):
    """How two answers differ."""

    TEXT = "text"
    TOOL_NAME = "tool_name"
    TOOL_ARGUMENTS = "tool_arguments"
    TOOL_MISSING = "tool_missing"
    """A recorded call was not made, or an additional one was."""
    STOP_REASON = "stop_reason"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """Stop reason, usage, cost and times of an answer."""

    stop_reason: StopReason | None = None
    error_code: str | None = None
    usage: Usage = field(default_factory=Usage)
    cost_usd: Decimal | None = None
    latency_ms: int | None = None
    """From the request to the last byte, of the call that produced it."""
    first_byte_ms: int | None = None

    @property
    def output_tokens(self) -> int:
        """Including reasoning tokens, as in the report."""
        return self.usage.output_tokens + self.usage.reasoning_tokens

    @property
    def cache_share(self) -> float | None:
        """The share of the input that was read from the cache; None without input."""
        total = self.usage.input_tokens
        return self.usage.cache_read_tokens / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionResult:
    """The result of an assertion."""

    name: str
    passed: bool
    message: str = ""
    """Why it did not pass."""
    error_code: str | None = None
    """One of `evaluation_failed`, `evaluation_timed_out`, `evaluation_too_large` and `not_evaluated` if the assertion
    could not be evaluated, else None.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeResult:
    """The judge's rating."""

    score: float | None
    """From 0 to 1; None if the judge returned none."""
    reason: str = ""
    error_code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """The result of one answer, without its blocks: see `Replays.load_answers`."""

    position: int
    """1, 2, 3, in the order of the item's requests."""
    source_seq: int | None
    """The recorded answer; None if a free-running candidate took a turn that was not recorded."""
    replay_seq: int | None
    """The turn of the replay conversation; None if no call was made."""
    attempt: int | None
    """The call that produced the answer."""
    outcome: Outcome
    kinds: tuple[DivergenceKind, ...] = ()
    similarity: float | None = None
    """Of the texts, from 0 to 1; None if they were not compared."""
    severity: float = 0.0
    """From 0, the same, to 1. Results are ordered by this, worst first."""
    note: str | None = None
    """A short code, such as the reason why nothing was compared."""
    recorded: AnswerFacts | None = None
    candidate: AnswerFacts | None = None
    assertions: Sequence[AssertionResult] = ()
    judge: JudgeResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """A result with its item."""

    number: int
    """Of the item."""
    conversation_id: str
    repetition: int
    replay_conversation_id: str | None
    result: TurnResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBlocks:
    """The blocks of the task and of both answers of a result."""

    task: tuple[Block, ...]
    """The user task that both answer; empty if there is none."""
    recorded: tuple[Block, ...] | None
    """None if there is no recorded answer."""
    candidate: tuple[Block, ...]


class ResultOrder(StrEnum):
    """The order of a list of results."""

    POSITION = "position"
    """By item and position."""
    WORST = "worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFilter:
    """Which results are listed. None means any."""

    number: int | None = None
    first_position: int | None = None
    """Inclusive."""
    outcome: Outcome | None = None
    kind: DivergenceKind | None = None
    has_failed_assertion: bool = False
    order: ResultOrder = ResultOrder.POSITION
