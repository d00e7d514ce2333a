"""Simulated conversations under several policies, with the planner that the server uses.

Only input is counted: output costs the same under every policy. The fixed cost of a compaction is counted for every
policy and for the optimum, as tokens at the price of uncached input.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from statistics import median
from typing import Final

from server.compaction.carrying_cost import find_rates
from server.compaction.plan import plan_compaction
from server.compaction.simulation.optimum import find_optimum
from server.compaction.simulation.provider import (
    NEVER,
    BlockClock,
    CallCost,
    Compacted,
    Layout,
    SimulatedProvider,
    Tariff,
    Timeline,
)
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
from server.payload.dynamic_clock import DEFAULT_CLOCK_SECONDS, DynamicClock
from server.providers.model_profile import ModelProfile, find_profile
from server.providers.pricing import Price, find_price

CACHE_LIFETIME_SECONDS: Final = 300.0
"""Claude's short lifetime. Gemini guarantees none for its implicit cache; minutes are observed."""
_RECENT_GAPS: Final = 8
_MILLION: Final = 1_000_000
_LAYOUTS: Final[Mapping[LayerOrder, Layout]] = {
    LayerOrder.LAYERED: Layout.LAYERED,
    LayerOrder.APPEND_ONLY: Layout.APPEND_ONLY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedModel:
    """A model with its profile, its price on a day, and the order of the layers."""

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
    """The mean number."""
    lengths: LengthLaw = LengthLaw.EVEN
    conversations: int = 4
    length_known: bool = True
    """Whether the planner receives the mean, as a server derives it from earlier conversations of an assistant."""
    seed: int = 0
    clock_seconds: int = DEFAULT_CLOCK_SECONDS
    """The period of the clock in the dynamic block of the layered order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The cost of one or more conversations under one policy."""

    calls_cost: CallCost = field(default_factory=CallCost)
    compaction_count: int = 0
    fixed_usd: float = 0.0

    @property
    def cost_usd(self) -> float:
        """The calls and the compactions."""
        return self.calls_cost.cost_usd + self.fixed_usd

    def __add__(self, other: "Run") -> "Run":
        return Run(
            calls_cost=self.calls_cost + other.calls_cost,
            compaction_count=self.compaction_count + other.compaction_count,
            fixed_usd=self.fixed_usd + other.fixed_usd,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A workload without a cache, append-only, under two policies, and at its optimum."""

    uncached: Run
    kept: Run
    """Everything cached and nothing ever compacted: the naive append-only prompt."""
    threshold: Run
    cost: Run
    optimum: Run

    @property
    def distance(self) -> float:
        """The cost of the cost policy as a multiple of the optimum."""
        return self.cost.cost_usd / self.optimum.cost_usd

    def share(self, run: Run) -> float:
        """The cost of a run as a share of the cost without any cache."""
        return run.cost_usd / self.uncached.cost_usd

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            uncached=self.uncached + other.uncached,
            kept=self.kept + other.kept,
            threshold=self.threshold + other.threshold,
            cost=self.cost + other.cost,
            optimum=self.optimum + other.optimum,
        )


def find_priced_model(provider: str, model: str, order: LayerOrder | None, at: datetime) -> PricedModel:
    """Find the price of a model on a day. Raises `ValidationFailed` for a model without a price, or an unsupported
    order.

    If the price depends on the size of the prompt, that of small prompts is used.
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
    return PricedModel(profile=profile, price=price, order=chosen, tariff=tariff)


def compare(
    model: PricedModel, workload: Workload, policy: CompactionPolicy, threshold: CompactionPolicy
) -> Comparison:
    """Simulate the workload under every policy. `policy` also sets `keep_exchanges` and the fixed cost for
    the optimum.
    """
    found = [_compare_one(model, workload, exchanges, policy, threshold) for exchanges in draw_workload(workload)]
    return sum(found[1:], found[0])


def simulate_workload(model: PricedModel, workload: Workload, policy: CompactionPolicy) -> Run:
    """Simulate the workload under one policy."""
    typical = workload.exchanges if workload.length_known else None
    runs = [
        simulate(
            _build_timeline(model, workload, exchanges, _LAYOUTS[model.order]),
            model,
            policy,
            typical_exchange_count=typical,
        )
        for exchanges in draw_workload(workload)
    ]
    return sum(runs[1:], runs[0])


def draw_workload(workload: Workload) -> list[tuple[SimulatedExchange, ...]]:
    """Draw the conversations of a workload. The same workload gives the same conversations."""
    # Each shape, pace and length has its own seed, so that changing one leaves the others the same.
    seed = f"{workload.seed}:{workload.shape.name}:{workload.think_time.name}:{workload.exchanges}"
    lengths = spread_lengths(workload.exchanges, workload.conversations, workload.lengths)
    return [
        draw_conversation(workload.shape, workload.think_time, length, f"{seed}:{place}")
        for place, length in enumerate(lengths)
    ]


def simulate(
    timeline: Timeline, model: PricedModel, policy: CompactionPolicy, *, typical_exchange_count: float | None = None
) -> Run:
    """Simulate one conversation. The planner decides after every exchange, and again at its `recheck_at`."""
    simulation = _Simulation(timeline, model)
    for number in range(len(timeline.exchanges)):
        if number and policy.kind is not PolicyKind.OFF:
            simulation.plan(policy, number, typical_exchange_count)
        simulation.play(number)
    return simulation.finish(policy)


def replay(timeline: Timeline, model: PricedModel, policy: CompactionPolicy, compacted_before: tuple[int, ...]) -> Run:
    """Simulate one conversation that is compacted at the given moments, down to the exchanges that the policy keeps."""
    simulation = _Simulation(timeline, model)
    for number in range(len(timeline.exchanges)):
        if number in compacted_before:
            simulation.compact(Compacted(before=number, start=number - policy.keep_exchanges))
        simulation.play(number)
    return simulation.finish(policy)


def _build_timeline(
    model: PricedModel, workload: Workload, exchanges: tuple[SimulatedExchange, ...], layout: Layout
) -> Timeline:
    clock = BlockClock(clock_seconds=workload.clock_seconds, lifetime_seconds=model.tariff.lifetime_seconds)
    return Timeline(workload.shape, exchanges, layout, strips_thinking=model.profile.prefix_bound, clock=clock)


def _compare_one(
    model: PricedModel,
    workload: Workload,
    exchanges: tuple[SimulatedExchange, ...],
    policy: CompactionPolicy,
    threshold: CompactionPolicy,
) -> Comparison:
    build_timeline = partial(_build_timeline, model, workload, exchanges)
    never = CompactionPolicy(kind=PolicyKind.OFF)
    used = build_timeline(_LAYOUTS[model.order])
    kept = used if model.order is LayerOrder.APPEND_ONLY else build_timeline(Layout.KEPT)
    typical = workload.exchanges if workload.length_known else None
    optimum = find_optimum(
        used, model.tariff, keep=policy.keep_exchanges, fixed_cost_usd=_fixed_cost_usd(model, policy)
    )
    return Comparison(
        uncached=simulate(build_timeline(Layout.UNCACHED), model, never),
        kept=simulate(kept, model, never),
        threshold=simulate(used, model, threshold),
        cost=simulate(used, model, policy, typical_exchange_count=typical),
        optimum=replay(used, model, policy, optimum.compacted_before),
    )


class _Simulation:
    """One conversation in progress."""

    def __init__(self, timeline: Timeline, model: PricedModel) -> None:
        self._timeline = timeline
        self._market = model
        self._provider = SimulatedProvider(model.tariff)
        self._bill = CallCost()
        self._compacted = NEVER
        self._compaction_count = 0
        self._gaps: list[float] = []

    def play(self, number: int) -> None:
        """Make the calls of an exchange."""
        exchange = self._timeline.exchanges[number]
        if number:
            before = self._timeline.exchanges[number - 1]
            self._gaps.append((exchange.starts_at - before.ends_at).total_seconds())
        for step, at in enumerate(exchange.call_times()):
            self._bill += self._provider.call(self._timeline.prompt(number, step, self._compacted), at)

    def compact(self, compacted: Compacted) -> None:
        self._compacted = compacted
        self._compaction_count += 1

    def plan(self, policy: CompactionPolicy, number: int, typical_exchange_count: float | None) -> None:
        """Decide before exchange `number`: at the end of the one before, and at `recheck_at`."""
        model = self._market
        timeline = self._timeline
        ended_at = timeline.exchanges[number - 1].ends_at
        state = CompactionState(
            exchanges=tuple(self._read_buffer(number)),
            static_tokens=timeline.static_tokens(self._compacted),
            dynamic_tokens=timeline.block_tokens,
            caches_buffer=timeline.layout.caches_buffer and not self._is_volatile(number - 1),
            last_call_at=ended_at,
            cache_lifetime_seconds=model.tariff.lifetime_seconds,
            typical_gap_seconds=median(self._gaps[-_RECENT_GAPS:]) if self._gaps else None,
            exchange_count=number,
            typical_exchange_count=typical_exchange_count,
        )
        decision = plan_compaction(state, model.profile, model.price, policy, ended_at)
        again = decision.recheck_at
        if again is not None and again <= timeline.exchanges[number].starts_at:
            decision = plan_compaction(state, model.profile, model.price, policy, again)
        if decision.plan is not None:
            start = self._compacted.start + decision.plan.exchange_count
            self.compact(Compacted(before=number, start=start))

    def finish(self, policy: CompactionPolicy) -> Run:
        fixed = self._compaction_count * _fixed_cost_usd(self._market, policy)
        return Run(calls_cost=self._bill, compaction_count=self._compaction_count, fixed_usd=fixed)

    def _is_volatile(self, number: int) -> bool:
        changes = self._timeline.blocks[number].changes
        return self._timeline.layout is Layout.LAYERED and DynamicClock(changes=changes).is_volatile

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


def _fixed_cost_usd(model: PricedModel, policy: CompactionPolicy) -> float:
    return policy.fixed_cost_tokens * model.tariff.fresh / _MILLION
