"""The numbers of a replay: counts, distributions, and the confidence intervals of means.

Recorded and candidate's answers are compared over the same answers: those for which both values are known. Failed
answers are counted, and are not part of a distribution.

The interval of a mean is Student's, over the means of the complete repetitions. It estimates how far the mean of
another run of the same replay may be. One repetition gives no interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.replay.rerun.result import DivergenceKind, Outcome

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
BIN_COUNT: Final = 16
_NORMAL: Final = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
_STUDENT: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)
"""The 97.5 % quantiles of Student's distribution for 1, 2, 3 and more degrees of freedom."""


class Measure(StrEnum):
    """A measure of an answer."""

    SIMILARITY = "similarity"
    """Of the two texts, 0 to 1."""
    JUDGE_SCORE = "judge_score"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    """Including reasoning tokens."""
    COST_USD = "cost_usd"
    CACHE_SHARE = "cache_share"
    LATENCY_MS = "latency_ms"

    @property
    def is_share(self) -> bool:
        """Whether its values are between 0 and 1."""
        return self in {Measure.SIMILARITY, Measure.JUDGE_SCORE, Measure.CACHE_SHARE}


class Side(StrEnum):
    """The recorded or the candidate's answer."""

    RECORDED = "recorded"
    CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A distribution of values."""

    count: int
    mean: float
    least: float
    most: float
    quantiles: tuple[float, ...]
    """One for each of `QUANTILES`."""
    bins: tuple[int, ...]
    """The number of values in each of `BIN_COUNT` equal bins between `Measured.low` and `Measured.high`."""
    interval: Interval | None
    """Of the mean. None for recorded answers, and with fewer than two complete repetitions."""

    @property
    def median(self) -> float:
        """The 50 % quantile."""
        return self.quantiles[QUANTILES.index(0.5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The distributions of one measure."""

    measure: Measure
    low: float
    """The lower end of the first bin, for both sides."""
    high: float
    """The upper end of the last bin."""
    recorded: Distribution | None
    """None for a measure that only the candidate has, such as the similarity."""
    candidate: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionCount:
    """How often an assertion passed and failed."""

    name: str
    passed: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """All numbers of a replay, over the results that exist now."""

    result_count: int
    outcomes: Mapping[Outcome, int]
    """With every outcome as a key."""
    kinds: Mapping[DivergenceKind, int]
    """With every kind as a key. One answer may have several kinds."""
    assertions: Sequence[AssertionCount]
    """Ordered by failures, most first, then by name."""
    measures: Sequence[Measured]
    """In the order of `Measure`, without measures that have no values."""
    same_interval: Interval | None = None
    """Of `same_share`; None with fewer than two complete repetitions."""

    @property
    def same_share(self) -> float | None:
        """The share of same answers among those that were compared; None if none was."""
        same = self.outcomes[Outcome.SAME]
        compared = same + self.outcomes[Outcome.DIFFERENT]
        return same / compared if compared else None

    @property
    def failed_assertion_count(self) -> int:
        """The number of failures of all assertions."""
        return sum(count.failed for count in self.assertions)


def find_interval(means: Sequence[float], *, is_share: bool = False) -> Interval | None:
    """Return the 95 % interval of the mean of these means, one per repetition; None for fewer than two.

    No measure is below 0 and no share above 1, so the interval is cut there.
    """
    count = len(means)
    if count < 2:  # noqa: PLR2004  reason: one value has no variance
        return None
    middle = math.fsum(means) / count
    spread = math.sqrt(math.fsum((mean - middle) ** 2 for mean in means) / (count - 1))
    half = student_bound(count - 1) * spread / math.sqrt(count)
    high = middle + half
    return Interval(low=max(middle - half, 0.0), high=min(high, 1.0) if is_share else high)


def student_bound(freedom: int) -> float:
    """Return the 97.5 % quantile for this number of degrees of freedom. Beyond the table it is exact to four digits."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
