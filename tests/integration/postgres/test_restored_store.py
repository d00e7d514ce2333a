"""A store that an earlier release has written: restored from a dump, migrated, verified, shown, moved and continued.

`tests/fixtures/store_before_rooms/README.md` describes the content of the dump.
"""

import gzip
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.caching.expectation import MissReason
from server.conversation.audit import Action, Outcome
from server.conversation.epoch import EpochReason
from server.conversation.errors import ProviderRejected, ValidationFailed, every_error
from server.conversation.identifiers import CONVERSATION, encode_id
from server.conversation.turn import StopReason, TurnState
from server.inspection.call_explanation import explain_error, explain_repair, explain_template, explain_warning
from server.payload.signatures import WithheldReason
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import find_drift, migrate_down_one, migrate_up, read_schema_state
from server.replay.rerun.result import Outcome as ReplayOutcome
from tests.support.database_source import with_database
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import ApiClient, turns
from tests.support.page_driver import PAGES, open_operator
from tests.support.strata_process import strata, strata_here

FIXTURE = Path(__file__).parents[2] / "fixtures" / "store_before_rooms"
NOWHERE = "http://127.0.0.1:9"
ALL_CALLS = "SELECT conversation_id, turn_seq, attempt FROM calls ORDER BY 1, 2, 3"

# By the names of the columns in the dump.
STORED_WORDS = {
    "epochs.reason": "SELECT reason FROM epochs",
    "calls.warnings": "SELECT note->>'kind' FROM calls, jsonb_array_elements(warnings::jsonb) note",
    "calls.warnings signatures_withheld": (
        "SELECT note->>'reason' FROM calls, jsonb_array_elements(warnings::jsonb) note "
        "WHERE note->>'kind' = 'signatures_withheld'"
    ),
    "calls.repairs": "SELECT note->>'kind' FROM calls, jsonb_array_elements(repairs::jsonb) note",
    "calls.template_failures": "SELECT note->>'kind' FROM calls, jsonb_array_elements(template_failures::jsonb) note",
    "calls.cache_miss_reason": "SELECT cache_miss_reason FROM calls",
    "calls.error_code": "SELECT error_code FROM calls",
    "calls.manifest": "SELECT entry->>'kind' FROM calls, jsonb_array_elements(manifest::jsonb) entry",
    "turns.error_code": "SELECT error_code FROM turns",
    "turns.state": "SELECT state FROM turns",
    "turns.stop_reason": "SELECT stop_reason FROM turns",
    "audit_log.action": "SELECT action || ' ' || outcome FROM audit_log",
    "replay.calls.warnings": "SELECT note->>'kind' FROM replay.calls, jsonb_array_elements(warnings::jsonb) note",
    "replay.calls.error_code": "SELECT error_code FROM replay.calls",
    "replay.epochs.reason": "SELECT reason FROM replay.epochs",
    "replay_results.outcome": "SELECT outcome FROM replay_results",
    "replay_items.state": "SELECT state || coalesce(' ' || error_code, '') FROM replay_items",
    "pgqueuer.entrypoint": "SELECT entrypoint || ' ' || status FROM pgqueuer",
}
# By the names of the columns in this release: a statement that differs replaces the one above.
MIGRATED_WORDS = STORED_WORDS | {
    "codes in calls.warnings": (
        "SELECT note->>'code' FROM (SELECT warnings FROM calls UNION ALL SELECT warnings FROM replay.calls) AS noted, "
        "jsonb_array_elements(warnings::jsonb) note"
    ),
    "codes in conversation_facts.error_codes": "SELECT unnest(error_codes) FROM conversation_facts",
    "codes in conversation_facts.labels": (
        "SELECT substr(label, 7) FROM conversation_facts, unnest(labels) AS label WHERE label LIKE 'error:%'"
    ),
    "codes in audit_log.details": "SELECT details->>'code' FROM audit_log",
}
UNEXPLAINED = {
    "answer_unstorable",
    "container",
    "continuation",
    "dynamic_postponed",
    "request_resent",
    "server_call_dropped",
}
"""Notes of calls that have no sentence on a page."""
RENAMED = {
    "opening",
    "opening_rejected",
    "opening_set_down",
    "provider_cut",
    "shadow_id",
    "shadow_seq",
    "ttl_passed",
    "was_reaped",
}
"""Words of the dumped store that no value may contain after the migration."""
FREE_TEXTS = {"native", "dynamic", "raw_response", "data", "blocks", "text", "tsv", "excerpt"}
"""Columns with the texts of clients, models and templates."""
REFUSED = {"profile_assumed": ProviderRejected.code, "settings_refused": ValidationFailed.code}
"""Conversations that cannot continue: the emulators do not have the model, or it does not support the order of the
layers.
"""


@pytest.fixture(scope="module")
def contents() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURE / "contents.json").read_text())
    return found


@pytest.fixture(scope="module")
async def dumped(server_url: str, worker_id: str) -> AsyncIterator[str]:
    """The name of a database with the dump in it, to which nothing else connects."""
    name = f"strata_dumped_{worker_id}"
    async with _created(server_url, name):
        connection = await asyncpg.connect(with_database(server_url, name))
        try:
            await connection.execute(gzip.decompress((FIXTURE / "dump.sql.gz").read_bytes()).decode())
        finally:
            await connection.close()
        yield name


@pytest.fixture
async def restored(server_url: str, worker_id: str, dumped: str) -> AsyncIterator[DatabaseOptions]:
    """A database as it was dumped."""
    name = f"strata_restored_{worker_id}"
    async with _created(server_url, name, template=dumped):
        yield DatabaseOptions(url=with_database(server_url, name))


@pytest.fixture
async def migrated(restored: DatabaseOptions) -> DatabaseOptions:
    """The same database at the revision of this release."""
    await migrate_up(restored)
    return restored


@pytest.fixture
async def empty(server_url: str, worker_id: str, contents: Mapping[str, Any]) -> AsyncIterator[DatabaseOptions]:
    """A database of this release with the same tenants and nothing else."""
    name = f"strata_imported_{worker_id}"
    async with _created(server_url, name):
        options = DatabaseOptions(url=with_database(server_url, name))
        await migrate_up(options)
        database = Database(options)
        for tenant in contents["tenants"]:
            await PostgresKeyRing(database).create_tenant(tenant)
        await database.close()
        yield options


@asynccontextmanager
async def _created(server_url: str, name: str, template: str = "template1") -> AsyncIterator[None]:
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        yield
        await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    finally:
        await connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server on the migrated store."""

    program: Program
    client: httpx2.AsyncClient
    contents: Mapping[str, Any]

    def api_of(self, key: str) -> ApiClient:
        """A client with the named key of the dump."""
        return ApiClient(client=self.client, key=self.contents["keys"][key])

    def client_of(self, conversation_id: str) -> ApiClient:
        """A client with the key of the conversation's tenant."""
        found = self.contents["conversations"]
        others = (*found["other_tenant"], *found["imported"])
        return self.api_of("other_client" if conversation_id in others else "client")


@pytest.fixture
async def served(
    migrated: DatabaseOptions, emulated: EmulatedProviders, contents: Mapping[str, Any], tmp_path: Path
) -> AsyncIterator[Served]:
    settings = Settings(
        database_url=SecretStr(migrated.url), data_dir=tmp_path, port=0, shutdown_limit_seconds=5, worker_inside=False
    )
    async with (
        emulated.open(settings) as providers,
        open_program(emulated.point(settings), providers=providers) as program,
        serving(program, bind("127.0.0.1", 0)) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield Served(program=program, client=client, contents=contents)


async def fetch(options: DatabaseOptions, sql: str, *values: object) -> list[Any]:
    connection = await asyncpg.connect(options.url)
    try:
        return list(await connection.fetch(sql, *values))
    finally:
        await connection.close()


async def count_words(options: DatabaseOptions, sql: str) -> dict[str, int]:
    rows = await fetch(options, f"SELECT word, count(*) FROM ({sql}) AS found (word) WHERE word <> '' GROUP BY 1")  # noqa: S608  reason: our own
    return {row["word"]: row["count"] for row in rows}


async def count_rows(options: DatabaseOptions, table: str) -> int:
    [row] = await fetch(options, f"SELECT count(*) FROM {table}")  # noqa: S608  reason: our own names
    return int(row["count"])


def verify(options: DatabaseOptions, directory: Path, *arguments: str, code: int = 0) -> dict[str, int]:
    """The counts of `strata replay verify` in a database, without any key and with unreachable providers."""
    report = directory / "report.json"
    env = {
        "STRATA_DATABASE_URL": options.url,
        "STRATA_DATA_DIR": str(directory),
        "STRATA_GEMINI_BASE_URL": NOWHERE,
        "STRATA_ANTHROPIC_BASE_URL": NOWHERE,
    }
    done = strata("replay", "verify", "--workers", "2", "--json", str(report), *arguments, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    counts: dict[str, int] = json.loads(report.read_text())["counts"]
    return counts


def run(options: DatabaseOptions, directory: Path, *arguments: str) -> str:
    env = {"STRATA_DATABASE_URL": options.url, "STRATA_DATA_DIR": str(directory)}
    done = strata_here(*arguments, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def every_conversation(contents: Mapping[str, Any]) -> list[str]:
    return sorted({each for ids in contents["conversations"].values() for each in ids})


async def test_the_dump_contains_what_its_list_states(restored: DatabaseOptions, contents: Mapping[str, Any]) -> None:
    state = await read_schema_state(restored)
    assert (state.current, state.known) == (contents["revision"], True)
    assert {table: await count_rows(restored, table) for table in contents["rows"]} == contents["rows"]
    assert {name: await count_words(restored, sql) for name, sql in STORED_WORDS.items()} == contents["words"]
    rows = await fetch(restored, "SELECT id FROM conversations ORDER BY id")
    assert [encode_id(CONVERSATION, row["id"]) for row in rows] == every_conversation(contents)


async def test_a_store_that_was_migrated_and_partitioned_is_verified_as_well(
    migrated: DatabaseOptions, contents: Mapping[str, Any], tmp_path: Path
) -> None:
    assert "Partitioned: turns, calls, call_chunks." in run(migrated, tmp_path, "migrate", "partition", "--count", "4")
    assert "partitioned already" in run(migrated, tmp_path, "migrate", "partition")
    assert "no copy to remove" in run(migrated, tmp_path, "migrate", "partition", "--abandon")
    assert await find_drift(migrated) == []
    counts = verify(migrated, tmp_path)
    assert counts["mismatch_count"] == 0
    assert {name: counts[name] for name in contents["verified"]} == contents["verified"]
    for table in ("turns", "calls"):
        assert await count_rows(migrated, table) == contents["rows"][table], table


async def test_a_migrated_store_is_verified_to_the_last_call(
    restored: DatabaseOptions, contents: Mapping[str, Any], tmp_path: Path
) -> None:
    run(restored, tmp_path, "migrate", "up")
    assert (await read_schema_state(restored)).pending == ()
    assert await find_drift(restored) == []
    counts = verify(restored, tmp_path)
    assert counts["mismatch_count"] == 0
    assert {name: counts[name] for name in contents["verified"]} == contents["verified"]
    for table in ("conversations", "turns", "calls", "epochs", "segments"):
        assert await count_rows(restored, table) == contents["rows"][table], table

    # Every call is verified: one changed byte is found.
    [row] = await fetch(
        restored,
        """UPDATE calls SET raw_response = set_byte(raw_response, 30, 255 - get_byte(raw_response, 30))
        WHERE (conversation_id, turn_seq, attempt) =
            (SELECT conversation_id, turn_seq, attempt FROM calls WHERE length(raw_response) > 100 LIMIT 1)
        RETURNING conversation_id""",
    )
    damaged = encode_id(CONVERSATION, row["conversation_id"])
    assert verify(restored, tmp_path, "--conversation", damaged, code=1)["mismatch_count"] >= 1


async def test_every_stored_word_is_one_of_this_release(migrated: DatabaseOptions) -> None:
    """A change that renames a word has to rename it in what is stored."""
    words = {name: set(await count_words(migrated, sql)) for name, sql in MIGRATED_WORDS.items()}
    assert all(words.values())
    codes = {error.code for error in every_error()}
    vocabulary: dict[str, set[str]] = {
        "epochs.reason": set(EpochReason),
        "replay.epochs.reason": set(EpochReason),
        "calls.warnings signatures_withheld": set(WithheldReason),
        # Claude reports its own reason.
        "calls.cache_miss_reason": {*MissReason, "previous_message_not_found"},
        "calls.error_code": codes,
        "turns.error_code": codes,
        "turns.state": set(TurnState),
        "turns.stop_reason": set(StopReason),
        "audit_log.action": {f"{action} {outcome}" for action in Action for outcome in Outcome},
        "replay_results.outcome": set(ReplayOutcome),
        **{name: codes for name in words if name.startswith("codes in ")},
    }
    for name, known in vocabulary.items():
        assert words[name] - known == set(), name
    # Not all codes of replayed calls are errors of the server.
    assert all(explain_error(code).message for code in words["replay.calls.error_code"])
    note = {"reason": str(WithheldReason.REJECTED), "estimated_input_tokens": 1}
    kinds = words["calls.warnings"] | words["replay.calls.warnings"]
    assert {kind for kind in kinds if not explain_warning({"kind": kind, **note})} <= UNEXPLAINED
    assert {kind for kind in words["calls.repairs"] if not explain_repair({"kind": kind})} <= UNEXPLAINED
    assert all(explain_template({"kind": kind}) for kind in words["calls.template_failures"])


async def test_no_value_or_name_contains_a_renamed_word(migrated: DatabaseOptions) -> None:
    columns = await fetch(
        migrated,
        """SELECT table_schema, table_name, column_name FROM information_schema.columns
        WHERE table_schema IN ('public', 'replay')""",
    )
    assert {row["column_name"] for row in columns} & RENAMED == set()
    word = rf"\m({'|'.join(RENAMED)})\M"
    for schema, table, column in columns:
        if column not in FREE_TEXTS:
            found = await fetch(
                migrated,
                f'SELECT "{column}"::text FROM {schema}.{table} WHERE "{column}"::text ~ $1 LIMIT 1',  # noqa: S608  reason: names of the catalogue
                word,
            )
            assert found == [], f"{schema}.{table}.{column}"


async def test_flags_filters_and_labels_keep_their_meaning(restored: DatabaseOptions) -> None:
    """The dump has interrupted turns and lost connections; a saved view and a replay that select by them, and
    entries of the audit log about them, are added to it.
    """
    flagged = "SELECT conversation_id FROM conversation_facts WHERE {} ORDER BY 1"
    before = await fetch(restored, flagged.format("was_reaped"))
    assert before
    failed = await fetch(restored, flagged.format("labels @> '{error:provider_cut}'"))
    assert failed
    await fetch(
        restored,
        """UPDATE saved_views SET filters = filters || '{"was_reaped": "true", "error_code": "provider_cut"}'""",
    )
    await fetch(
        restored,
        """UPDATE audit_log SET details = '{"filters": ["model", "was_reaped"], "code": "opening_rejected"}'
        WHERE action = 'login'""",
    )
    draft = (
        '{"name": "was_reaped and \\"error_code\\": \\"provider_cut\\"", '
        '"selection": {"filters": {"was_reaped": true, "error_code": "provider_cut"}}}'
    )
    await fetch(restored, "UPDATE replays SET draft = $1", draft)
    await migrate_up(restored)
    assert await fetch(restored, flagged.format("was_recovered")) == before
    assert await fetch(restored, flagged.format("labels @> '{has:was_recovered}'")) == before
    assert await fetch(restored, flagged.format("labels @> '{error:provider_disconnected}'")) == failed
    views = await fetch(
        restored, "SELECT filters->>'was_recovered' AS flag, filters->>'error_code' AS code FROM saved_views"
    )
    assert {(row["flag"], row["code"]) for row in views} == {("true", "provider_disconnected")}
    [entry] = await fetch(restored, "SELECT DISTINCT details FROM audit_log WHERE action = 'login'")
    assert json.loads(entry["details"]) == {"filters": ["model", "was_recovered"], "code": "summary_rejected"}
    [stored] = await fetch(restored, "SELECT DISTINCT draft::text AS draft FROM replays")
    # The name of a replay is free text.
    expected = json.loads(draft)
    expected["selection"]["filters"] = {"was_recovered": True, "error_code": "provider_disconnected"}
    assert json.loads(stored["draft"]) == expected


async def test_results_and_notes_of_judges_have_positions(restored: DatabaseOptions) -> None:
    results = "SELECT replay_id, number, {} AS position FROM replay_results ORDER BY 1, 2, 3"
    notes = """SELECT conversation_id, turn_seq, attempt, note->>'{}' AS position, note->>'question' AS question
    FROM replay.calls, jsonb_array_elements(warnings) AS note WHERE note->>'kind' = 'judge' ORDER BY 1, 2, 3"""
    before = [await fetch(restored, sql.format("place")) for sql in (results, notes)]
    assert all(row["position"] is not None for rows in before for row in rows)
    await migrate_up(restored)
    assert [await fetch(restored, sql.format("position")) for sql in (results, notes)] == before
    assert {row["position"] for row in await fetch(restored, notes.format("place"))} == {None}
    while (await read_schema_state(restored)).current != "20261118_30":
        await migrate_down_one(restored)
    assert [await fetch(restored, sql.format("place")) for sql in (results, notes)] == before


async def test_every_conversation_call_and_replay_is_shown(
    served: Served, migrated: DatabaseOptions, contents: Mapping[str, Any]
) -> None:
    api = served.api_of("superadmin")
    calls = [
        (encode_id(CONVERSATION, row["conversation_id"]), row["turn_seq"], row["attempt"])
        for row in await fetch(migrated, ALL_CALLS)
    ]
    assert len(calls) == contents["rows"]["calls"]
    async with open_operator(str(served.client.base_url)) as operator:
        await operator.log_in(contents["keys"]["superadmin"])

        async def page(path: str) -> str:
            answer = await operator.get(path)
            assert answer.status_code == 200, (path, answer.text)
            return answer.text

        for path in PAGES:
            await page(path)
        for conversation_id in every_conversation(contents):
            await api.expect(200, "GET", f"/admin/api/conversations/{conversation_id}")
            assert conversation_id in await page(f"/admin/conversations/{conversation_id}")
            api_of = served.client_of(conversation_id)
            shown = await api_of.expect(200, "GET", f"/v1/conversations/{conversation_id}")
            assert shown["id"] == conversation_id
        for conversation_id, turn_seq, attempt in calls:
            path = f"conversations/{conversation_id}/calls/{turn_seq}/{attempt}"
            shown = await api.expect(200, "GET", f"/admin/api/{path}")
            assert (shown["turn_seq"], shown["attempt"]) == (turn_seq, attempt)
            await page(f"/admin/{path}")
        for name, replay in contents["replays"].items():
            path = f"replays/{replay['id']}"
            shown = await api.expect(200, "GET", f"/admin/api/{path}")
            assert shown["state"] == replay["state"], name
            report = await api.expect(200, "GET", f"/admin/api/{path}/report")
            assert report["result_count"] == replay["results"], name
            results = (await api.expect(200, "GET", f"/admin/api/{path}/results"))["data"]
            assert len(results) == replay["results"], name
            items = (await api.expect(200, "GET", f"/admin/api/{path}/items"))["data"]
            for item_page in ("", "/items", *(f"/items/{item['number']}" for item in items)):
                await page(f"/admin/{path}{item_page}")


async def test_every_conversation_continues_and_moves_to_an_empty_store(
    served: Served, migrated: DatabaseOptions, empty: DatabaseOptions, contents: Mapping[str, Any], tmp_path: Path
) -> None:
    ids = every_conversation(contents)
    refused = {each: code for name, code in REFUSED.items() for each in contents["conversations"][name]}
    for conversation_id in ids:
        body = {"input": "And now?", "abandon_pending_calls": True}
        answer = await served.client_of(conversation_id).ask("POST", turns(conversation_id), body)
        result = answer.json()
        ended = result["turn"]["state"] if answer.status_code == 200 else result["code"]
        assert ended == refused.get(conversation_id, "complete"), (conversation_id, result)

    proven = verify(migrated, tmp_path)
    assert proven["mismatch_count"] == 0
    assert proven["conversation_count"] == len(ids)
    # A turn with invalid settings makes no call. A rejected signature costs a second one: the emulators have signed
    # all answers but those of the resent requests, which are recordings.
    found = contents["conversations"]
    made = len(ids) - len(found["settings_refused"]) + len(found["request_resent"])
    assert proven["call_count"] == contents["verified"]["call_count"] + made

    for tenant in contents["tenants"]:
        file = str(tmp_path / f"{tenant}.jsonl.zst")
        run(migrated, tmp_path, "export", "--all", "--tenant", tenant, "-o", file)
        run(empty, tmp_path, "import", file, "--tenant", tenant)
    assert verify(empty, tmp_path) == proven
    for table in ("conversations", "turns", "calls", "epochs", "segments"):
        assert await count_rows(empty, table) == await count_rows(migrated, table), table


async def test_queued_and_paused_work_is_finished(
    served: Served, migrated: DatabaseOptions, contents: Mapping[str, Any]
) -> None:
    queued = await fetch(migrated, "SELECT DISTINCT entrypoint FROM pgqueuer")
    assert {row["entrypoint"] for row in queued} <= {job.name for job in served.program.jobs}
    assert queued
    api = served.api_of("admin")
    for name in ("queued", "paused"):
        replay = f"/admin/api/replays/{contents['replays'][name]['id']}"
        if name == "paused":
            await api.expect(200, "POST", f"{replay}/continue", {})
        await served.program.replays.items.run_all(contents["replays"][name]["id"])
        done = await api.expect(200, "GET", replay)
        assert (done["state"], done["items"]["done"]) == ("done", done["item_count"])
        assert (await api.expect(200, "GET", f"{replay}/report"))["result_count"] > 0
