"""Two answers beside each other: what a candidate said, and what was recorded.

Texts are compared by their words, tool calls by name and canonical arguments, in any order among those that were made
together. Thinking is not compared: no two runs think alike, and nobody is told what was thought.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.block import Block, TextBlock, ToolCallBlock
from server.conversation.turn import StopReason
from server.replay.rerun.recorded_results import canonical_arguments
from server.replay.rerun.result import DivergenceKind, Outcome
from server.replay.rerun.similarity import measure_words, split_words

_SPANS: Final = (
    (DivergenceKind.TOOL_NAME, (0.75, 0.95)),
    (DivergenceKind.TOOL_MISSING, (0.75, 0.95)),
    (DivergenceKind.TOOL_ARGUMENTS, (0.55, 0.75)),
    (DivergenceKind.STOP_REASON, (0.4, 0.55)),
    (DivergenceKind.TEXT, (0.0, 0.4)),
)
"""The worst first: how much each weighs, from texts that are the same to texts that have nothing in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, as far as it is compared."""

    blocks: tuple[Block, ...]
    stop_reason: StopReason | None

    @property
    def text(self) -> str:
        """All that it says in words."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def calls(self) -> tuple[ToolCallBlock, ...]:
        """The tool calls in order."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """In what they differ, and how much."""

    outcome: Outcome
    kinds: tuple[DivergenceKind, ...]
    similarity: float
    severity: float


def compare_answers(recorded: Said, candidate: Said) -> Comparison:
    """Pure and bounded in time. The kinds come in the order of their severity."""
    words, others = split_words(recorded.text), split_words(candidate.text)
    similarity = 1.0 if words == others else measure_words(words, others)
    kinds = tuple(_find_kinds(recorded, candidate, same_words=words == others))
    return Comparison(
        outcome=Outcome.DIFFERENT if kinds else Outcome.SAME,
        kinds=kinds,
        similarity=similarity,
        severity=_rate(kinds, similarity),
    )


def _find_kinds(recorded: Said, candidate: Said, *, same_words: bool) -> Iterator[DivergenceKind]:
    yield from _compare_calls(recorded.calls, candidate.calls)
    if recorded.stop_reason is not candidate.stop_reason:
        yield DivergenceKind.STOP_REASON
    if not same_words:
        yield DivergenceKind.TEXT


def _compare_calls(recorded: Sequence[ToolCallBlock], candidate: Sequence[ToolCallBlock]) -> Iterator[DivergenceKind]:
    """Another tool in place of one is `tool_name`; fewer or more calls are `tool_missing`."""
    names, others = Counter(call.name for call in recorded), Counter(call.name for call in candidate)
    missing, added = (names - others).total(), (others - names).total()
    if missing and added:
        yield DivergenceKind.TOOL_NAME
    if missing != added:
        yield DivergenceKind.TOOL_MISSING
    if _arguments_differ(recorded, candidate):
        yield DivergenceKind.TOOL_ARGUMENTS


def _arguments_differ(recorded: Sequence[ToolCallBlock], candidate: Sequence[ToolCallBlock]) -> bool:
    """Whether calls of a tool that both have called cannot be paired."""
    for name in {call.name for call in recorded} & {call.name for call in candidate}:
        one = Counter(canonical_arguments(call.arguments) for call in recorded if call.name == name)
        other = Counter(canonical_arguments(call.arguments) for call in candidate if call.name == name)
        if (one - other) and (other - one):
            return True
    return False


def _rate(kinds: Sequence[DivergenceKind], similarity: float) -> float:
    """From 0 to 1. Doing something else weighs more than saying it in other words, and failing weighs most of all."""
    if not kinds:
        return 0.0
    least, most = next(span for kind, span in _SPANS if kind in kinds)
    return least + (most - least) * (1.0 - similarity)
