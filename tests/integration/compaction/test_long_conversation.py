"""Some hundred turns on each provider: all are accepted, the cache share is that of the simulation, and late turns read
as much from the database as early ones.

`tests/bench/long_conversation.py` is the same over two thousand turns, with times.
"""

import pytest

from server.app.settings import Settings
from server.postgres.engine import Database
from tests.support.conversation_driver import assert_all_accepted
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.long_conversation_driver import (
    compare_at_same_buffer,
    cost_of,
    open_long_conversation,
    predict,
    share_of,
)

TURNS = 260
WARM_UP = 60
TYPICAL = 130
"""Exchanges of earlier conversations, as long as this one."""


@pytest.fixture
async def queue(database: Database) -> Database:
    """The database with an empty queue."""
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_log; DELETE FROM pgqueuer_schedules")
    return database


@pytest.mark.parametrize("provider", BOTH)
async def test_a_long_conversation_stays_cheap(
    queue: Database, server_settings: Settings, emulated: EmulatedProviders, provider: str
) -> None:
    async with (
        emulated.open(server_settings) as providers,
        open_long_conversation(server_settings, providers, queue, provider, typical_exchange_count=TYPICAL) as driver,
    ):
        await driver.go_on(TURNS)
        account = await driver.account()
    assert_all_accepted(emulated[provider].requests())
    assert (account.refused, account.others) == (0, 0)
    assert len(account.seqs) == len(driver.samples) >= TURNS // 2

    # The compactions need not be at the same turns: sizes are estimates, and the cache of the provider has blocks.
    predicted = predict(driver, account, typical_exchange_count=TYPICAL, warm_up=WARM_UP)
    assert predicted.compactions >= 3
    assert 0.5 <= account.compactions / predicted.compactions <= 1.5
    settled = [sample for sample in driver.samples if sample.seq > WARM_UP]
    assert share_of(settled) == pytest.approx(predicted.share, abs=0.03)
    assert cost_of(settled, provider) == pytest.approx(predicted.cost_usd, rel=0.2)

    early = [sample for sample in driver.samples if WARM_UP < sample.seq <= WARM_UP + 100]
    late = [sample for sample in driver.samples if sample.seq > TURNS - 100]
    assert 0.9 < compare_at_same_buffer(early, late, account, lambda sample: sample.bytes_read) < 1.1
