"""A server that makes as many provider calls as it may says so, and accepts nothing that it cannot do."""

import asyncio

import pytest

from server.app.settings import Settings
from server.emulator.reply import FaultKind
from tests.conftest import StrataServer
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import open_talk, turns


@pytest.fixture
def wait_seconds() -> float:
    return 0.2


@pytest.fixture
def server_settings(server_settings: Settings, wait_seconds: float) -> Settings:
    return server_settings.model_copy(update={"provider_call_limit": 1, "provider_call_wait_seconds": wait_seconds})


async def test_a_turn_without_a_free_call_is_refused_before_it_is_accepted(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    async with open_talk(strata_server) as talk:
        busy, other = await talk.begin(), await talk.begin()
        emulated["gemini"].fails(FaultKind.SILENCE, after_chunks=1)
        async with talk.listen("POST", turns(busy), {"input": "Tell me."}, idempotency_key="first") as (_, events):
            while (await anext(events))[1] == "turn.started":
                pass
            refused = await talk.ask("POST", turns(other), {"input": "And me?"})
            assert refused.status_code == 503
            assert refused.json()["code"] == "call_limit_reached"
            assert refused.json()["source"] == "strata"
            assert int(refused.headers["retry-after"]) > 0
            assert "x-should-retry" not in refused.headers
            assert (await talk.expect(200, "GET", turns(other)))["data"] == []
            # What was accepted before is answered all the same.
            again = await talk.ask(
                "POST", turns(busy), {"input": "Tell me."}, idempotency_key="first", prefer="respond-async"
            )
            assert again.status_code == 202
            text = (await talk.client.get("/metrics")).text
            assert "strata_provider_calls_in_use 1.0" in text
            assert "strata_provider_calls_limit 1.0" in text
            assert "strata_provider_calls_waiting 0.0" in text
            assert "strata_provider_calls_refused_total 2.0" in text
            await talk.ask("POST", f"/v1/conversations/{busy}/cancel")
        await talk.say(other)
        assert "strata_provider_calls_in_use 0.0" in (await talk.client.get("/metrics")).text


@pytest.mark.parametrize("wait_seconds", [60.0])
async def test_a_turn_waits_for_a_call_that_ends_in_time(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    async with open_talk(strata_server) as talk:
        conversations = [await talk.begin() for _ in range(8)]
        emulated["gemini"].fails(FaultKind.RATE_LIMITED_NO_DELAY)
        answers = await asyncio.gather(
            *(talk.ask("POST", turns(conversation), {"input": "Hello."}) for conversation in conversations)
        )
        # The one that failed at the provider gave its slot back too.
        assert sorted(answer.status_code for answer in answers) == [200] * 7 + [502]
        assert "strata_provider_calls_in_use 0.0" in (await talk.client.get("/metrics")).text
