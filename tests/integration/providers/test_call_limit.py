"""A server at its limit of simultaneous provider calls refuses turns before accepting them."""

import asyncio

import pytest

from server.app.settings import Settings
from server.emulator.reply import FaultKind
from tests.conftest import StrataServer
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import open_api, turns


@pytest.fixture
def wait_seconds() -> float:
    return 0.2


@pytest.fixture
def server_settings(server_settings: Settings, wait_seconds: float) -> Settings:
    return server_settings.model_copy(update={"provider_call_limit": 1, "provider_call_wait_seconds": wait_seconds})


async def test_a_turn_without_a_free_call_is_refused_before_it_is_accepted(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    async with open_api(strata_server) as api:
        busy, other = await api.begin(), await api.begin()
        emulated["gemini"].inject_fault(FaultKind.SILENCE, after_chunks=1)
        async with api.listen("POST", turns(busy), {"input": "Tell me."}, idempotency_key="first") as (_, events):
            while (await anext(events))[1] == "turn.started":
                pass
            refused = await api.ask("POST", turns(other), {"input": "And me?"})
            assert refused.status_code == 503
            assert refused.json()["code"] == "call_limit_reached"
            assert refused.json()["source"] == "strata"
            assert int(refused.headers["retry-after"]) > 0
            assert "x-should-retry" not in refused.headers
            assert (await api.expect(200, "GET", turns(other)))["data"] == []
            # A turn that was accepted before is still answered.
            again = await api.ask(
                "POST", turns(busy), {"input": "Tell me."}, idempotency_key="first", prefer="respond-async"
            )
            assert again.status_code == 202
            text = (await api.client.get("/metrics")).text
            assert "strata_provider_calls_in_use 1.0" in text
            assert "strata_provider_calls_limit 1.0" in text
            assert "strata_provider_calls_waiting 0.0" in text
            assert "strata_provider_calls_refused_total 2.0" in text
            await api.ask("POST", f"/v1/conversations/{busy}/cancel")
        await api.say(other)
        assert "strata_provider_calls_in_use 0.0" in (await api.client.get("/metrics")).text


@pytest.mark.parametrize("wait_seconds", [60.0])
async def test_a_turn_waits_for_a_call_that_ends_in_time(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    async with open_api(strata_server) as api:
        conversations = [await api.begin() for _ in range(8)]
        emulated["gemini"].inject_fault(FaultKind.RATE_LIMITED_NO_DELAY)
        answers = await asyncio.gather(
            *(api.ask("POST", turns(conversation), {"input": "Hello."}) for conversation in conversations)
        )
        # The call that failed at the provider returned its slot too.
        assert sorted(answer.status_code for answer in answers) == [200] * 7 + [502]
        assert "strata_provider_calls_in_use 0.0" in (await api.client.get("/metrics")).text
