"""Limits of labels, attributes and numbers in metrics and spans.

The names of models come from clients, and counts come from providers. A label that is not valid UTF-8 would break all
of `/metrics`, a span that cannot be encoded would lose its whole batch, and a new name in each request would create
series without end. Every value therefore passes through this module first. Nothing here raises.
"""

import math
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

OTHER: Final = "_OTHER"
"""Replaces every name that is not admitted."""
NONE: Final = "none"
"""Replaces a missing name."""

_NAME: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,100}")
_MAX_COUNT: Final = 2**53
"""Up to here Prometheus counts exactly: its numbers are floats."""
_MAX_SECONDS: Final = 1e9
_MAX_NANOSECONDS: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class NameSet:
    """The values of one label: the known ones, and a limited number of others, first come first served."""

    def __init__(self, known: Iterable[str] = (), *, others: int = 0) -> None:
        self._admitted = set(known)
        self._limit = len(self._admitted) + others

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that were admitted so far."""
        return iter(sorted(self._admitted))

    def admit(self, name: object) -> str:
        """Return the name itself, `none` if it is missing, or `_OTHER` if it is not admitted."""
        if name is None or name == "":
            return NONE
        plain = plain_name(name)
        if plain not in self._admitted:
            if len(self._admitted) >= self._limit:
                return OTHER
            self._admitted.add(plain)
        return plain


def plain_name(name: object) -> str:
    """Return the name if it is short and has only characters of ids and model names, else `_OTHER`."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else OTHER


def status_class(status: int | None) -> str:
    """Return the class of an HTTP status, such as `2xx`."""
    if status is None:
        return NONE
    return f"{status // 100}xx" if 100 <= status < 600 else OTHER  # noqa: PLR2004  reason: HTTP


def bounded_count(count: int) -> int:
    """Return the count, limited to what Prometheus counts exactly."""
    return min(max(count, 0), _MAX_COUNT)


def finite_seconds(seconds: float | None) -> float | None:
    """Return the duration, limited to 0 and 1e9 seconds; None if it is None or not finite."""
    return None if seconds is None or not math.isfinite(seconds) else min(max(seconds, 0.0), _MAX_SECONDS)


def seconds_between(begin: datetime, end: datetime | None) -> float | None:
    """Return the seconds between two times, at least 0; None if there is no end."""
    return None if end is None else finite_seconds((end - begin).total_seconds())


def finite_usd(cost: Decimal | None) -> float | None:
    """Return the cost as a number that can be added up; None if it is unknown."""
    if cost is None or not cost.is_finite():
        return None
    usd = float(cost)
    return usd if math.isfinite(usd) and usd >= 0 else None


def nanoseconds(at: datetime) -> int:
    """Return the time in nanoseconds since 1970, as spans have it."""
    return min(max((at - _EPOCH) // timedelta(microseconds=1) * 1000, 0), _MAX_NANOSECONDS)
