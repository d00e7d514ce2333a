"""The control routes of an emulator, over real HTTP."""

from collections.abc import AsyncIterator

import httpx2
import pytest

from server.conversation.errors import AddressInUse
from server.emulator.asgi import EmulatorApp
from server.emulator.exchange import Exchange
from server.emulator.server import emulating
from server.emulator.state import build_state


async def echo(exchange: Exchange) -> None:
    await exchange.answer(201, exchange.request.body, content_type="text/plain")


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        emulating(EmulatorApp(build_state(clock=lambda: 5.0), echo)) as url,
        httpx2.AsyncClient(base_url=url) as client,
    ):
        yield client


async def test_requests_are_logged_with_their_answers_and_can_be_cleared(http: httpx2.AsyncClient) -> None:
    await http.post("/a?x=1", content=b"one")
    await http.post("/b", json={"two": 2})
    logged = (await http.get("/__requests")).json()["requests"]
    later = (await http.get("/__requests?after=1")).json()["requests"]
    await http.delete("/__requests")

    assert [(one["number"], one["at"], one["path"], one["body"], one["status"]) for one in logged] == [
        (1, 5.0, "/a", "one", 201),
        (2, 5.0, "/b", {"two": 2}, 201),
    ]
    assert logged[0]["query"] == {"x": "1"}
    assert later == logged[1:]
    assert (await http.get("/__requests")).json() == {"requests": []}


async def test_it_reports_its_health_and_has_no_other_route(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/__healthz")).json() == {"status": "ok"}
    assert (await http.get("/__nothing")).status_code == 404


async def test_faults_are_armed_and_disarmed(http: httpx2.AsyncClient) -> None:
    armed = await http.post("/__faults", json={"kind": "cut", "times": 3})
    await http.delete("/__faults")
    again = await http.post("/__faults", json={"kind": "cut"})

    assert (armed.json(), again.json()) == ({"armed": 3}, {"armed": 1})
    assert (await http.post("/__faults", content=b"no json")).status_code == 400


async def test_a_port_in_use_is_reported(http: httpx2.AsyncClient) -> None:
    port = http.base_url.port
    assert port is not None
    with pytest.raises(AddressInUse):
        async with emulating(EmulatorApp(build_state(), echo), port=port):
            pass
