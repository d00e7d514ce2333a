"""The documented grid: every model, shape and pace at three lengths. `docs/operations/costs.md` shows the results.

`compare_clocks` is the simulation behind the default of `clock_seconds`, and `compare_orders` shows what a changing
context costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Final

from server.compaction.simulation.comparison import (
    Comparison,
    PricedModel,
    Workload,
    compare,
    find_priced_model,
    simulate_workload,
)
from server.compaction.simulation.workload import LengthLaw, Shape, ThinkTime
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind
from server.conversation.payload import LayerOrder
from server.payload.dynamic_clock import DEFAULT_CLOCK_SECONDS

SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape(
            name="chat",
            static_tokens=1_500,
            dynamic_tokens=500,
            task_tokens=60,
            answer_tokens=250,
            thinking_tokens=100,
            spread=0.5,
        ),
        Shape(
            name="support",
            static_tokens=4_000,
            dynamic_tokens=800,
            task_tokens=120,
            answer_tokens=300,
            thinking_tokens=200,
            tool_share=0.5,
            tool_steps=2,
            call_tokens=60,
            result_tokens=600,
            spread=0.5,
        ),
        Shape(
            name="agent",
            static_tokens=8_000,
            dynamic_tokens=1_000,
            task_tokens=200,
            answer_tokens=400,
            thinking_tokens=300,
            tool_share=1.0,
            tool_steps=4,
            call_tokens=100,
            result_tokens=700,
            spread=0.5,
        ),
    )
}
THINK_TIMES: Final = {
    think_time.name: think_time
    for think_time in (
        ThinkTime(name="quick", mean_seconds=20),
        ThinkTime(name="human", mean_seconds=180),
        ThinkTime(name="slow", mean_seconds=3_600),
    )
}
_DAY_SECONDS: Final = 86_400
LENGTHS: Final = {10: 12, 40: 12, 120: 4}
"""Mean exchanges, and the number of conversations of each. Short conversations vary more."""
MODELS: Final = (
    ("gemini", "gemini-3.8-flash", LayerOrder.LAYERED),
    ("gemini", "gemini-4-argon", LayerOrder.LAYERED),
    ("gemini", "gemini-3.8-flash", LayerOrder.APPEND_ONLY),
    ("anthropic", "claude-opus-4-8", LayerOrder.LAYERED),
    ("anthropic", "claude-opus-4-8", LayerOrder.APPEND_ONLY),
    ("anthropic", "claude-sonnet-5-5", LayerOrder.APPEND_ONLY),
    ("anthropic", "claude-fable-5-2", LayerOrder.APPEND_ONLY),
)
PRICED_AT: Final = datetime(2026, 11, 16, tzinfo=UTC)
"""The date of the prices in the documented figures."""
POLICY: Final = CompactionPolicy()
THRESHOLD: Final = CompactionPolicy(kind=PolicyKind.THRESHOLD)
LIMIT: Final = 1.05
"""The maximum distance of the cost policy from the optimum in a cell."""
UNCLAIMED: Final = {("claude-sonnet-5-5", LayerOrder.APPEND_ONLY, "support", "quick", 40): 1.08}
"""Cells with a higher limit. There a compaction costs as much as a quarter of a short conversation and pays off only in
a long one, which the optimum knows in advance. The distance is 1.05 to 1.07, depending on the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """A model, a shape and a pace: the comparison for each length."""

    model: PricedModel
    shape: Shape
    think_time: ThinkTime
    by_length: dict[int, Comparison]

    def limit(self, mean: int) -> float:
        """The maximum distance of the cost policy from the optimum at this length."""
        place = (self.model.profile.model, self.model.order, self.shape.name, self.think_time.name, mean)
        return UNCLAIMED.get(place, LIMIT)

    def cells(self) -> tuple[str, ...]:
        """The row as it is printed: the workload, the shares of the cost without caching, and the distances
        by length.
        """
        total = self.total
        shares = (total.kept, total.threshold, total.cost, total.optimum)
        return (
            self.model.profile.model,
            self.model.order,
            self.shape.name,
            self.think_time.name,
            *(f"{total.share(run):.3f}" for run in shares),
            *(f"{comparison.distance:.3f}" for comparison in self.by_length.values()),
        )

    @property
    def total(self) -> Comparison:
        """All lengths together."""
        first, *others = self.by_length.values()
        return sum(others, first)


def walk_grid(
    *,
    models: Sequence[tuple[str, str, LayerOrder]] = MODELS,
    lengths: LengthLaw = LengthLaw.EVEN,
    length_known: bool = True,
    seed: int = 0,
    policy: CompactionPolicy = POLICY,
    threshold: CompactionPolicy = THRESHOLD,
    clock_seconds: int = DEFAULT_CLOCK_SECONDS,
    change_share: float = 0.0,
) -> Iterator[GridRow]:
    """Yield the rows of the grid. `change_share`: before this share of the exchanges the context changes."""
    for provider, name, order in models:
        model = find_priced_model(provider, name, order, PRICED_AT)
        for shape in SHAPES.values():
            for think_time in THINK_TIMES.values():
                workload = Workload(
                    shape=replace(shape, change_share=change_share),
                    think_time=think_time,
                    exchanges=0,
                    lengths=lengths,
                    length_known=length_known,
                    seed=seed,
                    clock_seconds=clock_seconds,
                )
                by_length = {
                    mean: compare(model, replace(workload, exchanges=mean, conversations=count), policy, threshold)
                    for mean, count in LENGTHS.items()
                }
                yield GridRow(model=model, shape=shape, think_time=think_time, by_length=by_length)


CLOCK_SECONDS: Final = (300, 900, 1_800, 3_600, 7_200)


def compare_clocks(periods: Sequence[int] = CLOCK_SECONDS) -> dict[int, float]:
    """Return for each period of the clock in the dynamic block the highest cost of a cell in the layered order, as a
    multiple of its cost with a period of a day.
    """
    highest = dict.fromkeys(periods, 1.0)
    for provider, name, order in MODELS:
        if order is not LayerOrder.LAYERED:
            continue
        model = find_priced_model(provider, name, order, PRICED_AT)
        for shape, think_time, (mean, count) in product(SHAPES.values(), THINK_TIMES.values(), LENGTHS.items()):
            workload = Workload(shape=shape, think_time=think_time, exchanges=mean, conversations=count)
            daily = simulate_workload(model, replace(workload, clock_seconds=_DAY_SECONDS), POLICY).cost_usd
            for period in periods:
                cost = simulate_workload(model, replace(workload, clock_seconds=period), POLICY).cost_usd
                highest[period] = max(highest[period], cost / daily)
    return highest


CHANGE_SHARES: Final = (0.0, 0.1, 0.2, 0.5, 1.0)


def compare_orders(provider: str, name: str, change_share: float) -> dict[tuple[str, str], float]:
    """Return for each shape and pace the cost in the layered order as a multiple of that in the append-only order."""
    layered, append_only = (
        find_priced_model(provider, name, order, PRICED_AT) for order in (LayerOrder.LAYERED, LayerOrder.APPEND_ONLY)
    )
    ratios = {}
    for shape, think_time in product(SHAPES.values(), THINK_TIMES.values()):
        workloads = [
            Workload(
                shape=replace(shape, change_share=change_share),
                think_time=think_time,
                exchanges=mean,
                conversations=count,
            )
            for mean, count in LENGTHS.items()
        ]
        costs = [
            sum(simulate_workload(model, one, POLICY).cost_usd for one in workloads) for model in (layered, append_only)
        ]
        ratios[shape.name, think_time.name] = costs[0] / costs[1]
    return ratios


WHO: Final = ("model", "order", "shape", "pace")
COLUMNS: Final = (
    *WHO,
    "append-only",
    "threshold",
    "cost",
    "optimum",
    *(f"distance at {mean}" for mean in LENGTHS),
)
"""The columns of `GridRow.cells`."""
ROW_COUNT: Final = len(MODELS) * len(SHAPES) * len(THINK_TIMES)
