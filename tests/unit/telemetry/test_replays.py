"""Metrics of replays are separate from those of live conversations."""

from decimal import Decimal

from server.replay.rerun.observer import CallPurpose, Departure, ReplayObserver
from server.replay.rerun.result import Outcome
from server.telemetry.metrics import Metrics
from server.telemetry.replays import ReplayTelemetry
from tests.support.builders import call_end, call_start
from tests.support.fakes.telemetry import USAGE


def test_replays_have_their_own_metrics() -> None:
    metrics = Metrics(version="1")
    live_before = _values(metrics, "strata_replay_", has_prefix=False)
    observer: ReplayObserver = metrics.replays
    start = call_start(attempt=2)
    observer.call_ended(start, call_end(usage=USAGE, cost_usd=Decimal("0.5")), CallPurpose.ANSWER)
    observer.call_ended(start, call_end(usage=USAGE, cost_usd=None), CallPurpose.JUDGE)
    observer.call_ended(start, call_end(status=529, error_code="provider_overloaded"), CallPurpose.COMPACTION)
    observer.result_recorded(Outcome.DIFFERENT)
    observer.item_left(Departure.FAILED, error_code="price_unknown")
    observer.item_left(Departure.GIVEN_BACK)

    found = _values(metrics, "strata_replay_", has_prefix=True)
    by = f"model={start.model},provider={start.provider},purpose"
    assert found[f"strata_replay_calls_total error_code=none,{by}=answer,status=2xx"] == 1
    assert found[f"strata_replay_calls_total error_code=provider_overloaded,{by}=compaction,status=5xx"] == 1
    assert found[f"strata_replay_tokens_total bucket=cache_read,{by}=judge"] == USAGE.cache_read_tokens
    assert found[f"strata_replay_cost_usd_total {by}=answer"] == 0.5
    assert found[f"strata_replay_unpriced_calls_total {by}=judge"] == 1
    assert found["strata_replay_results_total outcome=different"] == 1
    assert found["strata_replay_items_total departure=failed,error_code=price_unknown"] == 1
    assert found["strata_replay_items_total departure=given_back,error_code=none"] == 1
    assert _values(metrics, "strata_replay_", has_prefix=False) == live_before
    # A worker has no /metrics.
    ReplayTelemetry().result_recorded(Outcome.SAME)


def _values(metrics: Metrics, prefix: str, *, has_prefix: bool) -> dict[str, float]:
    """Only our own metrics, without those of the process and the build."""
    return {
        f"{sample.name} {','.join(f'{name}={value}' for name, value in sorted(sample.labels.items()))}": sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("strata_") and sample.name.startswith(prefix) is has_prefix
    }
