"""The routes for operators, against the whole program."""

import httpx2

from server import __version__
from tests.conftest import StrataServer


async def test_the_operators_routes_answer_without_a_key(strata_server: StrataServer) -> None:
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
