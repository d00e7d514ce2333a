"""A scripted server, and a client for it with short delays."""

from collections.abc import AsyncIterator

import pytest

from server.web.client import RetryBudget, StrataClient
from tests.support.fakes.scripted_strata import KEY, ScriptedStrata, open_scripted_strata

QUICK = RetryBudget(seconds=5, first_wait_seconds=0.0001, max_wait_seconds=0.001)


@pytest.fixture
async def strata() -> AsyncIterator[ScriptedStrata]:
    async with open_scripted_strata() as scripted:
        yield scripted


@pytest.fixture
async def client(strata: ScriptedStrata) -> AsyncIterator[StrataClient]:
    async with StrataClient(strata.url, KEY, retry_budget=QUICK) as client:
        yield client
