"""`strata export`, `strata import` and the export over HTTP."""

import gzip
import json
from pathlib import Path

import httpx2
import pytest

from server.conversation.api_key import KeyRing, Tenant
from server.conversation.audit import OPERATOR, Action, AuditFilter
from server.conversation.errors import ConversationNotFound
from server.inspection.conversation_list import InspectionFilter
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.store import PostgresStore
from tests.conftest import StrataServer
from tests.support.archive_driver import export_lines, rows_of
from tests.support.builders import NASTY, accept, create_conversation, take_exchange, user_input
from tests.support.strata_process import strata, strata_here


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    return {"STRATA_DATABASE_URL": database_options.url, "STRATA_DATA_DIR": str(tmp_path)}


async def store_conversation(store: PostgresStore, tenant: Tenant, text: str = NASTY) -> str:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id, text)
    return conversation.id


def run(
    env: dict[str, str], *arguments: str, code: int = 0, stdin: str = "", is_apart: bool = False
) -> tuple[str, str]:
    result = (strata if is_apart else strata_here)(*arguments, env=env, stdin=stdin)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout, result.stderr


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz", "all.jsonl.zst"])
async def test_an_export_of_all_conversations_can_be_imported(
    env: dict[str, str], store: PostgresStore, database: Database, tenant: Tenant, tmp_path: Path, name: str
) -> None:
    ids = [await store_conversation(store, tenant, f"{NASTY} {number}") for number in range(3)]
    before = [await rows_of(database, conversation_id) for conversation_id in ids]
    file = str(tmp_path / name)
    assert "3 conversations exported." in run(env, "export", "--all", "-o", file)[1]
    for conversation_id in ids:
        await store.erase_conversation(tenant.id, conversation_id)

    assert "3 conversations would be imported." in run(env, "import", file, "--tenant", "acme", "--dry-run")[1]
    with pytest.raises(ConversationNotFound):
        await store.load_conversation(tenant.id, ids[0])
    printed, _ = run(env, "import", file, "--tenant", "acme")

    assert [line.split("\t") for line in printed.splitlines()] == [[each, each, "2"] for each in ids]
    assert [await rows_of(database, conversation_id) for conversation_id in ids] == before
    assert "already exists" in run(env, "import", file, "--tenant", "acme", code=65)[1]
    printed, _ = run(env, "import", file, "--tenant", "acme", "--new-ids")
    assert not set(ids) & {line.split("\t")[1] for line in printed.splitlines()}


async def test_imported_conversations_are_found_at_once_and_both_actions_are_audited(
    env: dict[str, str], store: PostgresStore, database: Database, tenant: Tenant, tmp_path: Path
) -> None:
    ids = [await store_conversation(store, tenant, f"Where is order number{number}?") for number in range(2)]
    file = str(tmp_path / "all.jsonl")
    run(env, "export", ids[0], "-o", file)
    await store.erase_conversation(tenant.id, ids[0])
    run(env, "import", file, "--tenant", "acme", "--dry-run")
    run(env, "import", file, "--tenant", "acme")
    run(env, "import", file, "--tenant", "acme", code=65)
    # No indexer has run: the import has indexed it.
    page = await PostgresInspector(database).list_conversations(tenant.id, filters=InspectionFilter(text="number0"))
    assert [(item.id, item.is_counted) for item in page.items] == [(ids[0], True)]
    entries = (await PostgresAuditLog(database).list_entries(tenant.id, AuditFilter(object_id=ids[0]))).items
    assert [(entry.action, entry.actor) for entry in entries] == [
        (Action.IMPORT, OPERATOR),
        (Action.EXPORT, OPERATOR),
    ]
    assert entries[0].details == {"source": ids[0], "turns": 2}

    await accept(store, tenant.id, user_input(ids[1], "Again"))
    run(env, "export", "--all", "-o", file, code=1)
    [failed] = (await PostgresAuditLog(database).list_entries(tenant.id, AuditFilter(object_id=ids[1]))).items
    assert (failed.action, failed.outcome, failed.details) == (Action.EXPORT, "failed", {"code": "conversation_busy"})


async def test_an_export_can_be_piped(
    env: dict[str, str], store: PostgresStore, database: Database, tenant: Tenant, key_ring: KeyRing
) -> None:
    ours = await store_conversation(store, tenant)
    theirs = await store_conversation(store, await key_ring.create_tenant("other"))
    printed, _ = run(env, "export", ours, is_apart=True)
    assert printed.encode() == b"".join(await export_lines(database, tenant.id, ours))
    printed, _ = run(env, "export", "--all", "--tenant", "other")
    assert [json.loads(line)["id"] for line in printed.split("\n") if '"record":"conversation"' in line] == [theirs]
    run(env, "export", theirs, "--tenant", "acme", code=66)
    await store.erase_conversation((await key_ring.load_tenant("other")).id, theirs)
    imported, _ = run(env, "import", "-", "--tenant", "other", stdin=printed, is_apart=True)
    assert imported.split("\t")[:2] == [theirs, theirs]


async def test_a_conversation_with_a_running_turn_is_skipped_and_reported(
    env: dict[str, str], store: PostgresStore, tenant: Tenant, tmp_path: Path
) -> None:
    ready, busy = await store_conversation(store, tenant), await store_conversation(store, tenant)
    await accept(store, tenant.id, user_input(busy, "Again"))
    file = tmp_path / "all.jsonl"
    _, output = run(env, "export", "--all", "-o", str(file), code=1)
    assert "1 conversations exported." in output
    assert f"{busy}: not exported" in output
    assert ready in file.read_text()
    run(env, "export", busy, "-o", str(tmp_path / "one.jsonl"), code=65)
    assert not [name for name in ("one.jsonl", "one.jsonl.part") if (tmp_path / name).exists()]


async def test_an_unreadable_file_imports_nothing(
    env: dict[str, str], store: PostgresStore, tenant: Tenant, tmp_path: Path
) -> None:
    ids = [await store_conversation(store, tenant), await store_conversation(store, tenant)]
    whole = run(env, "export", *ids)[0].encode()
    for conversation_id in ids:
        await store.erase_conversation(tenant.id, conversation_id)
    files = {
        "cut.jsonl": whole[:-40],
        "cut.jsonl.gz": gzip.compress(whole)[:-20],
        "plain.jsonl.zst": whole,
        "plain.jsonl.gz": whole,
        "newer.jsonl": whole.replace(b'"version":1', b'"version":2', 1),
        "other.jsonl": b'{"record": "something"}\n',
        "empty.jsonl": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert "archive_invalid" in run(env, "import", str(tmp_path / name), "--tenant", "acme", code=65)[1], name
    assert (await store.list_conversations(tenant.id)).items == []


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["export"], 2, "ids or --all"),
        (["export", "--all", "conv_x"], 2, "ids or --all"),
        (["export", "conv_x"], 66, "no conversation with this id"),
        (["export", "--all", "--tenant", "nobody"], 66, "no tenant called nobody"),
        (["export", "--all", "-o", "/nowhere/at/all.jsonl"], 1, "cannot be written"),
        (["import", "/nowhere.jsonl"], 2, "is not a file"),
        (["import", "pyproject.toml", "--tenant", "nobody"], 66, "no tenant called nobody"),
    ],
)
def test_an_invalid_command_line_is_rejected_with_a_message(
    env: dict[str, str], arguments: list[str], code: int, sentence: str
) -> None:
    assert sentence in " ".join(run(env, *arguments, code=code)[1].split())


async def test_an_admin_key_exports_only_conversations_of_its_tenant(
    strata_server: StrataServer, database: Database, store: PostgresStore
) -> None:
    conversation_id = await store_conversation(store, strata_server.tenant)
    other = await store_conversation(store, await strata_server.key_ring.create_tenant("other"))

    async with httpx2.AsyncClient(base_url=strata_server.url) as client:

        async def export(which: str, key: str) -> httpx2.Response:
            return await client.get(
                f"/admin/api/conversations/{which}/export", headers={"authorization": f"Bearer {key}"}
            )

        answer = await export(conversation_id, strata_server.admin_key)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.headers["content-disposition"] == f'attachment; filename="{conversation_id}.jsonl"'
        assert answer.content == b"".join(await export_lines(database, strata_server.tenant.id, conversation_id))
        assert (await export(other, strata_server.admin_key)).status_code == 404
        assert (await export("conv_x", strata_server.admin_key)).status_code == 404
        assert (await export(conversation_id, strata_server.client_key)).status_code == 403
        await accept(store, strata_server.tenant.id, user_input(conversation_id, "Again"))
        busy = await export(conversation_id, strata_server.admin_key)
        assert (busy.status_code, busy.json()["code"]) == (409, "conversation_busy")
