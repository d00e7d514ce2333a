"""kill -9 of the worker at every step of a compaction: real processes, the real database, strict providers.

A worker dies at a named point, its leases expire, and another one starts. Then the same holds for every point: the job
is taken over, the conversation is compacted once, no turn is missing or included twice, a summary whose answer was
stored is not requested again, every request can be rebuilt byte for byte, and the next turn is accepted.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from server.conversation.epoch import EpochReason
from server.conversation.store import EpochOutline
from server.jobs.compaction import SentCompactions
from server.jobs.queue import JobSender
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from tests.conftest import StrataServer
from tests.faults.server_fleet import Fleet, Launcher, open_fleet
from tests.support.compaction_driver import drive_to_full_window
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    eventually,
    text_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.http_driver import turns
from tests.support.turn_service_driver import open_conversation, settle

KILLED = -9
SUMMARY = "It was about foxes."
SHORT: dict[str, Any] = {"summary_limit_tokens": 200}
"""A history this short is summarised only if the summary is shorter still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A point, and the expected state after it."""

    at: str
    nth: int = 1
    asked: int = 0
    """How often a summary was requested by then."""
    is_paid: bool = False
    """Whether its answer is stored."""
    left_open: bool = False
    """Whether its call is stored with an unknown outcome."""

    def __str__(self) -> str:
        return self.at if self.nth == 1 else f"{self.at}_{self.nth}"


CRASHES = (
    Crash(at="before_job"),
    Crash(at="before_look"),
    Crash(at="after_look"),
    Crash(at="after_rendering"),
    Crash(at="before_epoch"),
    # The exchanges are moved. What follows is the summary.
    Crash(at="after_epoch"),
    Crash(at="before_look", nth=2),
    Crash(at="before_call"),
    Crash(at="after_question", left_open=True),
    Crash(at="after_first_event", asked=1, left_open=True),
    Crash(at="after_last_byte", asked=1, left_open=True),
    Crash(at="after_answer", asked=1, is_paid=True),
    Crash(at="after_rendering", nth=2, asked=1, is_paid=True),
    Crash(at="before_epoch", nth=2, asked=1, is_paid=True),
    Crash(at="after_epoch", nth=2, asked=1, is_paid=True),
    Crash(at="after_job", asked=1, is_paid=True),
)


@pytest.fixture
async def fleet(
    launcher: Launcher,
    strata_server: StrataServer,
    database_options: DatabaseOptions,
    emulated: EmulatedProviders,
) -> AsyncIterator[Fleet]:
    database = strata_server.program.database
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_log; DELETE FROM pgqueuer_schedules")
    async with open_fleet(launcher, database, database_options, emulated, strata_server.tenant) as opened:
        yield opened


@pytest.mark.parametrize("provider", BOTH)
@pytest.mark.parametrize("crash", CRASHES, ids=str)
async def test_a_worker_killed_at_this_point_leaves_a_compaction_that_is_done_once(
    fleet: Fleet, strata_server: StrataServer, provider: str, crash: Crash
) -> None:
    driver = await drive_to_full_window(strata_server, fleet.emulated, provider)
    await queue_compaction(fleet.database, driver)
    driver.emulated[provider].queue_replies(text_reply(SUMMARY), text_reply(SUMMARY))
    worker = await fleet.start_worker(crash_at=crash.at, nth=crash.nth, **SHORT)
    assert await worker.ended() == KILLED
    assert asked_count(driver, provider) == crash.asked
    await fleet.let_time_pass()
    await fleet.start_worker(**SHORT)
    await until_done(fleet.database)
    driver.emulated[provider].lines.turns.clear()

    again = 0 if crash.is_paid else 1
    assert asked_count(driver, provider) == crash.asked + again
    calls = await driver.background_calls()
    assert [call.end is None for call in calls] == [True] * crash.left_open + [False]
    await prove_compacted_once(driver)
    await driver.task("And on?", text_reply("On and on."))
    assert await assert_rebuilds(driver)
    assert_all_accepted(driver.emulated[provider].requests())


@pytest.mark.parametrize("provider", BOTH)
async def test_a_server_with_an_inside_worker_that_dies_in_a_compaction_recovers(
    fleet: Fleet, strata_server: StrataServer, provider: str
) -> None:
    settings = {"compaction": {"policy": "threshold", "max_turns": 4, "keep_exchanges": 1}}
    store, tenant_id = strata_server.program.store, strata_server.tenant.id
    conversation = await open_conversation(store, tenant_id, provider, settings=settings)
    server = await fleet.start(crash_at="before_epoch", nth=2)
    for number in range(1, 4):
        await server.api.expect(200, "POST", turns(conversation.id), {"input": f"Task {number}."})
    assert await server.ended() == KILLED
    healthy = await fleet.restart()
    await until_done(fleet.database)
    history = await store.load_history(tenant_id, conversation.id)
    assert [(segment.first_seq, segment.last_seq) for segment in history.segments] == [(1, 4)]
    assert [turn.seq for turn in history.source.buffered] == [5, 6]
    answered = await healthy.api.expect(200, "POST", turns(conversation.id), {"input": "And on?"})
    assert answered["turn"]["state"] == "complete"
    assert_all_accepted(fleet.emulated[provider].requests())


async def test_a_job_is_taken_over_after_the_real_timeout(fleet: Fleet, strata_server: StrataServer) -> None:
    """As above, with a job that is really taken over when the heartbeat of its worker has been missing long enough."""
    driver = await drive_to_full_window(strata_server, fleet.emulated, "anthropic")
    await queue_compaction(fleet.database, driver)
    driver.emulated.anthropic.queue_replies(text_reply(SUMMARY))
    worker = await fleet.start_worker(crash_at="after_answer", options={"takeover_seconds": 2.0}, **SHORT)
    assert await worker.ended() == KILLED
    await fleet.start_worker(options={"takeover_seconds": 2.0}, **SHORT)
    await until_done(fleet.database)
    assert asked_count(driver, "anthropic") == 1
    await prove_compacted_once(driver)


async def queue_compaction(database: Database, driver: ConversationDriver) -> None:
    """Queue one job. The turns have queued it already, perhaps twice: which point comes first would be chance."""
    await settle(driver.program)
    await driver.program.compaction_watch.close()
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pgqueuer")
    queue = SentCompactions(JobSender(database))
    await queue.queue_compaction(driver.tenant_id, driver.conversation_id)


async def until_done(database: Database) -> None:
    """Wait until no job is left."""

    async def is_empty() -> bool:
        async with database.connection() as connection:
            return bool(await connection.fetchval("SELECT count(*) = 0 FROM pgqueuer WHERE entrypoint = 'compaction'"))

    await eventually(is_empty)


async def prove_compacted_once(driver: ConversationDriver) -> None:
    """One more piece was moved, one summary replaces the oldest, and every turn is in exactly one place."""
    store = driver.program.store
    outlines: list[EpochOutline] = list(
        (await store.list_epochs(driver.tenant_id, driver.conversation_id, limit=100)).items
    )
    reasons = [outline.reason for outline in outlines]
    assert reasons == [EpochReason.SUMMARISED, *[EpochReason.COMPACTED] * (len(reasons) - 1)]
    history = await store.load_history(driver.tenant_id, driver.conversation_id)
    covered = [seq for piece in history.segments for seq in range(piece.first_seq, piece.last_seq + 1)]
    all_turns = [turn.seq for turn in await driver.turns()]
    assert covered + [turn.seq for turn in history.source.buffered] == all_turns
    assert (history.source.static_text or "").count(SUMMARY) == 1
    async with driver.program.database.connection() as connection:
        pieces = await connection.fetch(
            "SELECT generation, position FROM segments ORDER BY generation, position",
        )
        failed = await connection.fetchval("SELECT count(*) FROM pgqueuer_log WHERE status = 'exception'")
    assert failed == 0
    oldest = [row["position"] for row in pieces if row["generation"] == 0]
    assert oldest == list(range(len(reasons) - 1))
    assert {row["generation"] for row in pieces} == {0, 1}


def asked_count(driver: ConversationDriver, provider: str) -> int:
    return sum("Write a summary" in str(request["body"]) for request in driver.emulated[provider].requests())
