"""Some hundred turns on each provider: all are accepted, the cache gives what the simulation says, and late turns read
as much from the database as early ones.

`tests/bench/long_conversation.py` is the same over two thousand turns, with times.
"""

import pytest

from server.app.settings import Settings
from server.postgres.engine import Database
from tests.support.conversation_driver import assert_all_accepted
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.long_conversation_driver import compare_at_same_buffer, cost_of, open_talk, predict, share_of

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
        open_talk(server_settings, providers, queue, provider, typical_exchange_count=TYPICAL) as talk,
    ):
        await talk.go_on(TURNS)
        account = await talk.account()
    assert_all_accepted(emulated[provider].requests())
    assert (account.refused, account.others) == (0, 0)
    assert len(account.seqs) == len(talk.samples) >= TURNS // 2

    # The moments need not be the same: what is known are estimates, and the provider's cache has blocks.
    predicted = predict(talk, account, typical_exchange_count=TYPICAL, warm_up=WARM_UP)
    assert predicted.compactions >= 3
    assert 0.5 <= account.compactions / predicted.compactions <= 1.5
    settled = [sample for sample in talk.samples if sample.seq > WARM_UP]
    assert share_of(settled) == pytest.approx(predicted.share, abs=0.03)
    assert cost_of(settled, provider) == pytest.approx(predicted.cost_usd, rel=0.2)

    early = [sample for sample in talk.samples if WARM_UP < sample.seq <= WARM_UP + 100]
    late = [sample for sample in talk.samples if sample.seq > TURNS - 100]
    assert 0.9 < compare_at_same_buffer(early, late, account, lambda sample: sample.bytes_read) < 1.1
