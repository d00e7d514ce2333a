"""The guide on the emulators is correct: its program runs, its script loads, its list of faults is complete."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from server.emulator.reply import FaultKind
from server.emulator.script import load_script
from tests.support.strata_process import PROJECT, StrataProcess, environment

PAGE = (PROJECT / "docs/guides/emulators.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    ("provider", "key", "program"),
    [("gemini", "GEMINI_API_KEY", 0), ("anthropic", "ANTHROPIC_API_KEY", 1)],
    ids=["gemini", "anthropic"],
)
def test_the_program_runs_against_the_command(provider: str, key: str, program: int, tmp_path: Path) -> None:
    """`strata emulate` in one terminal, a program with the stock SDK in another."""
    script = tmp_path / "weather.py"
    script.write_text(examples("python")[program], encoding="utf-8")
    with StrataProcess("emulate", provider, "--port", "0", "--full-speed", env={}) as emulator:
        name, _, url = emulator.find(r"export (\w+=http\S+)").partition("=")
        ran = subprocess.run(
            [sys.executable, script],
            env=environment({name: url, key: "anything"}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "-> get_weather({'city': 'Paris'})\n-> get_weather({'city': 'Tokyo'})\n" in ran.stdout
    assert "18 °C and sunny" in ran.stdout


def test_the_script_loads() -> None:
    assert load_script(examples("yaml")[0]).take(1, "hi", after_tools=False) is not None


def test_every_fault_is_explained() -> None:
    table = PAGE.partition("## Faults")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}

    assert explained == set(FaultKind)
