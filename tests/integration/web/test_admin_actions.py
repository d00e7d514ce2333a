"""Actions of operators are carried out and audited, also if they fail."""

from collections.abc import Mapping

import pytest

from server.conversation.audit import Action, Actor, AuditFilter, Outcome
from server.conversation.errors import CompactionNotFound, ConversationBusy, ConversationNotFound, TurnNotRunning
from server.conversation.identifiers import API_KEY, new_id
from server.inspection.actions import Audit, ConversationActions
from server.postgres.archive.exporter import PostgresArchives
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog
from server.providers.choice import GEMINI
from tests.conftest import StrataServer
from tests.support.builders import accept, user_input
from tests.support.compaction_driver import NARROW
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply
from tests.support.emulators import EmulatedProviders


@pytest.fixture
async def driver(strata_server: StrataServer, emulated: EmulatedProviders) -> ConversationDriver:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI, settings=NARROW)
    for number in range(3):
        await driver.task(f"Task {number}.", text_reply("Done."))
    return driver


@pytest.fixture
def audit(strata_server: StrataServer, database: Database) -> Audit:
    actor = Actor(key_id=new_id(API_KEY), address="127.0.0.1")
    return Audit(log=PostgresAuditLog(database), tenant_id=strata_server.tenant.id, actor=actor)


@pytest.fixture
def actions(strata_server: StrataServer, database: Database, audit: Audit) -> ConversationActions:
    program = strata_server.program
    return ConversationActions(
        tenant_id=strata_server.tenant.id,
        audit=audit,
        compactor=program.compactor,
        store=program.store,
        turn_service=program.turn_service,
        archives=PostgresArchives(database),
    )


async def list_rows(audit: Audit) -> list[tuple[str, str | None, Outcome, Mapping[str, object]]]:
    page = await audit.log.list_entries(audit.tenant_id, AuditFilter(key_id=audit.actor.key_id))
    return [(entry.action, entry.object_id, entry.outcome, entry.details) for entry in reversed(page.items)]


async def test_an_action_is_recorded_with_its_result(
    actions: ConversationActions, audit: Audit, driver: ConversationDriver
) -> None:
    conversation_id = driver.conversation_id
    made = await actions.fork(conversation_id, 2)
    compacted = await actions.compact(conversation_id, force=True)
    await actions.undo_compaction(conversation_id)
    lines = [line async for line in actions.export(conversation_id)]
    report = await actions.erase(conversation_id)
    rows = await list_rows(audit)
    assert [row[:3] for row in rows] == [
        (action, conversation_id, Outcome.DONE)
        for action in (Action.FORK, Action.COMPACT, Action.UNDO_COMPACTION, Action.EXPORT, Action.ERASE)
    ]
    assert rows[0][3] == {"at_seq": 2, "made": made.id}
    assert rows[1][3]["epoch"] == compacted.epoch
    assert rows[4][3] == {"rows": dict(report.rows)}
    assert len(lines) > 10


async def test_a_failed_action_is_recorded_with_its_error_code(
    actions: ConversationActions, audit: Audit, driver: ConversationDriver
) -> None:
    conversation_id = driver.conversation_id
    with pytest.raises(TurnNotRunning):
        await actions.cancel(conversation_id)
    with pytest.raises(CompactionNotFound):
        await actions.undo_compaction(conversation_id)
    await accept(driver.program.store, audit.tenant_id, user_input(conversation_id))
    with pytest.raises(ConversationBusy):
        await actions.erase(conversation_id)
    with pytest.raises(ConversationBusy):
        await anext(actions.export(conversation_id))
    with pytest.raises(ConversationNotFound):
        await actions.fork("conv_x", 2)
    assert [(action, outcome, details["code"]) for action, _, outcome, details in await list_rows(audit)] == [
        (Action.CANCEL, Outcome.FAILED, "turn_not_running"),
        (Action.UNDO_COMPACTION, Outcome.FAILED, "compaction_not_found"),
        (Action.ERASE, Outcome.FAILED, "conversation_busy"),
        (Action.EXPORT, Outcome.FAILED, "conversation_busy"),
        (Action.FORK, Outcome.FAILED, "conversation_not_found"),
    ]


async def test_a_dry_run_changes_nothing_and_leaves_no_row(
    actions: ConversationActions, audit: Audit, driver: ConversationDriver
) -> None:
    assert (await actions.erase(driver.conversation_id, dry_run=True)).rows["turns"] == 6
    assert (await actions.compact(driver.conversation_id, force=True, dry_run=True)).is_dry_run
    assert len(await driver.turns()) == 6
    assert await list_rows(audit) == []
