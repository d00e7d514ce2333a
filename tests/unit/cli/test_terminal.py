"""Progress of commands."""

import pytest

from server.cli.terminal import report_progress


def test_progress_is_printed_as_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with report_progress("turns verified", total=1_000, completed=200, line_seconds=0) as advance:
        advance(300)
        advance(500)
    with report_progress("turns verified", total=1_000) as advance:
        advance(1_000)
    assert capsys.readouterr() == ("", "turns verified: 500 of 1,000\nturns verified: 1,000 of 1,000\n")
