"""Two ordinary roles: one that owns the schema and migrates it, one that only reads and writes rows and runs the rest.

The statements are those of docs/operations/running.md, read from there.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope
from server.conversation.errors import MigrationFailed
from server.postgres.connections import DatabaseOptions
from server.postgres.migrations import find_drift, migrate_down_one, migrate_up, read_schema_state
from tests.support.database_source import with_database
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import ApiClient
from tests.support.strata_process import strata_here

ROOT = Path(__file__).parents[3]
PASSWORD = "of-a-test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The URLs of a database that belongs to an ordinary role, by role."""

    admin: str
    owner: str
    app: str
    names: dict[str, str]
    """The names of the docs in this test: roles belong to the server, and other tests run concurrently."""

    def documented(self, number: int) -> str:
        """The statements of a block of docs/operations/running.md."""
        section = (ROOT / "docs/operations/running.md").read_text().partition("\n### Roles\n")[2].partition("\n### ")[0]
        text = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)[number]
        for name in sorted(self.names, key=len, reverse=True):
            text = re.sub(rf"\b{name}\b", self.names[name], text)
        return re.sub(r"'change-me[a-z-]*'", f"'{PASSWORD}'", text)


async def execute(url: str, text: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in filter(None, map(str.strip, text.split(";"))):
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture
async def roles(server_url: str, worker_id: str) -> AsyncIterator[Roles]:
    """Roles and an empty database, created as the docs describe."""
    names = {name: f"{name}_{worker_id}" for name in ("strata_owner", "strata_app")}
    names["strata"] = f"strata_roles_{worker_id}"

    def as_role(role: str) -> str:
        parts = urlsplit(with_database(server_url, names["strata"]))
        return urlunsplit(parts._replace(netloc=f"{names[role]}:{PASSWORD}@{parts.netloc.rpartition('@')[2]}"))

    made = Roles(admin=server_url, owner=as_role("strata_owner"), app=as_role("strata_app"), names=names)
    remove = (
        f"DROP DATABASE IF EXISTS {names['strata']} WITH (FORCE);"
        f"DROP ROLE IF EXISTS {names['strata_owner']}; DROP ROLE IF EXISTS {names['strata_app']}"
    )
    await execute(server_url, remove)
    await execute(server_url, made.documented(0))
    yield made
    await execute(server_url, remove)


async def test_everything_but_migrating_runs_under_a_role_that_only_reads_and_writes_rows(
    roles: Roles, emulated: EmulatedProviders, tmp_path: Path
) -> None:
    await execute(roles.owner, roles.documented(1))
    await migrate_up(DatabaseOptions(url=roles.owner))
    assert await privileges(roles) == {"strata_owner": False, "strata_app": False}
    app = DatabaseOptions(url=roles.app)
    assert (await read_schema_state(app)).pending == ()
    assert await find_drift(app) == []

    conversation_id = await use(roles.app, emulated, tmp_path)
    env = {"STRATA_DATABASE_URL": roles.app, "STRATA_DATA_DIR": str(tmp_path), "GEMINI_API_KEY": "never-used"}
    file = str(tmp_path / "all.jsonl")
    for command in (
        ["migrate", "check"],
        ["migrate", "up"],
        ["doctor"],
        ["keys", "create", "--tenant", "acme"],
        ["jobs"],
        ["usage"],
        ["inspect", "conversation", conversation_id],
        ["export", "--all", "-o", file],
        ["import", file, "--tenant", "acme", "--new-ids"],
        ["replay", "verify", "--workers", "1", "--state", str(tmp_path / "state.json")],
        ["compact", conversation_id, "--dry-run"],
        ["seed", "--turns", "10"],
    ):
        result = strata_here(*command, env=env)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        assert "permission denied" not in result.stderr


async def test_the_role_of_the_server_cannot_change_the_schema(roles: Roles) -> None:
    await execute(roles.owner, roles.documented(1))
    await migrate_up(DatabaseOptions(url=roles.owner))
    refusal = r"may not change the schema: (must be owner|permission denied)"
    states = [await read_schema_state(DatabaseOptions(url=roles.owner))]
    # The newest revisions may change rows only, which the role may do.
    with pytest.raises(MigrationFailed, match=refusal):  # noqa: PT012  reason: repeated until it raises
        while True:
            states.append(await migrate_down_one(DatabaseOptions(url=roles.app)))
    assert await read_schema_state(DatabaseOptions(url=roles.owner)) == states[-1]
    for statement in ("CREATE TABLE mine ()", "TRUNCATE turns", "DROP TABLE turns", "CREATE SCHEMA mine"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await execute(roles.app, statement)


async def test_a_role_can_be_added_to_an_existing_database(
    roles: Roles, emulated: EmulatedProviders, tmp_path: Path
) -> None:
    await migrate_up(DatabaseOptions(url=roles.owner))
    await execute(roles.owner, roles.documented(1))
    await execute(roles.owner, roles.documented(2))
    await use(roles.app, emulated, tmp_path)


async def privileges(roles: Roles) -> dict[str, bool]:
    """Whether each role has any attribute of a privileged one."""
    connection = await asyncpg.connect(roles.admin)
    try:
        return {
            name: await connection.fetchval(
                "SELECT rolsuper OR rolcreatedb OR rolcreaterole OR rolreplication OR rolbypassrls"
                " FROM pg_roles WHERE rolname = $1",
                roles.names[name],
            )
            for name in ("strata_owner", "strata_app")
        }
    finally:
        await connection.close()


async def use(url: str, emulated: EmulatedProviders, data_dir: Path) -> str:
    """What clients, operators and the worker inside do. Returns the id of a conversation that stays."""
    settings = emulated.point(
        Settings(database_url=SecretStr(url), data_dir=data_dir, port=0, worker_inside=True, log_format="json")
    )
    async with emulated.open(settings) as providers, open_program(settings, providers=providers) as program:
        tenant = await program.key_ring.create_tenant("acme")
        keys = [
            (
                await program.key_ring.create_key(
                    tenant_id=tenant.id, name=scope, scopes=frozenset({scope}), expires_at=None
                )
            )[1]
            for scope in (Scope.CLIENT, Scope.ADMIN)
        ]
        async with (
            serving(program, bind("127.0.0.1", 0)) as base_url,
            httpx2.AsyncClient(base_url=base_url, timeout=60) as client,
        ):
            api, admin = (ApiClient(client=client, key=key) for key in keys)
            conversation_id = await api.begin()
            for _ in range(8):
                await api.say(conversation_id, "Tell me a story. " * 200)
            here = f"/v1/conversations/{conversation_id}"
            moved = await api.expect(200, "POST", f"{here}/compactions", {"force": True})
            assert moved["outcome"] != "unchanged", moved
            await api.say(conversation_id)
            await api.expect(200, "DELETE", f"{here}/compactions/latest")
            fork = await api.expect(201, "POST", f"{here}/fork", {"at_seq": 2})
            await api.expect(200, "DELETE", f"/v1/conversations/{fork['id']}")
            body = {
                "name": "again",
                "selection": {"conversation_ids": [conversation_id]},
                "candidate": {"model": emulated["gemini"].model},
            }
            replay = await admin.expect(201, "POST", "/admin/api/replays", body)
            path = f"/admin/api/replays/{replay['id']}"
            while (await admin.expect(200, "GET", path))["state"] == "running":  # noqa: ASYNC110  reason: over HTTP
                await asyncio.sleep(0.05)
            assert (await admin.expect(200, "GET", path))["state"] == "done"
            await admin.expect(200, "DELETE", path)
            await admin.expect(200, "GET", "/admin/api/conversations?phrase=story")
            assert (await api.ask("GET", "/readyz")).status_code == 200
    return conversation_id
