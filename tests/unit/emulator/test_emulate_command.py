"""`strata emulate` without serving; the integration tests run docs/guides/emulators.md.

The command is invoked through `main`: click caches the help option of a command at its first invocation.
"""

from pathlib import Path

import pytest
from click.testing import CliRunner

from server.cli import main


@pytest.mark.parametrize("provider", ["gemini", "anthropic"])
def test_a_script_with_a_mistake_is_refused_with_its_line(provider: str, tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text("- text: hello\n- txet: hello\n", encoding="utf-8")

    result = CliRunner().invoke(main, ["emulate", provider, "--script", str(path)])

    assert result.exit_code == 2
    assert "Line 2: unknown key 'txet'" in result.output


@pytest.mark.parametrize(("provider", "port"), [("gemini", "8401"), ("anthropic", "8402")])
def test_help_names_the_options_and_the_port(provider: str, port: str) -> None:
    result = CliRunner().invoke(main, ["emulate", provider, "--help"])

    assert port in result.output
    assert all(option in result.output for option in ("--script", "--full-speed", "--seed"))
