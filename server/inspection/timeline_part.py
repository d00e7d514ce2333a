"""Which part of a conversation is shown: so many turns at a place, and not more of them than can be read at once."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to look. Of more than one the first counts; with none it is the end."""

    after_seq: int | None = None
    before_seq: int | None = None
    around_seq: int | None = None

    def begin_behind(self, last_seq: int, count: int) -> int:
        """The turn behind which so many turns begin. A turn that is not there yet is looked for where the last is."""
        if self.after_seq is not None:
            return max(0, self.after_seq)
        if self.before_seq is not None:
            return max(0, min(self.before_seq - 1, last_seq) - count)
        if self.around_seq is not None:
            return max(0, min(self.around_seq, last_seq) - count // 2 - 1)
        return max(0, last_seq - count)


def choose_part(sizes: Sequence[tuple[int, int]], place: Place, *, limit_bytes: int) -> tuple[int, int] | None:
    """The first and the last turn of the largest part at the place that is not larger than the limit.

    `sizes` are turns in their order with their bytes. The part is grown from the turn that is looked for, and has that
    one whatever its size. None where there is no turn.
    """
    wanted = [item for item in sizes if place.before_seq is None or item[0] < max(place.before_seq, 1)]
    if place.after_seq is not None or not wanted:
        heart = 0
    elif place.before_seq is None and place.around_seq is not None:
        heart = min(range(len(wanted)), key=lambda index: abs(wanted[index][0] - (place.around_seq or 0)))
    else:
        heart = len(wanted) - 1
    return _grow(wanted, heart, limit_bytes) if wanted else None


def _grow(sizes: Sequence[tuple[int, int]], heart: int, limit_bytes: int) -> tuple[int, int]:
    """One turn at a time, to both sides in turn; a side that has met a turn too large has ended."""
    first = last = heart
    left = limit_bytes - sizes[heart][1]
    goes_back, goes_on = True, True
    while goes_back or goes_on:
        goes_on = goes_on and last + 1 < len(sizes) and sizes[last + 1][1] <= left
        if goes_on:
            last += 1
            left -= sizes[last][1]
        goes_back = goes_back and first > 0 and sizes[first - 1][1] <= left
        if goes_back:
            first -= 1
            left -= sizes[first][1]
    return sizes[first][0], sizes[last][0]
