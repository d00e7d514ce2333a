"""All bodies together never exceed the budget, and every byte is returned to it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import BodyBudgetExhausted
from server.web.body_budget import FREE_BYTES, BodyBudget, BodyIntake

LARGE = FREE_BYTES + 1


@given(
    bodies=st.lists(
        st.tuples(st.integers(1, 100), st.sampled_from([0, 0.001, 0.003]), st.booleans()), min_size=1, max_size=15
    )
)
async def test_no_byte_of_the_budget_is_lost_or_given_twice(bodies: list[tuple[int, float, bool]]) -> None:
    budget = BodyBudget(100, wait_seconds=0.002)
    reading = 0

    async def read(size: int, seconds: float) -> None:
        nonlocal reading
        await budget.take(size)
        reading += size
        assert reading <= budget.in_use_bytes <= 100
        try:
            await asyncio.sleep(seconds)
        finally:
            reading -= size
            budget.release(size)

    tasks = [asyncio.create_task(read(size, seconds)) for size, seconds, _ in bodies]
    await asyncio.sleep(0.001)
    for task, (_, _, leaves) in zip(tasks, bodies, strict=True):
        if leaves:
            task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), BodyBudgetExhausted, asyncio.CancelledError}
    assert (budget.in_use_bytes, budget.waiting) == (0, 0)
    assert budget.refused_count == sum(isinstance(outcome, BodyBudgetExhausted) for outcome in outcomes)


async def test_a_small_body_does_not_wait_for_a_large_one() -> None:
    budget = BodyBudget(2 * LARGE, wait_seconds=60)
    first = asyncio.create_task(budget.take(LARGE))
    second = asyncio.create_task(budget.take(2 * LARGE))
    await asyncio.sleep(0)
    assert first.done()
    assert budget.waiting == 1
    await BodyIntake(budget, [(b"content-length", b"%d" % FREE_BYTES)]).prepare()
    budget.release(LARGE)
    await second
    assert budget.in_use_bytes == 2 * LARGE


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ([], 0),
        ([(b"content-length", b"0")], 0),
        ([(b"content-length", b"%d" % FREE_BYTES)], 0),
        ([(b"content-length", b"%d" % LARGE)], LARGE),
        ([(b"content-length", b"999999999999")], 10 * LARGE),
    ],
)
async def test_a_body_reserves_what_it_announces(headers: list[tuple[bytes, bytes]], taken: int) -> None:
    budget = BodyBudget(20 * LARGE, max_body_bytes=10 * LARGE)
    intake = BodyIntake(budget, headers)
    if intake.pending:
        await intake.prepare()
        await intake.prepare()
    assert budget.in_use_bytes == taken
    intake.release()
    intake.release()
    assert budget.in_use_bytes == 0


async def test_a_large_body_of_unknown_length_reserves_the_maximum() -> None:
    budget = BodyBudget(20 * LARGE, max_body_bytes=10 * LARGE)
    intake = BodyIntake(budget, [(b"transfer-encoding", b"chunked")])
    assert intake.pending
    first = await intake.prepare()
    assert budget.in_use_bytes == 0
    intake.arrived(LARGE, more=True)
    assert await intake.prepare() > first
    assert budget.in_use_bytes == 10 * LARGE
    intake.arrived(1, more=False)
    assert not intake.pending
