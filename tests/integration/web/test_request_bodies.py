"""Concurrent large bodies have a common limit, and an unfinished one does not occupy it for ever."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from server.app.settings import Settings
from tests.conftest import StrataServer
from tests.support.http_driver import ApiClient, open_api
from tests.support.turn_service_driver import WAIT_SECONDS

TOTAL = 1024 * 1024
LARGE = 700 * 1024


@pytest.fixture
def body_seconds() -> float:
    return 60.0


@pytest.fixture
def server_settings(server_settings: Settings, body_seconds: float) -> Settings:
    return server_settings.model_copy(
        update={"body_total_bytes": TOTAL, "body_wait_seconds": 0.2, "body_seconds": body_seconds}
    )


def conversation_of(size: int, assistant_id: str) -> dict[str, object]:
    return {"assistant_id": assistant_id, "context": {"text": "x" * size}}


@asynccontextmanager
async def half_sent(
    server: StrataServer, key: str, body: bytes, *, chunked: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose body has begun."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = f"POST /v1/conversations HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{length}\r\n\r\n"
    writer.write(head.encode() + (b"5\r\n" if chunked else b"") + body[:5])
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def bytes_in_use(api: ApiClient) -> float:
    lines = (await api.client.get("/metrics")).text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith("strata_http_body_bytes "))


async def until_in_use(api: ApiClient, expected: float) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while await bytes_in_use(api) != expected:  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.01)


async def test_bodies_beyond_the_total_are_refused_until_others_have_been_read(strata_server: StrataServer) -> None:
    async with open_api(strata_server) as api:
        assistant_id = (await api.expect(200, "GET", f"/v1/conversations/{await api.begin()}"))["assistant_id"]
        body = json.dumps(conversation_of(LARGE, assistant_id)).encode()
        async with half_sent(strata_server, api.key, body) as (reader, writer):
            await until_in_use(api, len(body))
            refused = await api.ask("POST", "/v1/conversations", conversation_of(LARGE, assistant_id))
            assert refused.status_code == 503
            assert refused.json()["code"] == "body_budget_exhausted"
            assert int(refused.headers["retry-after"]) > 0
            assert "strata_http_bodies_refused_total 1.0" in (await api.client.get("/metrics")).text
            # Small ones do not count.
            await api.expect(201, "POST", "/v1/conversations", {"assistant_id": assistant_id})
            writer.write(body[5:])
            assert b" 201 " in await reader.readline()
        await api.expect(201, "POST", "/v1/conversations", conversation_of(LARGE, assistant_id))
        assert await bytes_in_use(api) == 0


async def test_a_disconnecting_client_returns_its_bytes(strata_server: StrataServer) -> None:
    async with open_api(strata_server) as api:
        async with half_sent(strata_server, api.key, b"x" * LARGE):
            await until_in_use(api, LARGE)
        await until_in_use(api, 0)


async def test_a_body_is_not_read_without_a_key(strata_server: StrataServer) -> None:
    async with open_api(strata_server) as api, half_sent(strata_server, "nonsense", b"x" * LARGE) as (reader, _):
        assert b" 401 " in await reader.readline()
        assert await bytes_in_use(api) == 0


@pytest.mark.parametrize("body_seconds", [0.2])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_never_ends_is_answered_and_closed(strata_server: StrataServer, *, chunked: bool) -> None:
    async with open_api(strata_server) as api:
        async with half_sent(strata_server, api.key, b"x" * LARGE, chunked=chunked) as (reader, _):
            answer = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timed_out" in answer
        await until_in_use(api, 0)


@pytest.mark.parametrize("body_seconds", [0.2])
async def test_a_dripping_body_is_not_kept_alive(strata_server: StrataServer) -> None:
    async with (
        open_api(strata_server) as api,
        half_sent(strata_server, api.key, b"x" * LARGE) as (reader, writer),
        asyncio.timeout(WAIT_SECONDS),
    ):
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        assert b" 408 " in await answer


@pytest.mark.parametrize("body_seconds", [0.2])
async def test_a_stream_without_a_body_has_no_time_limit_for_one(strata_server: StrataServer) -> None:
    async with open_api(strata_server) as api:
        conversation = await api.begin()
        await api.say(conversation)
        events = await api.read_events("GET", f"/v1/conversations/{conversation}/turns/2/events")
        assert events[-1][1] == "turn.completed"
