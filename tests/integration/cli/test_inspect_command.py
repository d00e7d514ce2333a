"""`strata inspect` on a real database."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from server.conversation.api_key import Tenant
from server.emulator.reply import FaultKind
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.inspection.search_index import index_new
from server.postgres.store import PostgresStore
from server.providers.choice import GEMINI
from tests.conftest import StrataServer
from tests.support.builders import NASTY, create_conversation, take_exchange
from tests.support.conversation_driver import start_driver, text_reply, tool_reply
from tests.support.emulators import EmulatedProviders
from tests.support.strata_process import strata, strata_here


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    return {"STRATA_DATABASE_URL": database_options.url, "STRATA_DATA_DIR": str(tmp_path)}


def shown(env: dict[str, str], *arguments: str) -> str:
    result = strata_here("inspect", *arguments, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_conversations_are_listed_with_filters_and_without_controls(
    env: dict[str, str], database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(
        store,
        tenant.id,
        conversation.id,
        f"[red]{NASTY} and what follows goes on for longer than a column is wide, and on, and on",
    )
    await index_new(database)

    listed = strata("inspect", "list", "--provider", "gemini", "--tenant", "acme", env=env).stdout
    assert conversation.id in listed
    # A long text does not cut off the numbers.
    assert re.search(r"│ +2 │ +\d[\d,]* │ +[\d.]+ │ \d{4}-\d\d-\d\d", listed)
    assert "\x1b" not in listed
    assert "\u202e" not in listed
    assert "[red]NUL" in listed
    assert conversation.id not in shown(env, "list", "--provider", "anthropic")
    page = json.loads(shown(env, "list", "--text", "lone", "--json"))
    assert [item["id"] for item in page["data"]] == [conversation.id]

    timeline = shown(env, "conversation", conversation.id)
    assert "turn 2, model" in timeline
    assert "\x1b" not in timeline
    assert "\x00" not in timeline


async def test_a_call_is_shown_with_its_verification_and_its_bytes(
    strata_server: StrataServer, emulated: EmulatedProviders, env: dict[str, str]
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI)
    await driver.task("How is Oslo?", tool_reply("Oslo"), text_reply("Cold."))

    text = shown(env, "call", driver.conversation_id, "4")
    for message in (
        "outcome   answered [end_turn]. The model finished. HTTP 200.",
        "request   equal, ",
        "cache     less than possible, expected 0, read 0 [below_minimum].",
        "Compared with turn 2, attempt 1:",
        " equal block",
        "+ trigger message tool turn 3",
        "turn 4 thinking, received: unsigned",
        "Cold.",
    ):
        assert message in text
    call = json.loads(shown(env, "call", driver.conversation_id, "4", "--json"))
    request = shown(env, "call", driver.conversation_id, "4", "--request")
    assert hashlib.sha256(request.encode()).hexdigest() == call["request"]["stored_hash"]
    assert shown(env, "call", driver.conversation_id, "4", "--response").startswith("data: ")


async def test_a_failed_call_is_shown_without_controls(
    strata_server: StrataServer, emulated: EmulatedProviders, env: dict[str, str], database: Database
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI)
    hostile = "\x1b[31m[bold]red[/bold]\x9b\u202e\x07"
    await driver.task(hostile, tool_reply(hostile), text_reply(hostile))
    emulated[GEMINI].inject_fault(FaultKind.BAD_AUTH)
    await driver.task(hostile, text_reply(hostile))
    async with database.connection() as connection:
        await connection.execute("UPDATE turns SET native = convert_to('{}', 'UTF8') WHERE seq = 2")
        await connection.execute(
            "UPDATE calls SET error_code = $1, warnings = $2 WHERE turn_seq = 4",
            hostile.replace("\x07", ""),
            json.dumps([{"kind": hostile, "note": hostile}]),
        )

    failed = shown(env, "call", driver.conversation_id, "6")
    assert "outcome   failed [provider_authentication]." in failed
    hurt = shown(env, "call", driver.conversation_id, "4")
    assert "request   different, first at block 5" in hurt
    assert "[bold]red[/bold]" in hurt
    for text in (failed, hurt):
        assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("conversation", "conv_x"), "conversation_not_found"),
        (("call", "conv_x", "2"), "conversation_not_found"),
        (("call", "conv_x", "-2"), "conversation_not_found"),
        (("list", "--tenant", "nobody"), "tenant_not_found"),
        (("list", "--cursor", "x"), "cursor_invalid"),
        (("list", "--cost-from", "much"), "not an amount"),
        (("conversation", "conv_x", "--after", "1", "--around", "2"), "not both"),
    ],
)
def test_an_unknown_conversation_or_call_is_an_error(
    env: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    result = strata_here("inspect", *arguments, env=env)

    assert result.returncode != 0
    assert message in result.stderr
