"""What came out of a replay, as numbers: the words and the port.

Recorded and candidate are compared over the same answers: those of which both are known. An answer that failed has no
place in a distribution; it is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from server.replay.rerun.result import DivergenceKind, Outcome
from server.replay.rerun.statistics import Distribution, Interval


class Measure(StrEnum):
    """What is measured of an answer."""

    SIMILARITY = "similarity"
    """Of the two texts, from 0 to 1."""
    JUDGE_SCORE = "judge_score"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    """With those of the thinking."""
    COST_USD = "cost_usd"
    CACHE_SHARE = "cache_share"
    LATENCY_MS = "latency_ms"

    @property
    def is_share(self) -> bool:
        """From 0 to 1."""
        return self in {Measure.SIMILARITY, Measure.JUDGE_SCORE, Measure.CACHE_SHARE}


class Side(StrEnum):
    """Whose answer."""

    RECORDED = "recorded"
    CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measure of both sides."""

    measure: Measure
    low: float
    """Where the first bin begins, of both."""
    high: float
    """Where the last one ends."""
    recorded: Distribution | None
    """None for what only a candidate has, such as the similarity."""
    candidate: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionCount:
    """How often an assertion held."""

    name: str
    passed: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """All numbers of a replay, as far as it is."""

    result_count: int
    outcomes: Mapping[Outcome, int]
    """Every outcome is there."""
    kinds: Mapping[DivergenceKind, int]
    """Every kind is there. An answer may differ in several ways."""
    assertions: Sequence[AssertionCount]
    """By name, those that failed most often first."""
    measures: Sequence[Measured]
    """In the order of `Measure`; what nobody has is left out."""
    same_interval: Interval | None = None
    """Of `same_share`, over the repetitions that are whole; None with less than two of them."""

    @property
    def same_share(self) -> float | None:
        """Of the answers that were compared; None where none was."""
        same = self.outcomes[Outcome.SAME]
        compared = same + self.outcomes[Outcome.DIFFERENT]
        return same / compared if compared else None

    @property
    def failed_assertion_count(self) -> int:
        """Over all of them."""
        return sum(count.failed for count in self.assertions)
