"""`strata replay verify`: options, exit codes, reports, several processes, and resuming."""

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from server.cli import main
from server.cli.verify_run import draw_sample
from server.cli.verify_state import VerifyState, load_state, save_state
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, new_id
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.replay.conversation_choice import ConversationChoice, find_last_id, list_choice
from server.providers.choice import ANTHROPIC, GEMINI
from server.replay.verify.recorded_calls import CallFilter
from tests.conftest import StrataServer
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import MODELS, EmulatedProviders
from tests.support.strata_process import StrataProcess, strata, wait_until


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    """Without any key, and with provider addresses without a listener: a call of a provider would fail."""
    return {
        "STRATA_DATABASE_URL": database_options.url,
        "STRATA_DATA_DIR": str(tmp_path),
        "STRATA_GEMINI_BASE_URL": "http://127.0.0.1:9",
        "STRATA_ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
    }


@pytest.fixture
async def drivers(strata_server: StrataServer, emulated: EmulatedProviders) -> list[ConversationDriver]:
    """For each provider a conversation with two calls and one with one call, the last with an image."""
    program, tenant_id = strata_server.program, strata_server.tenant.id
    drivers = [await start_driver(program, tenant_id, emulated, provider) for provider in (GEMINI, ANTHROPIC) * 2]
    for driver in drivers[:2]:
        await driver.task("First.", tool_reply("Oslo"), text_reply("Cold."))
    for driver in drivers[2:]:
        await driver.task("First.", text_reply("Cold."), picture=driver is drivers[-1])
    return drivers


def verify(env: dict[str, str], *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The report and the output of the command."""
    report = Path(env["STRATA_DATA_DIR"]) / "report.json"
    result = strata("replay", "verify", "--json", str(report), *options, env=env)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    message = result.stdout + result.stderr
    return (json.loads(report.read_text()) if code in {0, 1} else {}), message


async def flip(database: Database, driver: ConversationDriver) -> None:
    """Flip one byte of the first answer of the conversation."""
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE calls SET raw_response = set_byte(raw_response, 30, 255 - get_byte(raw_response, 30)) "
            "WHERE conversation_id = $1 AND turn_seq = 2",
            decode_id(CONVERSATION, driver.conversation_id),
        )


async def test_everything_stored_is_verified_and_one_changed_byte_is_reported(
    env: dict[str, str], database: Database, drivers: list[ConversationDriver]
) -> None:
    report, message = verify(env, "--workers", "2")
    assert "No mismatch in 6 calls of 4 conversations" in message
    assert report["counts"].pop("raw_bytes") > 1_000
    assert report["counts"] == {
        "conversation_count": 4,
        "call_count": 6,
        "request_count": 6,
        "answer_count": 6,
        "without_bytes_count": 0,
        "running_count": 0,
        "unknown_count": 0,
        "unknown_providers": {},
        "mismatch_count": 0,
    }
    assert not (Path(env["STRATA_DATA_DIR"]) / "replay-verify.json").exists()

    for driver in drivers[:2]:
        await flip(database, driver)
    provider = ("--provider", ANTHROPIC, "--from", "1h", "--tenant", "acme", "--no-requests")
    report, message = verify(env, "--workers", "1", *provider, code=1)
    [mismatch] = report["mismatches"]
    assert (mismatch["conversation_id"], mismatch["turn_seq"]) == (drivers[1].conversation_id, 2)
    assert (mismatch["attempt"], mismatch["subject"]) == (1, "bytes")
    assert f"{drivers[1].conversation_id} turn 2 attempt 1  bytes  raw_response" in message
    assert "1 mismatch in 3 calls of 2 conversations" in message
    assert (report["counts"]["answer_count"], report["counts"]["request_count"]) == (2, 0)


async def test_only_chosen_conversations_are_verified(database: Database, drivers: list[ConversationDriver]) -> None:
    ids = sorted(driver.conversation_id for driver in drivers)
    last_id = await find_last_id(database)
    assert last_id == ids[-1]

    async def chosen(after_id: str | None = None, **choice: Any) -> list[str]:
        wanted = ConversationChoice(**{"last_id": last_id} | choice)
        return [each.id async for each in list_choice(database, wanted, after_id=after_id) if each.is_chosen]

    now = datetime.now(UTC)
    gemini = sorted(driver.conversation_id for driver in drivers[::2])
    assert await chosen() == ids
    assert await chosen(ids[1]) == ids[2:]
    assert await chosen(last_id=ids[2]) == ids[:3]
    assert await chosen(calls=CallFilter(provider=GEMINI)) == gemini
    assert await chosen(calls=CallFilter(model=MODELS[GEMINI], started_after=now - timedelta(hours=1))) == gemini
    assert await chosen(calls=CallFilter(started_after=now + timedelta(hours=1))) == []
    assert await chosen(assistant_id=drivers[2].assistant_id) == [drivers[2].conversation_id]
    assert await chosen(tenant_id=drivers[0].tenant_id) == ids
    assert await chosen(tenant_id=new_id(TENANT)) == []
    state = VerifyState(database_mark="", choice=ConversationChoice(last_id=last_id))
    drawn = [await draw_sample(database, state, 2, seed) for seed in range(20)]
    assert all(len(set(each)) == 2 and set(each) <= set(ids) for each in drawn)
    assert len(set(drawn)) > 1
    assert [await draw_sample(database, state, 2, seed) for seed in range(20)] == drawn
    assert await draw_sample(database, state, 9, 1) == tuple(ids)


def test_an_invalid_command_line_is_rejected_with_a_message(env: dict[str, str]) -> None:
    for options, code, sentence in (
        (["--resume"], 2, "no run to continue"),
        (["--resume", "--tenant", "acme"], 2, "cannot be combined"),
        (["--conversation", "conv_x", "--sample", "2"], 2, "not both"),
        (["--no-requests", "--no-answers"], 2, "nothing to compare"),
        (["--conversation", "conv_x"], 66, "no conversation conv_x"),
        (["--tenant", "nobody"], 66, "no tenant called nobody"),
        (["--assistant", "asst_x"], 66, "no assistant"),
        (["--state", "/proc/nowhere/at/all.json"], 74, "cannot be written"),
        (["--json", "/proc/nowhere.json"], 74, "cannot be written"),
    ):
        message = CliRunner().invoke(main, ["replay", "verify", *options], env=env)
        assert message.exit_code == code, (options, message.output)
        assert sentence in " ".join(message.output.split()), options


def test_a_run_is_not_resumed_from_an_unsuitable_file(env: dict[str, str]) -> None:
    file = Path(env["STRATA_DATA_DIR"]) / "replay-verify.json"
    save_state(file, VerifyState(database_mark="", choice=ConversationChoice()))
    whole = json.loads(file.read_text())
    assert load_state(file).place is None
    for text, sentence in (
        ("{", "cannot be read"),
        ("[]", "is damaged"),
        (json.dumps({**whole, "counts": {"calls": 1}}), "is damaged"),
        (json.dumps({name: value for name, value in whole.items() if name != "place"}), "is damaged"),
        (json.dumps({**whole, "release": "0.0.1"}), "another release"),
        (json.dumps({**whole, "database": "tenant_x"}), "another database"),
    ):
        file.write_text(text)
        message = CliRunner().invoke(main, ["replay", "verify", "--resume"], env=env)
        assert message.exit_code == 2, message.output
        assert sentence in " ".join(message.output.split()), text
        assert file.read_text() == text


async def test_a_stopped_run_is_resumed_with_its_counts(
    env: dict[str, str], database: Database, drivers: list[ConversationDriver]
) -> None:
    await flip(database, drivers[0])
    async with database.connection() as connection:
        # As long conversations, each is a separate batch.
        await connection.execute("UPDATE conversations SET next_seq = 1001")
    file = Path(env["STRATA_DATA_DIR"]) / "replay-verify.json"
    third = sorted(driver.conversation_id for driver in drivers)[2]

    def is_there() -> bool:
        return file.exists() and json.loads(file.read_text())["place"] == third

    async with locked(database, "blobs"):
        with StrataProcess("replay", "verify", "--workers", "1", env=env) as process:
            wait_until(is_there, f"{third} to be passed in {process.output}")
            process.send(signal.SIGINT)
            assert process.wait() == 130, process.output
        assert "--resume continues" in process.output
        assert is_there()
        with StrataProcess("replay", "verify", "--resume", "--workers", "1", env=env) as process:
            wait_until(lambda: _has_worker(process), "a worker to begin")
            # The newest is the worker; the other one is the resource tracker of multiprocessing.
            os.kill(_processes_of(process.pid)[-1], signal.SIGKILL)
            assert process.wait() == 70, process.output
        assert "A worker process ended unexpectedly. Use --resume to continue" in process.output
        assert "never retrieved" not in process.output
        assert is_there()
        with StrataProcess("replay", "verify", "--resume", "--workers", "1", env=env) as process:
            wait_until(lambda: _has_worker(process), "a worker to begin")
            process.send(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert is_there()
        # No process of the run is left.
        wait_until(lambda: not _processes_of(process.pid), "its workers to leave")
    report, _ = verify(env, "--resume", "--workers", "1", code=1)
    assert (report["counts"]["conversation_count"], report["counts"]["call_count"]) == (4, 6)
    flipped = [each["conversation_id"] for each in report["mismatches"] if each["position"] == "raw_response"]
    assert flipped == [drivers[0].conversation_id]
    # Beside it, none of the conversations is as long as it says.
    assert report["counts"]["mismatch_count"] == 1 + len(drivers)
    assert not file.exists()


@asynccontextmanager
async def locked(database: Database, table: str) -> AsyncIterator[None]:
    """Block every reader of the table."""
    async with database.transaction() as connection:
        # This connection is idle for longer than the server allows its own transactions.
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


def _has_worker(process: StrataProcess) -> bool:
    """Next to the command and the resource tracker of multiprocessing."""
    processes = _processes_of(process.pid)
    assert processes, process.output
    return len(processes) > 2


def _processes_of(session: int) -> list[int]:
    """The running processes of a session, in the order of their start: pids may be reused."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append((int(fields[19]), int(stat.parent.name)))
    return [process_id for _, process_id in sorted(found)]
