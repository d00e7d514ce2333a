import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.telemetry.metrics import Metrics
from tests.unit.house.repository import ROOT


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2.3")


def samples(metrics: Metrics) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}" if sample.labels else sample.name: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_requests_are_counted_and_timed(metrics: Metrics) -> None:
    for seconds in (0.002, 0.2, 400):
        metrics.request_begun()
        metrics.request_ended(method="GET", route="/v1/key", status=200, seconds=seconds)
    found = samples(metrics)
    labels = "[('method', 'GET'), ('route', '/v1/key'), ('status', '200')]"
    assert found[f"strata_http_requests_total{labels}"] == 3
    assert found[f"strata_http_request_duration_seconds_count{labels}"] == 3
    assert found[f"strata_http_request_duration_seconds_sum{labels}"] == pytest.approx(400.202)
    le = "[('le', '0.0025'), ('method', 'GET'), ('route', '/v1/key'), ('status', '200')]"
    assert found[f"strata_http_request_duration_seconds_bucket{le}"] == 1
    assert not [name for name in found if "_created" in name]


def test_requests_in_flight(metrics: Metrics) -> None:
    metrics.request_begun()
    metrics.request_begun()
    assert samples(metrics)["strata_http_requests_in_flight"] == 2
    metrics.request_ended(method="GET", route="x", status=200, seconds=0)
    assert samples(metrics)["strata_http_requests_in_flight"] == 1


def test_a_callback_is_evaluated_at_collection(metrics: Metrics) -> None:
    value = 1.0
    metrics.gauge_callback("strata_database_connections", "Open connections.", lambda: value)
    assert samples(metrics)["strata_database_connections"] == 1
    value = 7.0
    assert samples(metrics)["strata_database_connections"] == 7


def test_the_build_and_the_process_are_described(metrics: Metrics) -> None:
    found = samples(metrics)
    assert any(name.startswith("strata_build_info") and "1.2.3" in name for name in found)
    assert "process_resident_memory_bytes" in found


def test_two_registries_share_nothing(metrics: Metrics) -> None:
    other = Metrics(version="2")
    other.request_begun()
    other.request_ended(method="GET", route="/x", status=200, seconds=0)
    assert 'route="/x"' not in metrics.render().decode()


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    table = set(re.findall(r"^\| `(strata_\w+)` \|", (ROOT / "docs/operations/running.md").read_text(), re.MULTILINE))
    made = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in Metrics(version="1").registry.collect()
        if family.name.startswith("strata_")
    }
    wired = {
        name
        for module in ("app/wiring", "app/asgi")
        for name in re.findall(r'"(strata_\w+)"', (ROOT / f"server/{module}.py").read_text())
    }
    assert table == made | wired
