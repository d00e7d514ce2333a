"""The cost policy stays within its documented distance from the optimum, and the docs show what the command prints."""

from pathlib import Path

import pytest

from server.compaction.simulation.grid import COLUMNS, LIMIT, MODELS, ROW_COUNT, UNCLAIMED, walk_grid
from server.conversation.payload import LayerOrder

COSTS = (Path(__file__).parents[3] / "docs/operations/costs.md").read_text()


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


def test_the_docs_show_the_whole_grid() -> None:
    assert len(documented_rows()) == ROW_COUNT


def test_the_limits_of_the_policy_are_in_the_docs() -> None:
    assert len(UNCLAIMED) == 1
    for (model, _, shape, latency, mean), limit in UNCLAIMED.items():
        assert limit > LIMIT
        assert f"`{model}`, `{shape}`, `{latency}`, {mean} exchanges" in COSTS
