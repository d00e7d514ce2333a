import asyncio
import socket
import threading
import time

import pytest

from server.conversation.errors import SettingsInvalid
from server.telemetry.spans import open_tracing, parse_headers
from tests.support.fakes.collector import Collector, attributes_of, open_collector
from tests.support.fakes.log_capture import capture_log
from tests.support.fakes.site import Site, open_site

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
EXPORT_SECONDS = 5
"""The timeout of an export, for which a shutdown must not wait."""


def closed_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def visit(collector: Collector, *paths: str, **headers: str) -> Site:
    """Request the paths of a traced site; all its spans have been sent afterwards."""
    tracing = open_tracing(collector.url, "x-token=a%20b, X-Other=c", "my-strata", "9.8.7")
    with capture_log() as log:
        async with open_site(tracing=tracing, log=log) as site:
            for path in paths:
                await site.get(path, key=site.client_key, headers=headers)
        await asyncio.to_thread(tracing.shutdown)
    return site


async def test_a_request_becomes_a_span() -> None:
    with open_collector() as collector:
        site = await visit(collector, "/v1/key?q=secret")
    (span,) = collector.spans
    assert (span.name, span.kind) == ("GET /v1/key", 2)
    assert attributes_of(span) == {
        "http.request.method": "GET",
        "http.route": "/v1/key",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": site.port,
    }
    assert collector.resource["service.name"] == "my-strata"
    assert collector.resource["service.version"] == "9.8.7"
    assert collector.headers[0]["x-token"] == "a b"
    assert collector.headers[0]["x-other"] == "c"
    (event,) = site.events("http.request_finished")
    assert event["trace_id"] == span.trace_id.hex()
    sent = collector.requests[0].SerializeToString()
    assert b"secret" not in sent
    assert site.client_key.encode() not in sent


async def test_the_span_of_the_caller_is_the_parent() -> None:
    with open_collector() as collector:
        await visit(collector, "/healthz", traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)


async def test_an_invalid_parent_is_ignored() -> None:
    with open_collector() as collector:
        await visit(collector, "/healthz", traceparent="00-nonsense")
    (span,) = collector.spans
    assert span.parent_span_id == b""


async def test_unknown_paths_are_not_in_the_name_and_a_404_is_no_error() -> None:
    with open_collector() as collector:
        await visit(collector, "/nowhere/secret")
    (span,) = collector.spans
    assert span.name == "GET"
    assert span.status.code == 0
    assert "http.route" not in attributes_of(span)


async def test_a_5xx_is_an_error() -> None:
    with open_collector() as collector:
        tracing = open_tracing(collector.url, None, "strata", "1")
        async with open_site(tracing=tracing) as site:
            site.key_ring.down = True
            await site.get("/v1/key", key=site.client_key)
        await asyncio.to_thread(tracing.shutdown)
    (span,) = collector.spans
    assert span.status.code == 2
    assert attributes_of(span)["error.type"] == "503"


async def test_a_full_endpoint_is_used_unchanged() -> None:
    with open_collector() as collector:
        collector.url += "/v1/traces/"
        await visit(collector, "/healthz")
    assert len(collector.spans) == 1


def test_without_an_endpoint_nothing_is_sent() -> None:
    before = threading.active_count()
    tracing = open_tracing(None, None, "strata", "1")
    assert not tracing.enabled
    assert threading.active_count() == before
    with tracing.tracer.start_as_current_span("x") as span:
        assert not span.is_recording()
    tracing.shutdown()


@pytest.mark.slow
async def test_an_unavailable_collector_neither_slows_nor_breaks_nor_fills_the_log() -> None:
    tracing = open_tracing(f"http://127.0.0.1:{closed_port()}", None, "strata", "1")
    with capture_log() as log:
        async with open_site(tracing=tracing, log=log) as site:
            for _ in range(3):
                answers = await asyncio.gather(*(site.get("/healthz") for _ in range(50)))
                assert {answer.status_code for answer in answers} == {200}
                tracing._provider.force_flush()  # type: ignore[union-attr]  # noqa: SLF001
        began = time.monotonic()
        await asyncio.to_thread(tracing.shutdown, 1.0)
        assert time.monotonic() - began < EXPORT_SECONDS
    assert len(site.events("telemetry.export_failed")) == 1
    assert "Traceback" not in log.getvalue()
    assert "opentelemetry" not in log.getvalue()


async def test_a_hanging_collector_does_not_delay_the_shutdown() -> None:
    with open_collector() as collector:
        collector.gate.clear()
        tracing = open_tracing(collector.url, None, "strata", "1")
        tracing.tracer.start_span("x").end()
        began = time.monotonic()
        await asyncio.to_thread(tracing.shutdown, 0.3)
        assert time.monotonic() - began < EXPORT_SECONDS


async def test_the_log_reports_when_sending_works_again() -> None:
    with open_collector() as collector, capture_log() as log:
        tracing = open_tracing(collector.url, None, "strata", "1")
        collector.status = 400
        tracing.tracer.start_span("lost").end()
        await asyncio.to_thread(tracing._provider.force_flush)  # type: ignore[union-attr]  # noqa: SLF001
        collector.status = 200
        tracing.tracer.start_span("kept").end()
        await asyncio.to_thread(tracing.shutdown)
        assert [span.name for span in collector.spans] == ["kept"]
    assert log.getvalue().count("telemetry.export_failed") == 1
    assert '"lost_count": 1' in log.getvalue()
    assert "telemetry.export_recovered" in log.getvalue()


@pytest.mark.parametrize("text", ["nonsense", "=value", "a=b,secret"])
def test_invalid_headers_are_refused_without_repeating_them(text: str) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        parse_headers(text)
    assert "secret" not in str(refused.value)


def test_headers_are_decoded() -> None:
    assert parse_headers("") == {}
    assert parse_headers("Authorization=Basic%20YTpi, x = y=z ,") == {"authorization": "Basic YTpi", "x": "y=z"}
