"""The benchmarks work: a tiny run produces every figure. Nothing here depends on how long anything takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.report import Figure, Goal, render_comparison, render_table
from tests.bench.upstream import CHUNKS, anthropic_chunks, chat_chunks, gemini_chunks, responses_chunks
from tests.unit.house.repository import ROOT


def run_quickly(file: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--output", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def test_a_tiny_run_measures_every_section(tmp_path: Path) -> None:
    # One test for all of it, because the run is long.
    report = run_quickly(tmp_path / "report.json")
    figures = {figure["name"]: figure for figure in report["figures"]}

    assert len(figures) == len(report["figures"])
    for start in ("HTTP turn", "CPU per turn", "store step", "per turn", "20 slow streams"):
        assert any(name.startswith(start) for name in figures)
    for name, figure in figures.items():
        if name.startswith(("HTTP turn", "store step")):
            assert len(figure["values"]) == len(figure["floor"]) >= 1
    assert figures["20 slow streams: lost words"]["values"] == [0]
    for provider in ("gemini", "anthropic"):
        # A turn is accepted and finished, each with a statement of its own.
        assert figures[f"per turn, {provider}: statements, all"]["values"][0] >= 2
        assert figures[f"per turn, {provider}: WAL"]["values"][0] > 0
    assert report["command"].startswith("python -m tests.bench --quick")
    assert {"cpu", "cores", "load_average", "python", "commit", "measured_at"} <= set(report["machine"])


def test_ratios_are_taken_round_by_round() -> None:
    figure = Figure(name="x", unit="ms", values=[2, 6, 10], floor=[1, 2, 5], goal=Goal(of="ratio", limit=2))

    assert figure.ratios == [2, 3, 2]
    assert figure.meets_goal
    assert "| 2 [2, 3] | ≤ 2 x | met |" in render_table([figure])


def test_a_floor_of_zero_has_no_ratio() -> None:
    figure = Figure(name="x", unit="bytes", values=[8], floor=[0], goal=Goal(of="ratio", limit=2))

    assert figure.ratios == []
    assert figure.meets_goal is None
    assert "ratio" not in figure.to_document()


def test_a_difference_to_the_floor_can_be_a_goal() -> None:
    goal = Goal(of="difference", limit=2)

    assert Figure(name="x", unit="ms", values=[3.5], floor=[1.5], goal=goal).meets_goal
    assert not Figure(name="x", unit="ms", values=[4], floor=[1.5], goal=goal).meets_goal


def test_an_earlier_run_is_compared_by_ratio_if_there_is_a_floor() -> None:
    before = [Figure(name="a", unit="ms", values=[4], floor=[1]), Figure(name="b", unit="ms", values=[10])]
    now = [Figure(name="a", unit="ms", values=[4], floor=[2]), Figure(name="b", unit="ms", values=[9])]

    shown = render_comparison(now, {"figures": [figure.to_document() for figure in before]})

    assert "| a      | ratio    | 4       | 2   | -50 %  |" in shown
    assert "| b      | median   | 10      | 9   | -10 %  |" in shown


def test_the_upstream_sends_as_many_chunks_in_every_format() -> None:
    assert [len(make()) for make in (gemini_chunks, anthropic_chunks, chat_chunks, responses_chunks)] == [CHUNKS] * 4
