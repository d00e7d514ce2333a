"""A pytest plugin that reports every skipped test.

Every skip is listed with its reason at the end of the run. In CI, where everything that a test needs is available, a
skip is a failure, unless its reason starts with one of `ALLOWED_IN_CI`.
"""

import os
from collections.abc import Generator

import pytest

ALLOWED_IN_CI: tuple[str, ...] = ()
"""Prefixes of reasons that are allowed in CI, each with a comment that explains why. None so far."""


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    return text.removeprefix("Skipped: ") or "no reason given"


def _is_skip(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Whether the report is a skip and not the expected failure that pytest reports as one."""
    return report.outcome == "skipped" and not hasattr(report, "wasxfail")


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if _is_skip(report) and _in_ci() and not (ALLOWED_IN_CI and _reason(report).startswith(ALLOWED_IN_CI)):
        report.longrepr = f"skipped, and in CI nothing may be skipped: {_reason(report)}"
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module can skip itself while it is collected."""
    report = yield
    _judge(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skips = [report for report in terminalreporter.getreports("skipped") if _is_skip(report)]
    if not skips:
        return
    terminalreporter.section(f"{len(skips)} SKIPPED", yellow=True, bold=True)
    for report in sorted(skips, key=lambda report: report.nodeid):
        terminalreporter.line(f"{report.nodeid}: {_reason(report)}")
