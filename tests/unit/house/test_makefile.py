"""The Makefile and .ci/run: the first commands of a new user, and the checks for a change."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.unit.house.repository import ROOT, read

TARGETS = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """GNU make without the settings of a make that may be running these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with everything that the Makefile needs to begin an installation."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def python_that(clone: Path, script: str) -> str:
    path = clone / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return f"PYTHON={path}"


def test_make_alone_lists_every_target() -> None:
    listed = re.findall(r"^  make ([a-z-]+)", make(ROOT).stdout, re.MULTILINE)

    assert listed == TARGETS


def test_every_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", read("Makefile"), re.MULTILINE)

    assert phony is not None
    assert set(TARGETS) <= set(phony[1].split())


def test_a_python_that_is_too_old_is_named_in_a_sentence(clone: Path) -> None:
    done = make(clone, "demo", python_that(clone, "exit 1"))

    assert done.returncode != 0
    assert "Strata needs Python 3.11 or newer" in done.stderr


def test_a_python_without_venv_is_named_in_a_sentence(clone: Path) -> None:
    done = make(clone, "demo", python_that(clone, 'case "$2" in *venv*) exit 1;; esac'))

    assert done.returncode != 0
    assert "apt-get install python3-venv" in done.stderr


def test_an_incomplete_environment_is_created_again(clone: Path) -> None:
    # The venv is created, and the installation into it fails.
    python = python_that(clone, '[ "$2" = venv ] && mkdir -p .venv/bin && echo exit 1 > .venv/bin/python || true')

    first = make(clone, "demo", python)
    (clone / ".venv" / "left_over").touch()
    second = make(clone, "demo", python)

    assert first.returncode != 0
    assert second.returncode != 0
    assert not (clone / ".venv" / "left_over").exists()


def test_a_moved_environment_is_created_again(clone: Path) -> None:
    environment = clone / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").touch(mode=0o755)
    (environment / "pyvenv.cfg").write_text("command = python3 -m venv /elsewhere/.venv\n", encoding="utf-8")
    for stamp in ("locked", "run"):
        (environment / f"{stamp}.stamp").touch()

    assert "rm -rf .venv" in make(clone, "--dry-run", "demo").stdout

    (environment / "pyvenv.cfg").write_text(f"command = python3 -m venv {environment}\n", encoding="utf-8")

    assert "rm -rf .venv" not in make(clone, "--dry-run", "demo").stdout


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert read(".ci/run").rstrip().endswith("exec make test")
    assert "make test" in read("README.md")


def test_ci_can_be_started() -> None:
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", script], check=True, timeout=60)


def test_the_tests_can_be_started_on_another_date() -> None:
    script = "tests/clock/at_date.sh"
    started = make(ROOT, "--dry-run", "test", "TODAY=+60 days", "ARGS=-k sse").stdout

    assert started.splitlines()[-1] == f'{script} "+60 days" .venv/bin/pytest -k sse'
    assert (ROOT / script).stat().st_mode & stat.S_IXUSR
    subprocess.run(["sh", "-n", ROOT / script], check=True, timeout=60)
