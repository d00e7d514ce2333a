"""The plugin that reports skips, in separate test runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="no Chromium here")
def test_with_a_mark():
    pass

def test_in_the_middle():
    pytest.skip("no network here")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail():
    assert False
"""


def run(directory: Path, *options: str, ci: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.loud_skips", "-p", "no:cacheprovider", *options],
        cwd=directory,
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("options", [(), ("-pxdist", "-n1")], ids=["in one process", "in a worker"])
def test_a_skip_is_listed_with_its_reason(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(SKIPPING, encoding="utf-8")

    done = run(tmp_path, *options, ci="")

    assert done.returncode == pytest.ExitCode.OK
    assert "= 2 SKIPPED =" in done.stdout
    assert "test_some.py::test_with_a_mark: no Chromium here" in done.stdout
    assert "test_some.py::test_in_the_middle: no network here" in done.stdout


@pytest.mark.parametrize("options", [(), ("-pxdist", "-n1")], ids=["in one process", "in a worker"])
def test_a_skip_fails_in_ci(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(SKIPPING, encoding="utf-8")

    done = run(tmp_path, *options, ci="true")

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "in CI nothing may be skipped: no Chromium here" in done.stdout
    assert "in CI nothing may be skipped: no network here" in done.stdout
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in done.stdout


@pytest.mark.parametrize("options", [(), ("-pxdist", "-n1")], ids=["in one process", "in a worker"])
def test_a_module_that_skips_itself_fails_in_ci_too(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\npytest.importorskip('no_such_package')", encoding="utf-8")

    at_home = run(tmp_path, *options, ci="")
    in_ci = run(tmp_path, *options, ci="true")

    assert "test_some.py: could not import 'no_such_package'" in at_home.stdout
    assert in_ci.returncode not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    assert "in CI nothing may be skipped: could not import 'no_such_package'" in in_ci.stdout


def test_a_run_without_skips_reports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_passes(): pass", encoding="utf-8")

    done = run(tmp_path, ci="true")

    assert done.returncode == pytest.ExitCode.OK
    assert "SKIPPED" not in done.stdout
