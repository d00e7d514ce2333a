"""The `strata` command, as a real process on a real database."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from server.conversation.api_key import parse_key_text
from server.conversation.audit import OPERATOR, AuditFilter
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog
from tests.support.strata_process import strata, strata_here


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    return {"STRATA_DATABASE_URL": database_options.url, "STRATA_DATA_DIR": str(tmp_path)}


async def test_a_created_key_is_accepted_until_it_is_revoked(
    env: dict[str, str], key_ring: PostgresKeyRing, database: Database
) -> None:
    created = strata("keys", "create", "--tenant", "acme", "--name", "ci", "--scope", "admin", env=env)
    assert created.returncode == 0, created.stderr
    presented = parse_key_text(created.stdout.strip())
    assert presented is not None
    found = await key_ring.find_live_key(presented)
    assert found is not None
    assert (found.tenant_name, found.name, sorted(found.scopes)) == ("acme", "ci", ["admin"])

    listed = strata("keys", "list", "--tenant", "acme", env=env)
    assert presented.id in listed.stdout
    assert created.stdout.strip().rpartition("_")[2] not in listed.stdout

    revoked = strata("keys", "revoke", presented.id, env=env)
    assert revoked.returncode == 0
    assert await key_ring.find_live_key(presented) is None
    assert "revoked" in strata("keys", "list", env=env).stdout
    tenant = await key_ring.load_tenant("acme")
    entries = (await PostgresAuditLog(database).list_entries(tenant.id, AuditFilter(object_id=presented.id))).items
    assert [(entry.action, entry.actor) for entry in entries] == [("key.revoke", OPERATOR), ("key.create", OPERATOR)]
    assert entries[1].details == {"scopes": ["admin"], "expires_at": None}


async def test_a_key_can_expire_and_be_read_by_programs(env: dict[str, str]) -> None:
    created = strata_here(
        "keys", "create", "--expires", "90d", "--scope", "client", "--scope", "admin", "--json", env=env
    )
    key = json.loads(created.stdout)
    assert key["scopes"] == ["admin", "client"]
    assert parse_key_text(key["key"]) is not None
    expires = datetime.fromisoformat(key["expires_at"])
    assert abs(expires - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=5)
    [listed] = [json.loads(line) for line in strata_here("keys", "list", "--json", env=env).stdout.splitlines()]
    assert listed == {name: value for name, value in key.items() if name != "key"}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["keys", "create", "--expires", "soon"], 2, "neither a span such as 12h"),
        (["keys", "create", "--expires", "2001-01-01"], 2, "is in the past"),
        (["keys", "create", "--tenant", "a\x07b"], 2, "no control characters"),
        (["keys", "create", "--scope", "root"], 2, "is not one of"),
        (["keys", "revoke", "key_nonsense"], 66, "There is no API key with this id"),
        (["keys", "list", "--tenant", "nobody"], 66, "There is no tenant called nobody"),
        (["serve", "--port", "99999"], 2, "is not in the range"),
    ],
)
def test_a_wrong_command_is_rejected_with_a_message(
    env: dict[str, str], arguments: list[str], code: int, sentence: str
) -> None:
    result = strata_here(*arguments, env=env)
    assert result.returncode == code
    assert sentence in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("extra", "code", "sentence"),
    [
        ({"STRATA_PORT": "many"}, 78, "STRATA_PORT: Input should be a valid integer"),
        ({"STRATA_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/x"}, 69, "The database cannot be reached"),
        ({"STRATA_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1/x?sslmode=maybe"}, 78, "STRATA_DATABASE_URL"),
    ],
)
def test_an_invalid_setting_is_rejected_without_its_value(
    env: dict[str, str], extra: dict[str, str], code: int, sentence: str
) -> None:
    result = strata_here("keys", "list", env=env | extra)
    assert (result.returncode, result.stdout) == (code, "")
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "hunter2" not in result.stderr


def test_the_schema_is_shown_checked_and_unchanged(env: dict[str, str]) -> None:
    current = strata_here("migrate", "current", env=env)
    head = re.search(r"release: +(\S+)", current.stdout)
    assert head is not None
    assert f"database: {head[1]}" in current.stdout
    assert strata_here("migrate", "check", env=env).returncode == 0
    assert "Nothing to do" in strata_here("migrate", "up", env=env).stdout
    refused = strata_here("migrate", "down", env=env, stdin="n\n")
    assert refused.returncode == 1
    assert strata_here("migrate", "check", env=env).returncode == 0


async def test_doctor_reports_problems_and_how_to_fix_them(env: dict[str, str], key_ring: PostgresKeyRing) -> None:
    await key_ring.create_tenant("acme")
    result = strata_here("doctor", env=env | {"GEMINI_API_KEY": "sk-not-to-be-shown"})
    assert result.returncode == 0, result.stdout
    assert "a key for gemini is set" in result.stdout
    assert "strata keys create --scope client" in result.stdout
    assert "sk-not-to-be-shown" not in result.stdout + result.stderr

    broken = strata_here("doctor", "--json", env=env | {"STRATA_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/x"})
    assert broken.returncode == 1
    findings = {finding["check"]: finding for finding in map(json.loads, broken.stdout.splitlines())}
    assert findings["database"]["verdict"] == "failed"
    assert findings["database"]["fix"]
    assert "hunter2" not in broken.stdout + broken.stderr


async def test_doctor_finds_an_old_schema(env: dict[str, str], database: Database) -> None:
    async with database.connection() as connection:
        head = await connection.fetchval("SELECT version_num FROM alembic_version")
        await connection.execute("DELETE FROM alembic_version")
    try:
        result = strata_here("doctor", env=env)
        served = strata_here("serve", "--port", "0", "--provider", "gemini", "--api-key", "x", env=env)
    finally:
        async with database.connection() as connection:
            await connection.execute("INSERT INTO alembic_version VALUES ($1)", head)
    assert result.returncode == 1
    assert "strata migrate up" in result.stdout
    assert served.returncode == 76
    assert "[schema_behind]" in served.stderr


def test_every_command_has_a_help_text(env: dict[str, str]) -> None:
    _, _, listed = strata_here("--help", env=env).stdout.partition("Commands:")
    names = re.findall(r"^  (\w+) ", listed, re.MULTILINE)
    assert {"serve", "demo", "chat", "worker", "inspect", "export", "import", "seed"} < set(names)
    for name in names:
        result = strata_here(name, "--help", env=env)
        assert result.returncode == 0
        assert len(result.stdout.splitlines()) > 4
    assert re.fullmatch(r"strata, version \d+\.\d+\.\d+\n", strata("--version", env=env).stdout)
