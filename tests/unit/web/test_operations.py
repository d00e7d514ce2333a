import asyncio

import pytest

from server.conversation.errors import DatabaseUnavailable, DatabaseUnsupported
from server.web import operations
from tests.support.fakes.site import VERSION, Site, open_site


async def test_healthz_answers_without_using_any_resource(site: Site) -> None:
    site.key_ring.down = True
    answer = await site.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert site.probe.check_count == 0


async def test_readyz_names_its_checks(site: Site) -> None:
    answer = await site.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "checks": [{"name": "database", "status": "ok"}]}


async def test_readyz_reports_the_reason_and_recovers(site: Site) -> None:
    site.probe.error = DatabaseUnavailable("The database does not answer: connection refused.")
    for _ in range(2):
        answer = await site.get("/readyz")
        assert answer.status_code == 503
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "2"
    assert (body["code"], body["status"], body["request_id"]) == (
        "database_unavailable",
        503,
        answer.headers["x-request-id"],
    )
    assert body["checks"] == [
        {
            "name": "database",
            "status": "failing",
            "code": "database_unavailable",
            "detail": "The database does not answer: connection refused.",
        }
    ]
    site.probe.error = None
    assert (await site.get("/readyz")).status_code == 200
    assert len(site.events("readiness.lost")) == 1
    assert site.events("readiness.lost")[0]["failing"] == {"database": "database_unavailable"}
    assert len(site.events("readiness.regained")) == 1


async def test_readyz_is_503_for_a_configuration_error_too(site: Site) -> None:
    site.probe.error = DatabaseUnsupported()
    answer = await site.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unsupported")


async def test_readyz_does_not_wait_for_a_probe_that_hangs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_CHECK_SECONDS", 0.05)
    site.probe.gate = asyncio.Event()
    answer = await site.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["status"] == 503
    assert "retry-after" in answer.headers
    assert answer.json()["checks"][0]["detail"] == "The check did not end within 0.05 s."


async def test_readyz_reports_the_shutdown(site: Site) -> None:
    await site.running_turns.drain(0)
    answer = await site.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "1"
    assert site.probe.check_count == 0


async def test_concurrent_requests_share_one_round_of_checks(site: Site) -> None:
    site.probe.gate = asyncio.Event()
    asking = [asyncio.create_task(site.get("/readyz")) for _ in range(8)]
    for _ in range(500):
        if b"strata_http_requests_in_flight 8" in site.metrics.render():
            break
        await asyncio.sleep(0.01)
    site.probe.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
    assert site.probe.check_count == 1


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_head_answers_as_get_does_without_a_body(site: Site, path: str) -> None:
    got, head = await site.get(path), await site.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    site.probe.error = DatabaseUnavailable()
    assert (await site.client.head("/readyz")).status_code == 503


@pytest.mark.parametrize("path", ["/healthz/", "/readyz/", "/metrics/", "/schema/", "//healthz"])
async def test_a_trailing_slash_makes_no_difference(site: Site, path: str) -> None:
    assert (await site.client.get(f"http://127.0.0.1:{site.port}{path}")).status_code == 200


async def test_metrics_are_in_the_text_format(site: Site) -> None:
    await site.get("/healthz")
    answer = await site.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert 'strata_http_requests_total{method="GET",route="/healthz",status="200"} 1.0' in lines
    assert "strata_http_requests_in_flight 1.0" in lines
    assert "strata_turns_running 0.0" in lines
    assert any(line.startswith("strata_build_info{") and f'version="{VERSION}"' in line for line in lines)
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)


async def test_running_turns_are_counted(site: Site) -> None:
    release = asyncio.Event()
    turn = site.running_turns.start(release.wait(), name="turn")
    assert "strata_turns_running 1.0" in (await site.get("/metrics")).text
    release.set()
    await turn


async def test_two_sites_in_one_process_do_not_mix_their_metrics(site: Site) -> None:
    async with open_site() as other:
        await other.get("/healthz")
        assert 'route="/healthz"' not in (await site.get("/metrics")).text


async def test_metrics_can_be_protected_by_a_token() -> None:
    async with open_site(metrics_token="a-token-for-prometheus") as site:
        for headers in (
            {},
            {"authorization": "Bearer another-token"},
            {"authorization": "Basic a-token-for-prometheus"},
        ):
            answer = await site.get("/metrics", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "key_rejected")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "STRATA_METRICS_TOKEN" in answer.json()["detail"]
            assert "strata keys create" not in answer.json()["hint"]
        shown = await site.get("/metrics", headers={"authorization": "Bearer a-token-for-prometheus"})
        assert shown.status_code == 200
        assert "strata_build_info" in shown.text
        assert (await site.get("/healthz")).status_code == 200
