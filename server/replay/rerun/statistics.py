"""Numbers of a replay: how what a candidate took is spread, and how sure its means are.

The interval of a mean is Student's, over the means of the repetitions that are whole: it says how far another run of
the same replay might land. With one repetition nobody knows, and there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
BIN_COUNT: Final = 16
_NORMAL: Final = 1.959963984540054
"""What 2.5 in a hundred lie beyond, where there are very many repetitions."""
_STUDENT: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)
"""The same for one degree of freedom more than the position says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the mean is, in 95 of 100 such runs."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How values are spread."""

    count: int
    mean: float
    least: float
    most: float
    quantiles: tuple[float, ...]
    """For each of `QUANTILES`."""
    bins: tuple[int, ...]
    """How many lie in each of `BIN_COUNT` parts of the span that its `Measured` names."""
    interval: Interval | None
    """None with a single whole repetition, and for what was recorded: that is what it is."""

    @property
    def median(self) -> float:
        """As many are above as below."""
        return self.quantiles[QUANTILES.index(0.5)]


def find_interval(means: Sequence[float], *, is_share: bool = False) -> Interval | None:
    """The 95 % interval of the mean of these means, one for each repetition; None for less than two.

    Nothing that is measured is below 0, and no share above 1: there the interval ends too.
    """
    count = len(means)
    if count < 2:  # noqa: PLR2004  reason: one value is spread over nothing
        return None
    middle = math.fsum(means) / count
    spread = math.sqrt(math.fsum((mean - middle) ** 2 for mean in means) / (count - 1))
    half = student_bound(count - 1) * spread / math.sqrt(count)
    high = middle + half
    return Interval(low=max(middle - half, 0.0), high=min(high, 1.0) if is_share else high)


def student_bound(freedom: int) -> float:
    """Beyond what 2.5 in a hundred lie, for so many degrees of freedom; behind the table to four places."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
