import asyncio
import re

import httpx2
import pytest
from litestar import get

from tests.support.fakes.site import Site, open_site

MARKER = "purple-elephant-content"
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


async def settled(site: Site, count: int = 1) -> None:
    """Wait for the log lines of requests whose answers may have arrived before they were recorded."""
    for _ in range(3000):
        if len(site.events("http.request_finished")) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the request was not recorded")


class TestRequestIds:
    async def test_every_answer_has_a_new_id(self, site: Site) -> None:
        ids = {(await site.get(path)).headers["x-request-id"] for path in ("/healthz", "/nowhere", "/test/crash")}
        assert len(ids) == 3
        assert all(re.fullmatch(r"req_[0-9a-f]{32}", request_id) for request_id in ids)

    @pytest.mark.parametrize("sent", ["a", "A.b_c-9", "x" * 128])
    async def test_a_valid_id_of_the_client_is_kept(self, site: Site, sent: str) -> None:
        answer = await site.get("/nowhere", headers={"x-request-id": sent})
        assert answer.headers["x-request-id"] == answer.json()["request_id"] == sent
        assert site.events("http.request_finished")[0]["request_id"] == sent

    @pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "a/b", "<script>", 'a"b', "a\tb"])
    async def test_an_invalid_id_is_replaced(self, site: Site, sent: str) -> None:
        answer = await site.get("/nowhere", headers={"x-request-id": sent})
        assert answer.headers["x-request-id"].startswith("req_")


class TestHeaders:
    async def test_every_answer_has_the_security_headers_once(self, site: Site) -> None:
        answers = [
            await site.get("/healthz"),
            await site.get("/schema"),
            await site.get("/nowhere"),
            await site.get("/v1/key"),
            await site.get("/v1/key", key=site.client_key),
            await site.get("/test/crash"),
            await site.client.put("/healthz"),
            await site.client.options("/healthz"),
            await site.client.post("/test/turns", content=b" " * 5000),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 404, 401, 200, 500, 405, 204, 413]
        for answer in answers:
            for name, value in SECURITY.items():
                assert answer.headers.get_list(name) == [value]
            assert len(answer.headers.get_list("x-request-id")) == 1
            assert "server" not in answer.headers

    async def test_a_handler_may_set_its_own_headers(self) -> None:
        @get("/page", response_headers={"content-security-policy": "default-src 'self'", "cache-control": "no-cache"})
        async def page() -> str:
            return "x"

        async with open_site(more_routes=[page]) as site:
            answer = await site.get("/page")
            assert answer.headers.get_list("content-security-policy") == ["default-src 'self'"]
            assert answer.headers.get_list("cache-control") == ["no-cache"]
            assert answer.headers["x-frame-options"] == "DENY"


class TestRecords:
    async def test_a_request_leaves_one_line(self, site: Site) -> None:
        answer = await site.get("/v1/key?secret=yes", key=site.client_key)
        (event,) = site.events("http.request_finished")
        assert event["level"] == "info"
        assert (event["method"], event["route"], event["status"]) == ("GET", "/v1/key", 200)
        assert event["bytes_out"] == len(answer.content)
        assert event["duration_ms"] > 0
        assert event["tenant_id"] == site.tenant.id
        assert "secret=yes" not in site.log.getvalue()

    async def test_one_request_does_not_inherit_the_tenant_of_another(self, site: Site) -> None:
        await site.get("/v1/key", key=site.client_key)
        await site.get("/v1/key")
        assert "tenant_id" not in site.events("http.request_finished")[1]

    @pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
    async def test_frequent_requests_of_machines_are_logged_at_debug(self, site: Site, path: str) -> None:
        await site.get(path)
        assert site.events("http.request_finished")[0]["level"] == "debug"

    async def test_paths_do_not_become_metric_labels(self, site: Site) -> None:
        before = (await site.get("/metrics")).text.count("strata_http_requests_total{")
        for number in range(10):
            await site.get(f"/nowhere/{number}")
            await site.get(f"/admin/api/keys/key_{number}", key=site.admin_key)
            await site.client.request(["PROPFIND", "TRACE", "LINK"][number % 3], "/nowhere")
        text = (await site.get("/metrics")).text
        assert text.count("strata_http_requests_total{") == before + 4
        assert 'strata_http_requests_total{method="GET",route="unmatched",status="404"} 10.0' in text
        assert 'strata_http_requests_total{method="_OTHER",route="unmatched",status="404"} 10.0' in text
        assert 'route="/admin/api/keys/{key_id}",status="404"} 10.0' in text

    async def test_pipelined_requests_keep_their_own_ids(self, site: Site) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        request = "GET /nowhere HTTP/1.1\r\nhost: x\r\nx-request-id: {}\r\n\r\n"
        writer.write("".join(request.format(name) for name in ("one", "two", "three")).encode())
        answers = b""
        while answers.count(b"x-request-id: ") < 3:
            answers += await asyncio.wait_for(reader.read(65536), 5)
        writer.close()
        await writer.wait_closed()
        assert re.findall(rb"x-request-id: (\w+)", answers) == [b"one", b"two", b"three"]
        assert [event["request_id"] for event in site.events("http.request_finished")] == ["one", "two", "three"]


class TestStreams:
    async def test_a_stream_is_recorded_when_it_ends(self, site: Site) -> None:
        answer = await site.get("/test/stream?kind=whole")
        assert answer.content == b"x" * 30
        assert answer.headers["x-content-type-options"] == "nosniff"
        await settled(site)
        (event,) = site.events("http.request_finished")
        assert (event["status"], event["bytes_out"]) == (200, 30)
        assert "disconnected" not in event

    async def test_a_stream_that_breaks_is_cut_and_logged_without_content(self, site: Site) -> None:
        with pytest.raises(httpx2.RemoteProtocolError):
            await site.get("/test/stream?kind=broken")
        await settled(site)
        (failed,) = site.events("http.request_failed")
        assert "ValueError" in failed["exception"]
        assert MARKER not in site.log.getvalue()

    async def test_a_disconnecting_client_is_recorded(self, site: Site) -> None:
        async with site.client.stream("GET", "/test/stream?kind=endless") as answer:
            assert answer.status_code == 200
            chunks = answer.aiter_bytes()
            await anext(chunks)
            assert "strata_http_requests_in_flight 2.0" in (await site.get("/metrics")).text
        await settled(site, 2)
        (event,) = [line for line in site.events("http.request_finished") if line["route"] == "/test/stream"]
        assert (event["status"], event["disconnected"]) == (200, True)
        assert "strata_http_requests_in_flight 1.0" in (await site.get("/metrics")).text
        assert not site.events("http.request_failed")


async def test_an_error_in_the_framework_itself_is_answered_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ValueError(MARKER)

    monkeypatch.setattr(site.app.litestar, "asgi_handler", broken)
    answer = await site.get("/healthz")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-frame-options"] == "DENY"
    assert len(site.events("http.request_failed")) == 1
    assert MARKER not in site.log.getvalue() + answer.text
