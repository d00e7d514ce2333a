"""Conversations played against a simulated provider, with the planner that the server uses.

Only input is counted: what the model says costs the same whatever stands before it. The fixed cost of a compaction is
counted for every policy and for the optimum, as tokens at the price of uncached input.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Final

from server.compaction.carrying_cost import find_rates
from server.compaction.plan import plan_compaction
from server.compaction.simulation.optimum import find_optimum
from server.compaction.simulation.provider import NEVER, Bill, Compacted, Layout, SimulatedProvider, Tariff, Timeline
from server.compaction.simulation.workload import (
    LengthLaw,
    Shape,
    SimulatedExchange,
    ThinkTime,
    draw_conversation,
    spread_lengths,
)
from server.compaction.state import CompactionState, Exchange
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind
from server.conversation.errors import ValidationFailed
from server.conversation.payload import LayerOrder
from server.providers.model_profile import ModelProfile, find_profile
from server.providers.pricing import Price, find_price

CACHE_LIFETIME_SECONDS: Final = 300.0
"""Claude's short lifetime. Gemini promises none for its implicit cache; minutes are what is seen."""
_RECENT_GAPS: Final = 8
_MILLION: Final = 1_000_000
_LAYOUTS: Final[Mapping[LayerOrder, Layout]] = {
    LayerOrder.LAYERED: Layout.LAYERED,
    LayerOrder.APPEND_ONLY: Layout.APPEND_ONLY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """A model as a simulation sees it: its profile, its price on a day, the order of the layers."""

    profile: ModelProfile
    price: Price
    order: LayerOrder
    tariff: Tariff


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations of one kind."""

    shape: Shape
    think_time: ThinkTime
    exchanges: int
    """In the mean."""
    lengths: LengthLaw = LengthLaw.EVEN
    conversations: int = 4
    length_known: bool = True
    """Whether the planner is told the mean, as a server knows it from earlier conversations of an assistant."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one conversation, or several, cost under one policy."""

    bill: Bill = field(default_factory=Bill)
    compaction_count: int = 0
    fixed_usd: float = 0.0

    @property
    def cost_usd(self) -> float:
        """The calls and the compactions."""
        return self.bill.cost_usd + self.fixed_usd

    def __add__(self, other: "Run") -> "Run":
        return Run(
            bill=self.bill + other.bill,
            compaction_count=self.compaction_count + other.compaction_count,
            fixed_usd=self.fixed_usd + other.fixed_usd,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A workload without a cache, append-only, under two policies, and at its cheapest."""

    uncached: Run
    kept: Run
    """Everything cached and nothing ever compacted: the naive append-only prompt."""
    threshold: Run
    cost: Run
    optimum: Run

    @property
    def distance(self) -> float:
        """The cost policy's cost as a multiple of the optimum's."""
        return self.cost.cost_usd / self.optimum.cost_usd

    def share(self, run: Run) -> float:
        """What a run costs as a share of the same without any cache."""
        return run.cost_usd / self.uncached.cost_usd

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            uncached=self.uncached + other.uncached,
            kept=self.kept + other.kept,
            threshold=self.threshold + other.threshold,
            cost=self.cost + other.cost,
            optimum=self.optimum + other.optimum,
        )


def find_market(provider: str, model: str, order: LayerOrder | None, at: datetime) -> Market:
    """A priced model on a day. Raises `ValidationFailed` for one without a price, or an order that it does not take.

    The price is that of small prompts, where it depends on their size.
    """
    profile = find_profile(provider, model)
    chosen = profile.orders[0] if order is None else order
    if chosen not in profile.orders:
        raise ValidationFailed(f"{model} takes {' or '.join(profile.orders)}.")
    price = find_price(model, at, 0)
    if price is None:
        raise ValidationFailed(f"There is no price for {model}.")
    fresh = float(price.fresh_input)
    rates = find_rates(price, profile, CACHE_LIFETIME_SECONDS)
    tariff = Tariff(
        fresh=fresh,
        read=fresh * rates.read,
        write=fresh * rates.write,
        minimum_tokens=profile.cache_minimum_tokens,
        lifetime_seconds=CACHE_LIFETIME_SECONDS,
    )
    return Market(profile=profile, price=price, order=chosen, tariff=tariff)


def compare(market: Market, workload: Workload, policy: CompactionPolicy, threshold: CompactionPolicy) -> Comparison:
    """The workload under every policy. `policy` also says what is kept and what a compaction costs at the optimum."""
    found = [_compare_one(market, workload, exchanges, policy, threshold) for exchanges in draw_workload(workload)]
    return sum(found[1:], found[0])


def draw_workload(workload: Workload) -> list[tuple[SimulatedExchange, ...]]:
    """The conversations of a workload. The same workload gives the same ones."""
    # Each shape, pace and length has its own: a change to one of them leaves the others as they are.
    seed = f"{workload.seed}:{workload.shape.name}:{workload.think_time.name}:{workload.exchanges}"
    lengths = spread_lengths(workload.exchanges, workload.conversations, workload.lengths)
    return [
        draw_conversation(workload.shape, workload.think_time, length, f"{seed}:{place}")
        for place, length in enumerate(lengths)
    ]


def simulate(
    timeline: Timeline, market: Market, policy: CompactionPolicy, *, typical_exchange_count: float | None = None
) -> Run:
    """One conversation. The planner is asked after every exchange, and once more when it wanted to be."""
    player = _Player(timeline, market)
    for number in range(len(timeline.exchanges)):
        if number and policy.kind is not PolicyKind.OFF:
            player.ask(policy, number, typical_exchange_count)
        player.play(number)
    return player.finish(policy)


def replay(timeline: Timeline, market: Market, policy: CompactionPolicy, compacted_before: tuple[int, ...]) -> Run:
    """One conversation that is compacted at the given moments down to the exchanges that the policy keeps."""
    player = _Player(timeline, market)
    for number in range(len(timeline.exchanges)):
        if number in compacted_before:
            player.compact(Compacted(before=number, start=number - policy.keep_exchanges))
        player.play(number)
    return player.finish(policy)


def _compare_one(
    market: Market,
    workload: Workload,
    exchanges: tuple[SimulatedExchange, ...],
    policy: CompactionPolicy,
    threshold: CompactionPolicy,
) -> Comparison:
    def lay_out(layout: Layout) -> Timeline:
        return Timeline(workload.shape, exchanges, layout, strips_thinking=market.profile.prefix_bound)

    never = CompactionPolicy(kind=PolicyKind.OFF)
    used = lay_out(_LAYOUTS[market.order])
    kept = used if market.order is LayerOrder.APPEND_ONLY else lay_out(Layout.KEPT)
    typical = workload.exchanges if workload.length_known else None
    optimum = find_optimum(used, market.tariff, keep=policy.keep_exchanges, fixed_cost_usd=_fixed_usd(market, policy))
    return Comparison(
        uncached=simulate(lay_out(Layout.UNCACHED), market, never),
        kept=simulate(kept, market, never),
        threshold=simulate(used, market, threshold),
        cost=simulate(used, market, policy, typical_exchange_count=typical),
        optimum=replay(used, market, policy, optimum.compacted_before),
    )


class _Player:
    """A conversation under way."""

    def __init__(self, timeline: Timeline, market: Market) -> None:
        self._timeline = timeline
        self._market = market
        self._provider = SimulatedProvider(market.tariff)
        self._bill = Bill()
        self._compacted = NEVER
        self._compaction_count = 0
        self._gaps: list[float] = []

    def play(self, number: int) -> None:
        """Makes the calls of an exchange."""
        exchange = self._timeline.exchanges[number]
        if number:
            before = self._timeline.exchanges[number - 1]
            self._gaps.append((exchange.starts_at - before.ends_at).total_seconds())
        for step, at in enumerate(exchange.call_times()):
            self._bill += self._provider.call(self._timeline.prompt(number, step, self._compacted), at)

    def compact(self, compacted: Compacted) -> None:
        self._compacted = compacted
        self._compaction_count += 1

    def ask(self, policy: CompactionPolicy, number: int, typical_exchange_count: float | None) -> None:
        """Before exchange `number`: what the planner says at the end of the one before, and what when it is cold."""
        market = self._market
        timeline = self._timeline
        ended_at = timeline.exchanges[number - 1].ends_at
        state = CompactionState(
            exchanges=tuple(self._read_buffer(number)),
            static_tokens=timeline.static_tokens(self._compacted),
            dynamic_tokens=timeline.dynamic_tokens,
            order=market.order,
            last_call_at=ended_at,
            cache_lifetime_seconds=market.tariff.lifetime_seconds,
            typical_gap_seconds=median(self._gaps[-_RECENT_GAPS:]) if self._gaps else None,
            exchange_count=number,
            typical_exchange_count=typical_exchange_count,
        )
        decision = plan_compaction(state, market.profile, market.price, policy, ended_at)
        again = decision.recheck_at
        if again is not None and again <= timeline.exchanges[number].starts_at:
            decision = plan_compaction(state, market.profile, market.price, policy, again)
        if decision.plan is not None:
            start = self._compacted.start + decision.plan.exchange_count
            self.compact(Compacted(before=number, start=start))

    def finish(self, policy: CompactionPolicy) -> Run:
        fixed = self._compaction_count * _fixed_usd(self._market, policy)
        return Run(bill=self._bill, compaction_count=self._compaction_count, fixed_usd=fixed)

    def _read_buffer(self, end: int) -> Iterator[Exchange]:
        timeline = self._timeline
        for number in range(self._compacted.start, end):
            exchange = timeline.exchanges[number]
            last = exchange.calls[-1]
            stripped = timeline.stripped_tokens(number, number + 1, self._compacted)
            yield Exchange(
                first_seq=2 * number + 1,
                last_seq=2 * number + 2,
                sent_tokens=timeline.sent_tokens(number, number + 1, self._compacted),
                segment_tokens=exchange.spoken_tokens,
                thinking_tokens=exchange.thinking_tokens - stripped,
                answer_count=len(exchange.calls),
                unsent_tokens=last.output_tokens + last.thinking_tokens,
                is_open=False,
                is_whole=True,
            )


def _fixed_usd(market: Market, policy: CompactionPolicy) -> float:
    return policy.fixed_cost_tokens * market.tariff.fresh / _MILLION
