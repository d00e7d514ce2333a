"""The server as a process: it starts, prints its URL, and stops in order."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import httpx2
import psutil
import pytest

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Tenant
from server.conversation.errors import AddressInUse
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.support.builders import accept, answer, create_conversation, user_input
from tests.support.strata_process import StrataProcess, strata, strata_here, wait_until


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    return {
        "STRATA_DATABASE_URL": database_options.url,
        "STRATA_DATA_DIR": str(tmp_path),
        "STRATA_PORT": "0",
        "GEMINI_API_KEY": "never-used",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_server_prints_its_url_and_ends_cleanly(env: dict[str, str], number: int) -> None:
    with StrataProcess("serve", env=env) as server:
        url = server.find(r"Strata is listening on (http://127\.0\.0\.1:\d+)")
        for path in ("/healthz", "/readyz", "/metrics", "/schema"):
            answered = httpx2.get(url + path)
            assert answered.status_code == 200, path
            assert answered.headers["x-request-id"]
        server.send(number)
        assert server.wait() == 0
        assert "program.stopped" in server.output
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("arguments", "keys", "sentence"),
    [
        ([], {"GEMINI_API_KEY": ""}, "No provider is chosen"),
        ([], {"ANTHROPIC_API_KEY": "sk-hidden"}, "several providers"),
        (["--provider", "anthropic"], {}, "no key for anthropic"),
    ],
)
def test_a_server_needs_one_provider(
    env: dict[str, str], arguments: list[str], keys: dict[str, str], sentence: str
) -> None:
    result = strata_here("serve", *arguments, env=env | keys)
    assert result.returncode == 78
    assert sentence in result.stderr
    assert "sk-hidden" not in result.stderr


def test_a_port_in_use_is_reported_at_once(env: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = strata_here("serve", "--port", str(taken.getsockname()[1]), env=env)
    assert result.returncode == 71
    assert "[address_in_use]" in result.stderr
    with pytest.raises(AddressInUse, match=r"Cannot listen on 203\.0\.113\.1:1"):
        bind("203.0.113.1", 1)


async def test_a_stopping_server_lets_running_turns_finish(database: Database, server_settings: Settings) -> None:  # noqa: ARG001  reason: emptied first
    release = asyncio.Event()

    async def turn() -> str:
        await release.wait()
        return "finished"

    async with open_program(server_settings) as program:
        task = program.running_turns.start(turn(), name="turn")
        serve = serving(program, bind("127.0.0.1", 0))
        url = await serve.__aenter__()
        async with httpx2.AsyncClient() as client:
            assert (await client.get(f"{url}/readyz")).status_code == 200
        stop = asyncio.create_task(serve.__aexit__(None, None, None))
        await asyncio.to_thread(wait_until, lambda: program.running_turns.draining, "the server drains")
        async with httpx2.AsyncClient() as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get(f"{url}/healthz")
        assert not task.done()
        release.set()
        await stop
        assert task.result() == "finished"


async def test_a_stopped_process_surrenders_its_leases(
    database: Database, server_settings: Settings, store: PostgresStore, tenant: Tenant
) -> None:
    assert database is not None
    async with open_program(server_settings) as program:
        owner = program.owner
        conversation = await create_conversation(store, tenant.id)
        mine = await accept(store, tenant.id, user_input(conversation.id, lease_owner=owner))
        other = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(other.id, lease_owner="another process"))
        assert await store.list_expired_leases() == []
    assert [lease for _, lease in await store.list_expired_leases()] == [mine.lease]
    # Released, not discarded: until another process takes it over, the turn can still be ended.
    await store.finish_turn(mine.lease, answer())


def test_demo_sets_everything_up_and_reuses_it() -> None:
    # Not the temporary directory of pytest: for root, Postgres runs under an account that cannot enter it.
    data_dir = Path(tempfile.gettempdir()) / f"strata-demo-test-{os.getpid()}"
    env = {"STRATA_DATA_DIR": str(data_dir), "STRATA_LOG_LEVEL": "warning"}
    try:
        keys = [_try_demo(env) for _ in range(2)]
        assert keys[0] == keys[1]
        assert (data_dir / "demo-keys.json").stat().st_mode & 0o777 == 0o600
    finally:
        _remove(data_dir)


def _try_demo(env: dict[str, str]) -> str:
    """Start the demo once, and follow its output as a user would. Returns the client key."""
    with StrataProcess("demo", "--port", "0", env=env) as demo:
        url = demo.find(r"URL +(http://127\.0\.0\.1:\d+)")
        client_key = demo.find(r"client key +(strata_\S+)")
        admin_key = demo.find(r"admin key +(strata_\S+)")
        assert httpx2.get(demo.find(r"admin pages +(http://\S+/admin)\n"), follow_redirects=True).status_code == 401
        script = demo.find(r"(?s)(  KEY=.*Oslo\?\"\}')")
        assistants = {name: demo.find(rf"(asst_\S+)  {name}") for name in ("Gemini", "Claude")}
        assert env["STRATA_DATA_DIR"] in demo.output
        for assistant in assistants.values():
            _hold_a_conversation(script.replace(assistants["Claude"], assistant))
        name, value = "authorization", f"Bearer {client_key}"
        who = httpx2.get(f"{url}/v1/key", headers={name: value}).json()
        assert (who["tenant"]["name"], who["scopes"]) == ("demo", ["client"])
        listed = httpx2.get(f"{url}/admin/api/keys", headers={"authorization": f"Bearer {admin_key}"}).json()
        assert len(listed["data"]) == 2
        # A command next to the running server uses the same Postgres.
        assert "demo client" in strata("keys", "list", env=env).stdout
        demo.send(signal.SIGINT)
        assert demo.wait() == 0
    wait_until(lambda: not _processes_of(env["STRATA_DATA_DIR"]), "nothing is left running", 20)
    return client_key


def _hold_a_conversation(script: str) -> None:
    """Run the lines of the demo's output in a shell."""
    output = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "event: turn.started" in output
    assert '"name":"get_weather"' in output
    assert "event: turn.completed" in output


def _processes_of(data_dir: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(data_dir in argument for argument in process.info["cmdline"] or ())
    ]


def _remove(data_dir: Path) -> None:
    for process in _processes_of(str(data_dir)):
        process.kill()
    shutil.rmtree(data_dir, ignore_errors=True)
