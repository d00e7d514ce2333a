"""`strata simulate`: a table, JSON, a chart, and the same figures for the same seed."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from server.cli import main
from server.cli.simulate_chart import draw_grid
from server.compaction.simulation.grid import COLUMNS, MODELS, walk_grid

SMALL = ("--exchanges", "12", "--conversations", "2")


def run(*options: str) -> str:
    result = CliRunner().invoke(main, ["simulate", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows_of(*options: str) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in run("--json", *SMALL, *options).splitlines()]
    return {row["policy"]: row for row in rows}


def test_the_table_has_every_policy() -> None:
    shown = run(*SMALL)
    for name in ("no caching", "append-only", "threshold", "cost policy", "optimum"):
        assert re.search(rf"^ {name} +\$\d", shown, re.MULTILINE), name
    assert "gemini-3.8-flash (layered), chat, human" in shown


def test_json_has_tokens_and_costs() -> None:
    rows = rows_of("--model", "claude-opus-4-8", "--think-time", "slow", "--shape", "support")
    assert list(rows) == ["uncached", "kept", "threshold", "cost", "optimum"]
    assert rows["uncached"]["share"] == 1
    assert rows["uncached"]["cache_read_tokens"] == 0
    assert rows["optimum"]["distance"] == 1
    assert rows["cost"]["compactions"] > 0
    assert rows["kept"]["compactions"] == 0


def test_a_changing_context_and_a_fine_clock_cost_more() -> None:
    def cost(*arguments: str) -> float:
        return float(rows_of("--think-time", "quick", "--shape", "support", *arguments)["cost"]["cost_usd"])

    assert cost() < cost("--change-share", "0.3") < cost("--change-share", "1")
    assert cost() < cost("--clock-seconds", "60")


def test_the_same_seed_gives_the_same_figures() -> None:
    assert rows_of("--seed", "3") == rows_of("--seed", "3")
    assert rows_of("--seed", "3") != rows_of("--seed", "4")


def test_prices_are_those_of_the_date() -> None:
    now, later = (rows_of("--date", day)["uncached"]["cost_usd"] for day in ("2026-12-31", "2027-01-01"))
    assert later == pytest.approx(2 * now)


@pytest.mark.parametrize(
    "option",
    [("--order", "append_only"), ("--keep-exchanges", "1"), ("--fixed-cost-tokens", "9000"), ("--max-tokens", "500")],
)
def test_every_option_changes_the_output(option: tuple[str, str]) -> None:
    assert rows_of(*option, "--shape", "support") != rows_of("--shape", "support")


def test_a_chart_is_one_file_that_refers_to_no_other(tmp_path: Path) -> None:
    file = tmp_path / "chart.svg"
    run(*SMALL, "--chart", str(file))
    drawn = file.read_text()
    root = ET.fromstring(drawn)  # noqa: S314  reason: the command has drawn it
    texts = "".join(root.itertext())
    for name in ("no caching", "append-only", "threshold", "cost policy", "optimum", "exchanges"):
        assert name in texts
    assert "<script" not in drawn
    assert re.findall(r"https?://[^\s\"'<)]+", drawn) == ["http://www.w3.org/2000/svg"]
    assert "@import" not in drawn


def test_a_chart_is_svg_and_nothing_else() -> None:
    result = CliRunner().invoke(main, ["simulate", *SMALL, "--chart", "chart.png"])
    assert result.exit_code == 2
    assert "name a file that ends in .svg" in result.stderr


def test_a_model_without_a_price_is_refused() -> None:
    result = CliRunner().invoke(main, ["simulate", "--model", "gpt-unheard-of"])
    assert result.exit_code == 65
    assert "The price of gpt-unheard-of is unknown." in result.stderr


def test_the_grid_is_printed_row_by_row_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few rows: the whole grid takes long, and its figures are compared with the docs in another test."""
    rows = list(islice(walk_grid(models=MODELS[:1]), 2))
    monkeypatch.setattr("server.cli.simulate.walk_grid", lambda **_: iter(rows))
    lines = [json.loads(line) for line in run("--grid", "--json").splitlines()]
    assert [tuple(line.values()) for line in lines] == [row.cells() for row in rows]
    assert tuple(lines[0]) == COLUMNS
    file = tmp_path / "grid.svg"
    shown = run("--grid", "--chart", str(file))
    assert re.search(r"^The cost policy costs at most 1\.0\d\d times the optimum\.$", shown, re.MULTILINE)
    assert all(cell in shown for row in rows for cell in row.cells()[4:])
    draw_grid(rows, tmp_path / "again.svg")
    assert file.read_bytes() == (tmp_path / "again.svg").read_bytes()
