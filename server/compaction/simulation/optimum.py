"""The cheapest compactions of a conversation in hindsight.

Over all sets of moments between exchanges, each compaction moving everything but the newest `keep` exchanges, this
finds the lowest total cost of calls and compactions. Between two compactions the costs depend only on the first of
them, except for the first call after a compaction, which depends on the one before it. So the optimum is a shortest
path over the moments, and takes time quadratic in the number of exchanges. A policy can only approach it, because it
does not know the future.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from server.compaction.simulation.provider import NEVER, CallTokens, Compacted, Tariff, Timeline

_MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The lowest cost and its compactions."""

    cost_usd: float
    compacted_before: tuple[int, ...]
    """The exchanges before which to compact."""


def find_optimum(timeline: Timeline, tariff: Tariff, *, keep: int, fixed_cost_usd: float) -> Optimum:
    """See the module."""
    costs = _Costs(timeline, tariff, keep)
    count = len(timeline.exchanges)
    reached: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    ends: list[tuple[float, int]] = []
    for moment in (0, *range(keep + 1, count)):
        spent = reached[moment][0]
        for number, cost in costs.costs_from(moment):
            if number > keep:
                paid = spent + fixed_cost_usd + costs.cost_after(moment, number)
                if number not in reached or paid < reached[number][0]:
                    reached[number] = (paid, moment)
            spent += cost
        ends.append((spent, moment))
    lowest, last = min(ends)
    moments = []
    while last:
        moments.append(last)
        last = reached[last][1]
    return Optimum(cost_usd=lowest, compacted_before=tuple(reversed(moments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The calls of one exchange, summed."""

    each: tuple[CallTokens, ...]
    count: int
    first: int
    last: int
    """The cacheable tokens that the exchange adds in its first and in its last call."""
    earlier: int
    """The sum of those over all calls but the last."""
    fresh: int


class _Costs:
    """The cost of an exchange's calls, in constant time: within an exchange each call reads the cache of the call
    before.
    """

    def __init__(self, timeline: Timeline, tariff: Tariff, keep: int) -> None:
        self._timeline = timeline
        self._tariff = tariff
        self._in_prefix = timeline.layout.caches_buffer
        self._block = timeline.block_tokens
        numbers = range(len(timeline.exchanges))
        self._moments = [self._compacted(number, keep) for number in numbers]
        self._static = [timeline.static_tokens(compacted) for compacted in self._moments]
        rewrites = timeline.layout.rewrites
        self._lasting = [timeline.instruction_tokens if rewrites else static for static in self._static]
        """The part of the static layer that the next compaction does not change."""
        self._calls = [_sum_calls(calls) for calls in timeline.calls]
        self._is_cold = [True] + [
            (later.starts_at - earlier.ends_at).total_seconds() >= tariff.lifetime_seconds
            for earlier, later in pairwise(timeline.exchanges)
        ]
        self._has_new_block = [True] + [
            bool(self._block) and later.number != earlier.number for earlier, later in pairwise(timeline.blocks)
        ]
        self._sent = [timeline.sent_tokens(number, number + 1, NEVER) for number in numbers]
        kept = [timeline.sent_tokens(one.start, number, one) for number, one in enumerate(self._moments)]
        self._kept = kept
        """The buffer immediately after a compaction."""
        self._uncached_cost = [self._cost(number, self._static[number], kept[number], 0) for number in numbers]
        """The cost of an exchange immediately after a compaction, with nothing cached."""
        self._has_discount = [
            not self._is_cold[number]
            and self._prefix(number, self._static[number], kept[number]) >= tariff.minimum_tokens
            for number in numbers
        ]

    def costs_from(self, moment: int) -> Iterator[tuple[int, float]]:
        """Yield each exchange after a compaction and its cost if there is no other compaction. 0 is the start."""
        static = self._static[moment]
        first = moment + 1 if moment else 0
        before = earlier = self._kept[moment] if moment else 0
        if moment:
            earlier += self._sent[moment]
        for number in range(first, len(self._sent)):
            cached = 0
            if not self._is_cold[number]:
                cached = static
                if self._in_prefix and not self._has_new_block[number]:
                    cached += self._block + before + self._calls[number - 1].last
            yield number, self._cost(number, static, earlier, cached)
            before = earlier
            earlier += self._sent[number]

    def cost_after(self, moment: int, number: int) -> float:
        """The cost of an exchange immediately after a compaction, if the previous one was at `moment`."""
        cached = self._lasting[moment]
        if not self._has_discount[number] or cached < self._tariff.minimum_tokens:
            return self._uncached_cost[number]
        return self._uncached_cost[number] - cached * (self._tariff.write - self._tariff.read) / _MILLION

    def _prefix(self, number: int, static: int, earlier: int) -> int:
        """The cacheable tokens of an exchange's first call."""
        return static + self._block + (earlier if self._in_prefix else 0) + self._calls[number].first

    def _cost(self, number: int, static: int, earlier: int, cached: int) -> float:
        tariff = self._tariff
        calls = self._calls[number]
        prefix, uncached = (static + self._block + earlier, 0) if self._in_prefix else (static, earlier)
        if prefix + calls.first < tariff.minimum_tokens:
            return self._cost_below_minimum(calls, prefix, uncached)
        if cached < tariff.minimum_tokens:
            cached = 0
        written = prefix + calls.last - cached
        read = cached + (calls.count - 1) * prefix + calls.earlier
        fresh = calls.fresh + calls.count * uncached
        return (written * tariff.write + read * tariff.read + fresh * tariff.fresh) / _MILLION

    def _cost_below_minimum(self, calls: _Calls, prefix: int, uncached: int) -> float:
        """Call by call, because the prefix may reach the minimum in one of them."""
        tariff = self._tariff
        cost = 0.0
        cached = 0
        for call in calls.each:
            cacheable = prefix + call.cacheable
            if cacheable < tariff.minimum_tokens:
                cost += (cacheable + uncached + call.fresh) * tariff.fresh
                continue
            cost += cached * tariff.read + (cacheable - cached) * tariff.write + (uncached + call.fresh) * tariff.fresh
            cached = cacheable
        return cost / _MILLION

    @staticmethod
    def _compacted(number: int, keep: int) -> Compacted:
        return Compacted(before=number, start=number - keep) if number > keep else NEVER


def _sum_calls(calls: tuple[CallTokens, ...]) -> _Calls:
    cacheable = [call.cacheable for call in calls]
    return _Calls(
        each=calls,
        count=len(calls),
        first=cacheable[0],
        last=cacheable[-1],
        earlier=sum(cacheable[:-1]),
        fresh=sum(call.fresh for call in calls),
    )
