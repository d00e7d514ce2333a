"""The routes for operators, against the whole program."""

import asyncio
import json

import httpx2

from server import __version__
from tests.conftest import StrataServer


async def test_the_routes_for_operators_answer_without_a_key(strata_server: StrataServer) -> None:
    async with httpx2.AsyncClient(base_url=strata_server.url) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert [check["status"] for check in ready.json()["checks"]] == ["ok"] * len(ready.json()["checks"])
        metrics = (await client.get("/metrics")).text
        assert f'version="{__version__}"' in metrics
        assert "strata_database_connections" in metrics
        schema = (await client.get("/schema")).json()
        assert (schema["openapi"][:3], schema["info"]["version"]) == ("3.1", __version__)


async def test_a_shutdown_is_announced_in_readyz(strata_server: StrataServer) -> None:
    async with httpx2.AsyncClient(base_url=strata_server.url) as client:
        await strata_server.program.running_turns.drain(0)
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")
        assert (await client.get("/healthz")).status_code == 200


async def test_a_head_above_the_limit_is_a_problem_and_counted(strata_server: StrataServer) -> None:
    host, _, port = strata_server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: strata.test\r\nx-large: " + b"v" * 100_000)
    await writer.drain()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    problem = json.loads(body)
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"content-type: application/problem+json" in head
    assert (problem["status"], problem["code"]) == (431, "request_head_too_large")
    assert f"x-request-id: {problem['request_id']}".encode() in head
    async with httpx2.AsyncClient(base_url=strata_server.url) as client:
        metrics = (await client.get("/metrics")).text
    assert 'strata_http_refused_total{code="request_head_too_large"} 1.0' in metrics
    assert "strata_http_connections 1.0" in metrics
