"""The cost policy stays within its documented distance from the optimum, and the docs show what the command prints."""

from pathlib import Path

import pytest

from server.compaction.simulation.grid import (
    CHANGE_SHARES,
    COLUMNS,
    LIMIT,
    MODELS,
    ROW_COUNT,
    UNCLAIMED,
    compare_clocks,
    compare_orders,
    walk_grid,
)
from server.conversation.payload import LayerOrder
from server.payload.dynamic_clock import DEFAULT_CLOCK_SECONDS

COSTS = (Path(__file__).parents[3] / "docs/operations/costs.md").read_text()


SHORTER_THAN_THE_MINIMUM = ("gemini-4-argon", "chat", "quick", 10)
"""The one case, not in the grid, in which the append-only order is cheaper: its dynamic blocks, one per task, make its
requests long enough to be cached."""


def documented_rows() -> list[tuple[str, ...]]:
    section = COSTS.partition("## The grid")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    header, *rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert header == COLUMNS
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model[1]}, {model[2]}")
def test_the_cost_policy_is_near_the_optimum_and_the_docs_state_the_distance(
    model: tuple[str, str, LayerOrder],
) -> None:
    rows = list(walk_grid(models=[model]))
    for row in rows:
        for mean, comparison in row.by_length.items():
            # Below 1 would mean that the optimum is not one.
            assert 1 - 1e-9 <= comparison.distance <= row.limit(mean), (*row.cells()[:4], mean)
    written = [cells for cells in documented_rows() if cells[:2] == (model[1], model[2])]
    assert written == [row.cells() for row in rows], "write docs/operations/costs.md anew from `strata simulate --grid`"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "model"),
    [("gemini", "gemini-3.8-flash"), ("gemini", "gemini-4-argon"), ("anthropic", "claude-opus-4-8")],
)
def test_the_layered_order_costs_at_most_five_percent_more_than_the_cheaper_one(provider: str, model: str) -> None:
    layered, append_only = (list(walk_grid(models=[(provider, model, order)])) for order in LayerOrder)
    for row, other in zip(layered, append_only, strict=True):
        for mean, comparison in row.by_length.items():
            place = (model, row.shape.name, row.think_time.name, mean)
            # `kept` is a prompt with the dynamic block last that is never compacted.
            cheaper = comparison.kept.cost_usd
            if place != SHORTER_THAN_THE_MINIMUM:
                cheaper = min(cheaper, other.by_length[mean].cost.cost_usd)
            assert comparison.cost.cost_usd <= 1.05 * cheaper, place


@pytest.mark.slow
def test_the_default_clock_is_the_finest_that_costs_less_than_one_percent() -> None:
    highest = compare_clocks()
    assert min(period for period, ratio in highest.items() if ratio < 1.01) == DEFAULT_CLOCK_SECONDS
    for period, ratio in highest.items():
        assert f"| {period:,} | {ratio:.3f} |" in COSTS


@pytest.mark.slow
def test_the_docs_say_what_a_changing_context_costs() -> None:
    by_share = [compare_orders("gemini", "gemini-3.8-flash", share) for share in CHANGE_SHARES]
    for shape, pace in by_share[0]:
        figures = " | ".join(f"{ratios[shape, pace]:.2f}" for ratios in by_share)
        assert f"| {shape} | {pace} | {figures} |" in COSTS


def test_the_docs_show_the_whole_grid() -> None:
    assert len(documented_rows()) == ROW_COUNT


def test_the_limits_of_the_policy_are_in_the_docs() -> None:
    assert len(UNCLAIMED) == 1
    for (model, _, shape, latency, mean), limit in UNCLAIMED.items():
        assert limit > LIMIT
        assert f"`{model}`, `{shape}`, `{latency}`, {mean} exchanges" in COSTS
