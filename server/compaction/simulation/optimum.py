"""The cheapest moments to compact a conversation that is known to its end.

Exactly: over all sets of moments between exchanges, each compaction moving everything but the newest `keep` exchanges,
the least sum of what the calls and the compactions cost. Between two compactions nothing depends on what was before,
except the first call, which depends on the compaction before it. So it is a shortest path over the moments, found in
time that grows with the square of the exchanges. No policy can reach it but by luck: it knows the future.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from server.compaction.simulation.provider import NEVER, CallTokens, Compacted, Tariff, Timeline

_MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The least cost, and how to get it."""

    cost_usd: float
    compacted_before: tuple[int, ...]
    """The exchanges before which to compact."""


def find_optimum(timeline: Timeline, tariff: Tariff, *, keep: int, fixed_cost_usd: float) -> Optimum:
    """See the module."""
    sums = _Sums(timeline, tariff, keep)
    count = len(timeline.exchanges)
    reached: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    ends: list[tuple[float, int]] = []
    for moment in (0, *range(keep + 1, count)):
        spent = reached[moment][0]
        for number, cost in sums.costs_from(moment):
            if number > keep:
                paid = spent + fixed_cost_usd + sums.cost_after(moment, number)
                if number not in reached or paid < reached[number][0]:
                    reached[number] = (paid, moment)
            spent += cost
        ends.append((spent, moment))
    least, last = min(ends)
    moments = []
    while last:
        moments.append(last)
        last = reached[last][1]
    return Optimum(cost_usd=least, compacted_before=tuple(reversed(moments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The calls of one exchange, summed."""

    each: tuple[CallTokens, ...]
    count: int
    first: int
    last: int
    """What the exchange adds to the cacheable part in its first and in its last call."""
    earlier: int
    """The sum of that over all calls but the last."""
    fresh: int


class _Sums:
    """What the calls of an exchange cost, in constant time: within an exchange each call knows the one before."""

    def __init__(self, timeline: Timeline, tariff: Tariff, keep: int) -> None:
        self._timeline = timeline
        self._tariff = tariff
        self._in_prefix = timeline.layout.caches_buffer
        numbers = range(len(timeline.exchanges))
        self._moments = [self._compacted(number, keep) for number in numbers]
        self._static = [timeline.static_tokens(compacted) for compacted in self._moments]
        rewrites = timeline.layout.rewrites
        self._lasting = [timeline.instruction_tokens if rewrites else static for static in self._static]
        """What of the static layer survives the next compaction."""
        self._calls = [_sum_up(calls) for calls in timeline.calls]
        self._is_cold = [True] + [
            (later.starts_at - earlier.ends_at).total_seconds() >= tariff.lifetime_seconds
            for earlier, later in pairwise(timeline.exchanges)
        ]
        self._sent = [timeline.sent_tokens(number, number + 1, NEVER) for number in numbers]
        kept = [timeline.sent_tokens(one.start, number, one) for number, one in enumerate(self._moments)]
        self._kept = kept
        """What is in the buffer just behind a compaction."""
        self._unknown = [self._cost(number, self._static[number], kept[number], 0) for number in numbers]
        """The calls of an exchange just behind a compaction, of which the provider knows nothing."""
        self._discountable = [
            not self._is_cold[number]
            and self._prefix(number, self._static[number], kept[number]) >= tariff.minimum_tokens
            for number in numbers
        ]

    def costs_from(self, moment: int) -> Iterator[tuple[int, float]]:
        """Each exchange behind a compaction, and what its calls cost if there is no other. 0 is the beginning."""
        static = self._static[moment]
        first = moment + 1 if moment else 0
        before = earlier = self._kept[moment] if moment else 0
        if moment:
            earlier += self._sent[moment]
        for number in range(first, len(self._sent)):
            known = 0
            if not self._is_cold[number]:
                known = static + before + self._calls[number - 1].last if self._in_prefix else static
            yield number, self._cost(number, static, earlier, known)
            before = earlier
            earlier += self._sent[number]

    def cost_after(self, moment: int, number: int) -> float:
        """The calls of an exchange when there is a compaction just before it, and there was one at that moment."""
        known = self._lasting[moment]
        if not self._discountable[number] or known < self._tariff.minimum_tokens:
            return self._unknown[number]
        return self._unknown[number] - known * (self._tariff.write - self._tariff.read) / _MILLION

    def _prefix(self, number: int, static: int, earlier: int) -> int:
        """What can be cached in the first call of an exchange."""
        return static + (earlier if self._in_prefix else 0) + self._calls[number].first

    def _cost(self, number: int, static: int, earlier: int, known: int) -> float:
        tariff = self._tariff
        calls = self._calls[number]
        prefix, behind = (static + earlier, 0) if self._in_prefix else (static, earlier)
        if prefix + calls.first < tariff.minimum_tokens:
            return self._cost_of_small(calls, prefix, behind)
        if known < tariff.minimum_tokens:
            known = 0
        written = prefix + calls.last - known
        read = known + (calls.count - 1) * prefix + calls.earlier
        fresh = calls.fresh + calls.count * behind
        return (written * tariff.write + read * tariff.read + fresh * tariff.fresh) / _MILLION

    def _cost_of_small(self, calls: _Calls, prefix: int, behind: int) -> float:
        """One by one: somewhere among them the prefix may reach the minimum."""
        tariff = self._tariff
        cost = 0.0
        known = 0
        for call in calls.each:
            cacheable = prefix + call.cacheable
            if cacheable < tariff.minimum_tokens:
                cost += (cacheable + behind + call.fresh) * tariff.fresh
                continue
            cost += known * tariff.read + (cacheable - known) * tariff.write + (behind + call.fresh) * tariff.fresh
            known = cacheable
        return cost / _MILLION

    @staticmethod
    def _compacted(number: int, keep: int) -> Compacted:
        return Compacted(before=number, start=number - keep) if number > keep else NEVER


def _sum_up(calls: tuple[CallTokens, ...]) -> _Calls:
    cacheable = [call.cacheable for call in calls]
    return _Calls(
        each=calls,
        count=len(calls),
        first=cacheable[0],
        last=cacheable[-1],
        earlier=sum(cacheable[:-1]),
        fresh=sum(call.fresh for call in calls),
    )
