"""Compactions in metrics and logs, and the alarm."""

import logging
from decimal import Decimal

import pytest

from server.compaction.report import CompactionOutcome, CompactionReport
from server.telemetry.compactions import CompactionTelemetry
from server.telemetry.metrics import Metrics
from tests.support.builders import call_end, call_start
from tests.support.fakes.telemetry import ASSISTANT, USAGE


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1", assistant_labels=True)


def report(outcome: CompactionOutcome, reason: str = "carrying_cost") -> CompactionReport:
    return CompactionReport(
        conversation_id="conv_x",
        outcome=outcome,
        reason=reason,
        epoch=2,
        first_seq=1,
        last_seq=4,
        moved_tokens=100,
        segment_tokens=50,
        saved_usd_per_call=Decimal("0.001"),
    )


def shown(metrics: Metrics, name: str) -> float:
    return next(
        float(line.rpartition(" ")[2]) for line in metrics.render().decode().splitlines() if line.startswith(name)
    )


def test_compactions_are_counted_and_logged(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "strata.compaction"):
        metrics.compactions.compaction_queued("conv_x", "carrying_cost")
        metrics.compactions.compaction_ended(report(CompactionOutcome.COMPACTED))
        metrics.compactions.compaction_ended(report(CompactionOutcome.UNCHANGED, "not_yet_worth_it"))
    assert [record.message for record in caplog.records] == ["compaction.compacted"]
    assert caplog.records[0].__dict__["saved_usd_per_call"] == 0.001
    assert shown(metrics, 'strata_compactions_queued_total{reason="carrying_cost"}') == 1
    assert shown(metrics, 'strata_compactions_total{outcome="compacted",reason="carrying_cost"}') == 1
    assert shown(metrics, 'strata_compactions_total{outcome="unchanged",reason="not_yet_worth_it"}') == 1
    assert shown(metrics, "strata_compacted_tokens_total") == 100


def test_a_blocked_conversation_is_one_alarm_until_it_is_free(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "strata.compaction"):
        for _ in range(3):
            metrics.compactions.compaction_blocked("conv_x", "blocked_by_open_call", 300_000)
        assert shown(metrics, "strata_compaction_blocked") == 1
        metrics.compactions.compaction_unblocked("conv_y")
        metrics.compactions.compaction_unblocked("conv_x")
        metrics.compactions.compaction_unblocked("conv_x")
    assert [record.message for record in caplog.records] == ["compaction.blocked", "compaction.unblocked"]
    assert caplog.records[0].levelno == logging.WARNING
    assert shown(metrics, "strata_compaction_blocked") == 0
    assert shown(metrics, "strata_compaction_alarms_total") == 1


def test_model_calls_of_a_compaction_are_counted_as_cost(metrics: Metrics) -> None:
    start, end = call_start(), call_end(usage=USAGE, cost_usd=Decimal("0.5"))
    metrics.compactions.call_ended(start, end, assistant_id=ASSISTANT)
    labels = {"provider": start.provider, "model": start.model, "assistant": ASSISTANT}
    assert metrics.registry.get_sample_value("strata_cost_usd_total", labels) == 0.5
    # A worker has no /metrics.
    CompactionTelemetry().call_ended(start, end, assistant_id=ASSISTANT)
