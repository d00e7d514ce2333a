"""Comparison of a candidate's answer with the recorded one.

Texts are compared by their words. Tool calls are compared by name and canonical arguments; the order of calls in one
answer does not matter. Thinking is not compared: it differs in every run, and users do not see it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.block import Block, TextBlock, ToolCallBlock
from server.conversation.turn import StopReason
from server.replay.rerun.recorded_tool_results import canonical_arguments
from server.replay.rerun.result import DivergenceKind, Outcome
from server.replay.rerun.similarity import measure_words, split_words

_SPANS: Final = (
    (DivergenceKind.TOOL_NAME, (0.75, 0.95)),
    (DivergenceKind.TOOL_MISSING, (0.75, 0.95)),
    (DivergenceKind.TOOL_ARGUMENTS, (0.55, 0.75)),
    (DivergenceKind.STOP_REASON, (0.4, 0.55)),
    (DivergenceKind.TEXT, (0.0, 0.4)),
)
"""The worst kind first, with its severity for equal texts and for texts without a common word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContent:
    """The part of an answer that is compared."""

    blocks: tuple[Block, ...]
    stop_reason: StopReason | None

    @property
    def text(self) -> str:
        """Its text blocks, joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def calls(self) -> tuple[ToolCallBlock, ...]:
        """Its tool calls in order."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two answers differ, and how much."""

    outcome: Outcome
    kinds: tuple[DivergenceKind, ...]
    similarity: float
    severity: float


def compare_answers(recorded: AnswerContent, candidate: AnswerContent) -> Comparison:
    """Compare two answers in bounded time. The kinds are ordered by severity."""
    words, others = split_words(recorded.text), split_words(candidate.text)
    similarity = 1.0 if words == others else measure_words(words, others)
    kinds = tuple(_find_kinds(recorded, candidate, same_words=words == others))
    return Comparison(
        outcome=Outcome.DIFFERENT if kinds else Outcome.SAME,
        kinds=kinds,
        similarity=similarity,
        severity=_rate(kinds, similarity),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPair:
    """A recorded tool call and the candidate's counterpart; one of them may be missing."""

    recorded: ToolCallBlock | None
    candidate: ToolCallBlock | None

    @property
    def is_same(self) -> bool:
        """Whether both have the same name and arguments."""
        if self.recorded is None or self.candidate is None:
            return False
        return _signature(self.recorded) == _signature(self.candidate)


def pair_calls(recorded: Sequence[ToolCallBlock], candidate: Sequence[ToolCallBlock]) -> list[CallPair]:
    """Pair equal calls first, then calls of the same tool. Calls without a counterpart come last."""
    unpaired = list(candidate)
    counterparts: dict[int, ToolCallBlock] = {}
    for matches in (lambda a, b: _signature(a) == _signature(b), lambda a, b: a.name == b.name):
        for index, call in enumerate(recorded):
            found = next((other for other in unpaired if matches(call, other)), None)
            if index not in counterparts and found is not None:
                counterparts[index] = found
                unpaired.remove(found)
    pairs = [CallPair(recorded=call, candidate=counterparts.get(index)) for index, call in enumerate(recorded)]
    return pairs + [CallPair(recorded=None, candidate=call) for call in unpaired]


def _signature(call: ToolCallBlock) -> tuple[str, str]:
    return call.name, canonical_arguments(call.arguments)


def _find_kinds(recorded: AnswerContent, candidate: AnswerContent, *, same_words: bool) -> Iterator[DivergenceKind]:
    yield from _compare_calls(recorded.calls, candidate.calls)
    if recorded.stop_reason is not candidate.stop_reason:
        yield DivergenceKind.STOP_REASON
    if not same_words:
        yield DivergenceKind.TEXT


def _compare_calls(recorded: Sequence[ToolCallBlock], candidate: Sequence[ToolCallBlock]) -> Iterator[DivergenceKind]:
    """Yield `tool_name` if a call was replaced by one of another tool, and `tool_missing` if the number differs."""
    names, others = Counter(call.name for call in recorded), Counter(call.name for call in candidate)
    missing, added = (names - others).total(), (others - names).total()
    if missing and added:
        yield DivergenceKind.TOOL_NAME
    if missing != added:
        yield DivergenceKind.TOOL_MISSING
    if _arguments_differ(recorded, candidate):
        yield DivergenceKind.TOOL_ARGUMENTS


def _arguments_differ(recorded: Sequence[ToolCallBlock], candidate: Sequence[ToolCallBlock]) -> bool:
    """Return whether calls of a tool that both answers call have different arguments."""
    for name in {call.name for call in recorded} & {call.name for call in candidate}:
        one = Counter(canonical_arguments(call.arguments) for call in recorded if call.name == name)
        other = Counter(canonical_arguments(call.arguments) for call in candidate if call.name == name)
        if (one - other) and (other - one):
            return True
    return False


def _rate(kinds: Sequence[DivergenceKind], similarity: float) -> float:
    """Return the severity from 0 to 1. A different action is worse than a different wording."""
    if not kinds:
        return 0.0
    least, most = next(span for kind, span in _SPANS if kind in kinds)
    return least + (most - least) * (1.0 - similarity)
