"""There are never more calls than the limit, waiting calls are served in order, and no slot is lost."""

import asyncio
import random
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.settings import Settings
from server.cli.run import raise_file_limit
from server.conversation.errors import CallLimitReached
from server.providers.call_slots import CallSlots


async def test_a_call_beyond_the_limit_waits_for_one_to_end() -> None:
    slots = CallSlots(2, 60)
    await slots.take()
    await slots.take()
    third = asyncio.create_task(slots.take())
    fourth = asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    assert (slots.in_use, slots.waiting) == (2, 2)
    slots.release()
    await third
    assert not fourth.done()
    assert (slots.in_use, slots.waiting) == (2, 1)
    slots.release()
    await fourth
    slots.release()
    slots.release()
    assert (slots.in_use, slots.waiting, slots.refused_count) == (0, 0, 0)


async def test_a_call_that_waits_too_long_is_refused() -> None:
    slots = CallSlots(1, 0.01)
    await slots.take()
    with pytest.raises(CallLimitReached) as refused:
        await slots.take()
    assert refused.value.details == {"limit": 1, "retry_after_seconds": 5}
    assert (slots.in_use, slots.waiting, slots.refused_count) == (1, 0, 1)


async def test_a_reservation_is_only_for_the_first_call_of_its_task() -> None:
    slots = CallSlots(2, 0.01)

    async def turn() -> None:
        reservation = await slots.reserve()
        assert slots.in_use == 1
        await asyncio.create_task(slots.take())
        assert slots.in_use == 1
        await slots.take()
        assert slots.in_use == 2
        reservation.drop()
        assert slots.in_use == 2
        slots.release()
        slots.release()

    await asyncio.create_task(turn())
    await slots.take()
    assert slots.in_use == 1


async def test_an_unused_reservation_is_returned() -> None:
    slots = CallSlots(1, 0.01)

    async def turn() -> None:
        reservation = await slots.reserve()
        reservation.drop()
        reservation.drop()
        assert slots.in_use == 0
        await slots.take()

    await asyncio.create_task(turn())
    assert slots.in_use == 1


@given(limit=st.integers(1, 4), seed=st.integers())
async def test_no_slot_is_lost_or_given_twice(limit: int, seed: int) -> None:
    slots = CallSlots(limit, 0.002)
    chance = random.Random(seed)  # noqa: S311  reason: no security depends on it
    making = 0

    async def call() -> None:
        nonlocal making
        await slots.take()
        making += 1
        assert making <= limit
        try:
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
        finally:
            making -= 1
            slots.release()

    tasks = [asyncio.create_task(call()) for _ in range(20)]
    for task in chance.sample(tasks, 5):
        await asyncio.sleep(chance.choice([0, 0.001]))
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), CallLimitReached, asyncio.CancelledError}
    assert (slots.in_use, slots.waiting) == (0, 0)
    assert slots.refused_count == sum(isinstance(outcome, CallLimitReached) for outcome in outcomes)


def test_the_limit_for_open_files_is_raised_and_a_low_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        raise_file_limit(Settings(provider_call_limit=1))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert not caplog.records
        for settings, connections in ((Settings(provider_call_limit=100_000), 0), (Settings(), 100_000)):
            caplog.clear()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            raise_file_limit(settings, connections=connections)
            messages = [record.message for record in caplog.records]
            assert messages == (["program.file_limit_low"] if hard < 100_000 else [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
