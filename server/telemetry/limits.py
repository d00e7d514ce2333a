"""What metrics and spans can hold: names from bounded sets, and numbers that their formats know.

Names of models are chosen by whoever creates assistants, and counts come from a provider's answer. One label that is no
UTF-8 would break all of `/metrics`, one span that cannot be encoded would cost its whole batch, and a new name in each
request would fill the memory of whoever keeps the series. So everything passes here first, and nothing here raises.
"""

import math
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

OTHER: Final = "_OTHER"
"""Stands for every name that is not let through."""
NONE: Final = "none"
"""Stands for the absence of one."""

_NAME: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,100}")
_LARGEST_COUNT: Final = 2**53
"""The last whole number up to which Prometheus, whose numbers are floats, counts exactly."""
_LONGEST_SECONDS: Final = 1e9
_LAST_MOMENT: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class NameSet:
    """The values of one label: those that are known, and at most so many others, first come first served."""

    def __init__(self, known: Iterable[str] = (), *, others: int = 0) -> None:
        self._admitted = set(known)
        self._limit = len(self._admitted) + others

    def __iter__(self) -> Iterator[str]:
        """Those that were let through so far."""
        return iter(sorted(self._admitted))

    def admit(self, name: object) -> str:
        """The name itself, `none` where there is none, or `_OTHER`."""
        if name is None or name == "":
            return NONE
        plain = plain_name(name)
        if plain not in self._admitted:
            if len(self._admitted) >= self._limit:
                return OTHER
            self._admitted.add(plain)
        return plain


def plain_name(name: object) -> str:
    """The name where it looks like one: short, and of the characters that ids and models are made of."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else OTHER


def status_class(status: int | None) -> str:
    """`2xx` and its kin."""
    if status is None:
        return NONE
    return f"{status // 100}xx" if 100 <= status < 600 else OTHER  # noqa: PLR2004  reason: HTTP


def bounded_count(count: int) -> int:
    """The count, within what can be counted."""
    return min(max(count, 0), _LARGEST_COUNT)


def finite_seconds(seconds: float | None) -> float | None:
    """The duration, never negative and never absurd; None where it is none."""
    return None if seconds is None or not math.isfinite(seconds) else min(max(seconds, 0.0), _LONGEST_SECONDS)


def seconds_between(begin: datetime, end: datetime | None) -> float | None:
    """None where it has not ended. A clock that was set back meanwhile gives 0."""
    return None if end is None else finite_seconds((end - begin).total_seconds())


def finite_usd(cost: Decimal | None) -> float | None:
    """The cost as a number that can be summed; None where it is unknown."""
    if cost is None or not cost.is_finite():
        return None
    usd = float(cost)
    return usd if math.isfinite(usd) and usd >= 0 else None


def nanoseconds(at: datetime) -> int:
    """The moment as spans have it, since 1970."""
    return min(max((at - _EPOCH) // timedelta(microseconds=1) * 1000, 0), _LAST_MOMENT)
