from datetime import timedelta
from decimal import Decimal

import pytest

from server.conversation.usage import Usage
from server.telemetry.metrics import Metrics
from tests.support.builders import A_TIME, call_end, call_start
from tests.support.fakes.telemetry import ASSISTANT, SECRET, USAGE, Watched, lease


def test_every_attempt_is_counted_with_what_it_used(watched: Watched) -> None:
    failed = call_end(
        status=529,
        error_code="provider_overloaded",
        usage=Usage(fresh_input_tokens=4),
        cost_usd=Decimal("0.5"),
        first_byte_at=None,
        ended_at=A_TIME + timedelta(seconds=1),
    )
    good = call_end(
        usage=USAGE,
        cost_usd=Decimal("0.25"),
        first_byte_at=A_TIME + timedelta(seconds=2),
        ended_at=A_TIME + timedelta(seconds=5),
    )
    watched.observer.call_ended(lease(), call_start(started_at=A_TIME), failed, assistant_id=ASSISTANT)
    watched.observer.call_ended(lease(), call_start(attempt=2, started_at=A_TIME), good, assistant_id=ASSISTANT)
    assert watched.value("strata_calls_total", status="5xx", error_code="provider_overloaded") == 1
    assert watched.value("strata_calls_total", status="2xx", error_code="none") == 1
    assert watched.value("strata_call_retries_total") == 1
    assert watched.value("strata_call_time_to_first_byte_seconds_sum") == 2
    assert watched.value("strata_call_duration_seconds_sum") == 6
    buckets = ("fresh_input", "cache_read", "cache_write", "output", "reasoning")
    assert [watched.value("strata_tokens_total", bucket=bucket) for bucket in buckets] == [11, 5, 3, 2, 1]
    assert watched.value("strata_cost_usd_total", provider="gemini") == pytest.approx(0.75)
    assert watched.value("strata_unpriced_calls_total") == 0


def test_cache_reads_input_and_expected_reads_are_three_counters(watched: Watched) -> None:
    watched.observer.call_ended(
        lease(), call_start(cache_expected_tokens=6), call_end(usage=USAGE), assistant_id=ASSISTANT
    )
    watched.observer.call_ended(
        lease(), call_start(cache_expected_tokens=6), call_end(usage=Usage()), assistant_id=ASSISTANT
    )
    assert watched.value("strata_cached_input_tokens_total") == 5
    assert watched.value("strata_input_tokens_total") == 15
    assert watched.value("strata_expected_cached_input_tokens_total") == 6


def test_costs_are_labelled_by_assistant_up_to_a_maximum(watched: Watched) -> None:
    for number in range(250):
        end = call_end(usage=USAGE, cost_usd=Decimal(1))
        watched.observer.call_ended(lease(), call_start(cache_expected_tokens=6), end, assistant_id=f"asst_{number}")
    watched.observer.call_ended(lease(), call_start(), call_end(usage=USAGE, cost_usd=None), assistant_id="asst_7")
    watched.observer.call_ended(lease(), call_start(), call_end(usage=USAGE), assistant_id=None)
    for name, of_one in (
        ("strata_input_tokens_total", 15),
        ("strata_cached_input_tokens_total", 5),
        ("strata_expected_cached_input_tokens_total", 6),
        ("strata_cost_usd_total", 1),
    ):
        assert len({labels["assistant"] for labels in watched.series(name)}) <= 202
        assert watched.value(name, assistant="asst_0") == of_one
        assert watched.value(name, assistant="_OTHER") == 50 * of_one
    assert watched.value("strata_tokens_total", assistant="asst_7", bucket="fresh_input") == 14
    assert watched.value("strata_unpriced_calls_total", assistant="asst_7") == 1
    assert watched.value("strata_input_tokens_total", assistant="none") == 15


def test_misses_of_the_cache_are_counted_by_reason(watched: Watched) -> None:
    for reason in (None, "ttl_expired", "ttl_expired", "tools_changed", SECRET):
        end = call_end(usage=USAGE, cache_miss_reason=reason)
        watched.observer.call_ended(lease(), call_start(), end, assistant_id=ASSISTANT)
    counted = {labels["reason"] for labels in watched.series("strata_cache_misses_total")}
    assert counted == {"ttl_expired", "tools_changed", "_OTHER"}
    assert watched.value("strata_cache_misses_total", reason="ttl_expired", provider="gemini") == 2


def test_an_unknown_price_is_not_a_price_of_zero(watched: Watched) -> None:
    watched.observer.call_ended(lease(), call_start(), call_end(usage=USAGE, cost_usd=None), assistant_id=ASSISTANT)
    watched.observer.call_ended(
        lease(), call_start(), call_end(usage=Usage(), cost_usd=None, status=429), assistant_id=ASSISTANT
    )
    assert watched.value("strata_unpriced_calls_total") == 1
    assert watched.value("strata_cost_usd_total") == 0


def test_avoidable_events_are_counted(watched: Watched) -> None:
    start = call_start(
        repairs=({"kind": "result_supplied", "seq": 3, "ids": ["call_1"]}, {"kind": "result_supplied", "seq": 5}),
        template_failures=({"template": "roles", "kind": "render", "message": SECRET},),
        warnings=(
            {"kind": "prefix_break", "index": 4, "layer": "buffered", "seq": 3, "text": SECRET},
            {"kind": "signatures_withheld", "reason": "family", "seqs": [2, 4]},
            {"kind": "profile_assumed", "model": "x"},
        ),
    )
    assert watched.value("strata_prefix_breaks_total", provider="gemini") == 0
    watched.observer.call_ended(lease(), start, call_end(), assistant_id=ASSISTANT)
    assert watched.value("strata_history_repairs_total", kind="result_supplied") == 2
    assert watched.value("strata_template_failures_total", kind="render") == 1
    assert watched.value("strata_prefix_breaks_total", provider="gemini") == 1
    assert watched.value("strata_signatures_withheld_total", reason="family") == 1


def test_alarm_metrics_have_their_series_from_the_start(watched: Watched) -> None:
    assert {labels["provider"] for labels in watched.series("strata_prefix_breaks_total")} == {
        "gemini",
        "anthropic",
    }
    assert len(watched.series("strata_template_failures_total")) == 5
    assert len(watched.series("strata_signatures_withheld_total")) == 6


def test_without_the_setting_no_assistant_id_is_in_the_metrics() -> None:
    metrics = Metrics(version="1")
    metrics.calls.call_ended(call_start(), call_end(usage=USAGE), assistant_id=ASSISTANT)
    shown = metrics.render().decode()
    assert ASSISTANT not in shown
    assert 'assistant=""' in shown
