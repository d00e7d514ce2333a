"""Compactions through the API, the client and the command."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from server.cli import main
from server.conversation.epoch import EpochReason
from server.postgres.engine import Database
from server.web.client import AssistantDraft, StrataClient, StrataProblem
from tests.conftest import StrataServer
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply
from tests.support.emulators import EmulatedProviders
from tests.support.page_driver import audited

KEEPING = {"compaction": {"policy": "off", "keep_exchanges": 1}}
EAGER = {"compaction": {"policy": "threshold", "max_turns": 1, "keep_exchanges": 1}}


@pytest.fixture
async def client(strata_server: StrataServer) -> AsyncIterator[StrataClient]:
    async with StrataClient(strata_server.url, strata_server.client_key) as client:
        yield client


@pytest.fixture
async def driver(strata_server: StrataServer, emulated: EmulatedProviders) -> ConversationDriver:
    return await drive_conversation(strata_server, emulated)


async def drive_conversation(
    server: StrataServer, emulated: EmulatedProviders, settings: object = None
) -> ConversationDriver:
    """Drive a conversation of three exchanges."""
    driver = await start_driver(server.program, server.tenant.id, emulated, "gemini", settings=settings or KEEPING)
    for number in range(3):
        await driver.task(f"Task {number}.", text_reply("Fine."))
    return driver


async def buffer_start(driver: ConversationDriver) -> int:
    return (await driver.program.store.load_conversation(driver.tenant_id, driver.conversation_id)).buffer_start_seq


async def test_the_policy_decides_unless_it_is_forced(client: StrataClient, driver: ConversationDriver) -> None:
    held = await client.compact_conversation(driver.conversation_id)
    assert (held.outcome, held.reason, held.first_seq) == ("unchanged", "switched_off", None)
    planned = await client.compact_conversation(driver.conversation_id, force=True, dry_run=True)
    assert (planned.outcome, planned.dry_run, planned.first_seq, planned.last_seq) == ("compacted", True, 1, 4)
    assert await buffer_start(driver) == 1
    done = await client.compact_conversation(driver.conversation_id, force=True)
    assert (done.outcome, done.dry_run, done.last_seq, done.epoch) == ("compacted", False, 4, 2)
    assert await buffer_start(driver) == 5


async def test_compactions_are_listed_and_undone(client: StrataClient, driver: ConversationDriver) -> None:
    await client.compact_conversation(driver.conversation_id, force=True)
    await driver.task("Another.", text_reply("Fine."))
    await client.compact_conversation(driver.conversation_id, force=True)
    undone = await client.undo_compaction(driver.conversation_id)
    assert (undone.outcome, undone.first_seq, undone.last_seq) == ("undone", 5, 6)
    listed = [item async for item in client.list_compactions(driver.conversation_id)]
    assert [(item.epoch, item.reason, item.segment_count, item.buffer_start_seq) for item in listed] == [
        (4, EpochReason.COMPACTION_UNDONE, 1, 5),
        (3, EpochReason.COMPACTED, 2, 7),
        (2, EpochReason.COMPACTED, 1, 5),
    ]
    assert (listed[1].first_seq, listed[1].last_seq) == (5, 6)
    await client.undo_compaction(driver.conversation_id)
    with pytest.raises(StrataProblem) as caught:
        await client.undo_compaction(driver.conversation_id)
    assert (caught.value.code, caught.value.status) == ("compaction_not_found", 404)


async def test_a_conversation_without_turns_has_nothing_to_move(
    client: StrataClient, strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, "gemini")
    report = await client.compact_conversation(driver.conversation_id, force=True)
    assert (report.outcome, report.reason, report.epoch) == ("unchanged", "not_begun", 0)
    assert [item async for item in client.list_compactions(driver.conversation_id)] == []


async def test_the_policy_of_an_assistant_is_checked_when_it_is_saved(client: StrataClient) -> None:
    with pytest.raises(StrataProblem) as caught:
        await client.create_assistant(AssistantDraft(name="x", settings={"compaction": {"policy": "sometimes"}}))
    assert caught.value.code == "validation_failed"
    assert "settings.compaction.policy" in str(caught.value)


async def command(server: StrataServer, *arguments: str) -> Result:
    """Run the command in a separate thread: it has its own event loop."""
    settings = server.program.settings
    assert settings.database_url is not None
    environment = {
        "STRATA_DATABASE_URL": settings.database_url.get_secret_value(),
        "STRATA_LOG_FORMAT": "json",
    }
    return await asyncio.to_thread(CliRunner().invoke, main, ["compact", *arguments], env=environment)


async def test_the_command_reports_the_savings_and_compacts(
    strata_server: StrataServer, emulated: EmulatedProviders, database: Database
) -> None:
    drivers = [await drive_conversation(strata_server, emulated, EAGER) for _ in range(2)]
    dry = await command(strata_server, "--all", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "2 of 2 conversations would change" in dry.output
    assert [await buffer_start(driver) for driver in drivers] == [1, 1]
    one = await command(strata_server, drivers[0].conversation_id, "--json")
    assert json.loads(one.stdout)["last_seq"] == 4
    assert [await buffer_start(driver) for driver in drivers] == [5, 1]
    rest = await command(strata_server, "--all", "--tenant", "acme", "--assistant", drivers[1].assistant_id)
    assert "1 of 1 conversations changed" in rest.output
    assert [await buffer_start(driver) for driver in drivers] == [5, 5]
    undone = await command(strata_server, "--undo", drivers[0].conversation_id)
    assert undone.exit_code == 0, undone.output
    assert [await buffer_start(driver) for driver in drivers] == [1, 5]
    idle = await command(strata_server, "--all", "--older-than", "1d")
    assert "0 of 0 conversations changed" in idle.output
    # The dry run, and a compaction without anything to do, are not logged.
    assert "0 of 1 conversations changed" in (await command(strata_server, drivers[1].conversation_id)).output
    assert await audited(database) == [
        ("conversation.compact", "done", drivers[0].conversation_id),
        ("conversation.compact", "done", drivers[1].conversation_id),
        ("conversation.undo_compaction", "done", drivers[0].conversation_id),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "ids or --all"),
        (("conv_x", "--all"), 2, "ids or --all"),
        (("conv_x", "--tenant", "acme"), 2, "require --all"),
        (("--all", "--undo"), 2, "needs conversation ids"),
        (("--all", "--older-than", "soon"), 2, "is not a span"),
        (("--all", "--tenant", "nobody"), 66, "tenant_not_found"),
        (("--all", "--assistant", "rubbish"), 66, "assistant_not_found"),
        (("conv_01jd0z8s3bf6h9kq2m4n6p8r0t",), 66, "conversation_not_found"),
    ],
)
async def test_a_wrong_command_is_reported(
    strata_server: StrataServer, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = await command(strata_server, *arguments)
    assert result.exit_code == code, result.output
    assert words in result.output


async def test_one_failure_among_many_does_not_stop_the_others(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    drivers = [await drive_conversation(strata_server, emulated, EAGER) for _ in range(2)]
    missing = "conv_01jd0z8s3bf6h9kq2m4n6p8r0t"
    result = await command(strata_server, "--undo", drivers[0].conversation_id, drivers[1].conversation_id)
    assert result.exit_code == 1
    assert result.output.count("compaction_not_found") == 2
    result = await command(strata_server, missing, drivers[0].conversation_id)
    assert (result.exit_code, await buffer_start(drivers[0])) == (1, 5)
    assert "conversation_not_found" in result.output
