"""The rate limit on the real database: never more than the limit, and the whole limit is available."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.api_key import RateLimiter
from server.conversation.errors import DatabaseUnavailable, RateLimited
from server.conversation.identifiers import API_KEY, new_id
from server.postgres.access import rate_limit
from server.postgres.access.rate_limit import PostgresRateLimiter
from server.postgres.engine import Database, Statement

ALWAYS = 1e10
"""Seconds of a window that began in 1970 and does not end while a test runs."""


class CountingDatabase(Database):
    """The same database; counts the statements."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.options)
        self._database = database
        self.runs = 0
        self.down = False

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: object) -> list[object]:  # type: ignore[override]  # reason: rows of any type
        self.runs += 1
        if self.down:
            raise DatabaseUnavailable
        return await self._database.run(statement, repeatable=repeatable, **values)  # type: ignore[return-value]  # reason: as above


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def admitted(limiter: RateLimiter, key_id: str, requests: int) -> int:
    """The number of concurrent requests that are allowed."""
    outcomes = await asyncio.gather(*(limiter.admit(key_id) for _ in range(requests)), return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, RateLimited) for outcome in outcomes), outcomes
    return outcomes.count(None)


async def end_window(database: Database) -> None:
    """Make the current window a past one."""
    async with database.connection() as connection:
        await connection.execute("UPDATE rate_windows SET began_at = began_at - interval '1 year'")


async def count_windows(database: Database) -> int:
    async with database.connection() as connection:
        return int(await connection.fetchval("SELECT count(*) FROM rate_windows"))


@settings(max_examples=25)
@given(
    limit=st.integers(1, 300),
    processes=st.integers(1, 4),
    requests=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=8),
)
async def test_several_processes_together_never_allow_more_than_the_limit(
    database: Database, limit: int, processes: int, requests: list[tuple[int, int]]
) -> None:
    key_id = new_id(API_KEY)
    limiters = [PostgresRateLimiter(database, limit, window_seconds=ALWAYS) for _ in range(processes)]
    wanted: Counter[int] = Counter()
    for process, count in requests:
        wanted[process % processes] += count
    passed = await asyncio.gather(
        *(admitted(limiters[process], key_id, count) for process, count in ((p % processes, c) for p, c in requests))
    )
    assert sum(passed) <= limit
    # Unused requests are in the reserves of other processes, and a reserve is smaller than a batch.
    lost = (processes - 1) * (max(1, limit // 50) - 1)
    assert sum(passed) >= min(sum(wanted.values()), limit - lost)
    # The rest is available to any process.
    rest = [await admitted(limiter, key_id, limit + 1) for limiter in limiters]
    assert sum(passed) + sum(rest) == limit


@pytest.mark.parametrize("limit", [1, 7, 49, 50, 99, 1000])
async def test_one_process_can_use_the_whole_limit_with_few_statements(database: Database, limit: int) -> None:
    counting = CountingDatabase(database)
    limiter = PostgresRateLimiter(counting, limit, window_seconds=ALWAYS)
    key_id = new_id(API_KEY)
    for _ in range(limit):
        await limiter.admit(key_id)
    assert counting.runs <= 100
    assert await admitted(limiter, key_id, 20) == 0


async def test_a_used_up_window_is_cached(database: Database) -> None:
    counting, clock = CountingDatabase(database), Clock()
    limiter = PostgresRateLimiter(counting, 3, window_seconds=ALWAYS, clock=clock)
    key_id = new_id(API_KEY)
    assert await admitted(limiter, key_id, 10) == 3
    asked = counting.runs
    assert await admitted(limiter, key_id, 10) == 0
    assert counting.runs == asked == 4
    # When the time is over, it queries again, and there is still nothing left.
    clock.now += ALWAYS
    assert await admitted(limiter, key_id, 10) == 0
    assert counting.runs == asked + 1


async def test_a_new_window_has_the_full_limit_and_removes_the_old_one(database: Database) -> None:
    clock = Clock()
    limiter = PostgresRateLimiter(database, 5, window_seconds=ALWAYS, clock=clock)
    key_id = new_id(API_KEY)
    assert await admitted(limiter, key_id, 9) == 5
    await end_window(database)
    assert await admitted(limiter, key_id, 9) == 0
    clock.now += ALWAYS
    assert await admitted(limiter, key_id, 9) == 5
    assert await count_windows(database) == 1


async def test_a_reserve_is_not_used_after_its_window(database: Database) -> None:
    counting, clock = CountingDatabase(database), Clock()
    limiter = PostgresRateLimiter(counting, 1000, window_seconds=ALWAYS, clock=clock)
    key_id = new_id(API_KEY)
    await limiter.admit(key_id)
    await limiter.admit(key_id)
    assert counting.runs == 1
    clock.now += ALWAYS
    await limiter.admit(key_id)
    assert counting.runs == 2


async def test_a_refusal_has_the_remaining_time(database: Database) -> None:
    limiter = PostgresRateLimiter(database, 1, window_seconds=3600)
    key_id = new_id(API_KEY)
    refusals = await asyncio.gather(*(limiter.admit(key_id) for _ in range(4)), return_exceptions=True)
    limited = [refusal for refusal in refusals if isinstance(refusal, RateLimited)]
    # One more is allowed if an hour ends just then.
    assert len(limited) >= 2
    for refusal in limited:
        seconds = refusal.details["retry_after_seconds"]
        assert isinstance(seconds, int)
        assert 1 <= seconds <= 3600


async def test_keys_do_not_share_their_limit(database: Database) -> None:
    limiter = PostgresRateLimiter(database, 2, window_seconds=ALWAYS)
    keys = [new_id(API_KEY) for _ in range(3)]
    assert await asyncio.gather(*(admitted(limiter, key_id, 5) for key_id in keys)) == [2, 2, 2]


async def test_without_a_limit_nothing_is_queried(database: Database) -> None:
    counting = CountingDatabase(database)
    limiter = PostgresRateLimiter(counting, 0)
    assert await admitted(limiter, new_id(API_KEY), 100) == 100
    assert (counting.runs, await count_windows(database)) == (0, 0)


async def test_one_process_sends_one_query_for_a_key_at_a_time(database: Database) -> None:
    counting = CountingDatabase(database)
    limiter = PostgresRateLimiter(counting, 5000, window_seconds=ALWAYS)
    assert await admitted(limiter, new_id(API_KEY), 100) == 100
    assert counting.runs == 1


async def test_without_a_database_no_request_is_allowed_uncounted(database: Database) -> None:
    counting = CountingDatabase(database)
    limiter = PostgresRateLimiter(counting, 5, window_seconds=ALWAYS)
    key_id = new_id(API_KEY)
    counting.down = True
    with pytest.raises(DatabaseUnavailable):
        await limiter.admit(key_id)
    counting.down = False
    assert await admitted(limiter, key_id, 9) == 5


async def test_the_number_of_keys_in_memory_has_a_limit(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "_MAX_KEYS", 3)
    limiter = PostgresRateLimiter(database, 1, window_seconds=ALWAYS)
    keys = [new_id(API_KEY) for _ in range(6)]
    assert [await admitted(limiter, key_id, 2) for key_id in keys] == [1] * 6
    assert len(limiter._reserves) == 3  # noqa: SLF001  reason: the cache is not visible from outside
    # An evicted key is still counted.
    assert [await admitted(limiter, key_id, 2) for key_id in keys] == [0] * 6
