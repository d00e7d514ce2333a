"""Replays over HTTP and on the command line: estimated, made, run, read as numbers and as files, stopped, erased."""

import asyncio
import csv
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.api_key import Scope
from server.emulator.reply import Reply
from server.postgres.connecting import DatabaseOptions
from server.provider_choice import GEMINI, KEY_VARIABLES
from server.replay_source import list_turns
from server.turn import ModelResponseTurn
from tests.conftest import StrataServer
from tests.emulated import EmulatedProviders
from tests.http_talk import Talk, open_talk
from tests.page_talk import audited
from tests.replay_talk import arm_again
from tests.strata_process import strata
from tests.turn_walk import begin_walk, tells

REPLAYS = "/admin/api/replays"
REPLAY_ROUTES = (
    *(("GET", f"{REPLAYS}/{{replay_id}}{part}") for part in ("", "/report", "/items", "/results", "/export")),
    *(("POST", f"{REPLAYS}/{{replay_id}}{part}") for part in ("/pause", "/continue", "/cancel")),
    ("DELETE", f"{REPLAYS}/{{replay_id}}"),
)
"""Those with an id: none of them opens another tenant's replay."""


@pytest.fixture
async def admin(strata_server: StrataServer) -> AsyncIterator[Talk]:
    async with open_talk(strata_server, strata_server.admin_key) as talk:
        yield talk


async def record(server: StrataServer, emulated: EmulatedProviders, *, times: int = 1) -> str:
    """A conversation of two answers, of which the providers will say the second otherwise, so many times."""
    walk = await begin_walk(server.program, server.tenant.id, emulated, GEMINI)
    await walk.task("How is Oslo?", tells("It is cold."))
    await walk.task("And Rome?", tells("It is warm."))
    turns = await list_turns(server.program.store, server.tenant.id, walk.conversation_id)
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    arm_again(emulated, [turn for _ in range(times) for turn in turns], {answers[1].seq: Reply(text="=HOT() there")})
    return walk.conversation_id


def body(conversation_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "Nightly",
        "selection": {"conversation_ids": [conversation_id]},
        "limits": {"repetitions": 2, "budget_usd": 1.0},
        "assertions": [
            {"name": "warm", "expression": "'warm' in text"},
            {"name": "short", "expression": "len(text)<99"},
        ],
        **changes,
    }


async def test_a_replay_from_its_estimate_to_its_report(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: Talk
) -> None:
    conversation_id = await record(strata_server, emulated, times=2)
    estimate = await admin.expect(200, "POST", REPLAYS, body(conversation_id, dry_run=True))
    assert (estimate["item_count"], estimate["call_count"], estimate["is_rough"]) == (2, 4, False)
    assert (await admin.expect(200, "GET", REPLAYS))["data"] == []

    made = await admin.expect(201, "POST", REPLAYS, body(conversation_id))
    url = f"{REPLAYS}/{made['id']}"
    assert (made["state"], made["item_count"]) == ("running", 2)
    await strata_server.program.replays.items.run_all(made["id"])
    done = await admin.expect(200, "GET", url)
    assert (done["state"], done["items"]["done"]) == ("done", 2)

    report = await admin.expect(200, "GET", f"{url}/report")
    assert (report["result_count"], report["same_share"], report["kinds"]["text"]) == (4, 0.5, 2)
    assert report["assertions"] == [
        {"name": "warm", "passed": 0, "failed": 4},
        {"name": "short", "passed": 4, "failed": 0},
    ]
    measured = {measure["measure"]: measure for measure in report["measures"]}
    assert measured["similarity"]["candidate"]["count"] == 4
    assert measured["similarity"]["candidate"]["interval"]["low"] == measured["similarity"]["candidate"]["mean"]
    assert sum(measured["input_tokens"]["recorded"]["bins"]) == 4

    [worst, *_] = (await admin.expect(200, "GET", f"{url}/results?order=worst&limit=1"))["data"]
    assert (worst["outcome"], worst["source_seq"], worst["item"]) == ("different", 4, 1)
    assert len((await admin.expect(200, "GET", f"{url}/results?item=2&outcome=same"))["data"]) == 1
    assert [item["diverged_at_seq"] for item in (await admin.expect(200, "GET", f"{url}/items"))["data"]] == [4, 4]
    exported = await admin.expect(200, "GET", f"{url}/export")
    assert exported["results"][1]["candidate_answer"]["text"] == "=HOT() there"
    assert exported["results"][1]["task"] == "And Rome?"
    rows = list(csv.DictReader(io.StringIO((await admin.ask("GET", f"{url}/export?format=csv")).text)))
    assert [row["candidate_text"] for row in rows] == ["It is cold.", "'=HOT() there"] * 2
    tests = (await admin.ask("GET", f"{url}/export?format=promptfoo")).text.splitlines()
    assert [line[:3] for line in tests[1:]] == ["- {", "- {"]

    assert (await admin.expect(200, "DELETE", f"{url}?dry_run=true"))["rows"]["replay_results"] == 4
    await admin.expect(200, "DELETE", url)
    assert (await admin.expect(404, "GET", url))["code"] == "replay_not_found"


async def test_a_replay_is_paused_continued_cancelled_and_nobody_elses(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: Talk
) -> None:
    conversation_id = await record(strata_server, emulated)
    url = f"{REPLAYS}/{(await admin.expect(201, 'POST', REPLAYS, body(conversation_id)))['id']}"
    assert (await admin.expect(409, "DELETE", url))["code"] == "replay_busy"
    assert (await admin.expect(200, "POST", f"{url}/pause"))["state"] == "paused"
    longer = {"limits": {"parallelism": 2, "budget_usd": 9.5}}
    going = await admin.expect(200, "POST", f"{url}/continue", longer)
    assert (going["state"], float(going["draft"]["limits"]["budget_usd"])) == ("running", 9.5)
    assert (await admin.expect(200, "POST", f"{url}/cancel"))["items"]["cancelled"] == 2
    assert (await admin.expect(409, "POST", f"{url}/continue", {}))["code"] == "replay_ended"
    actions = [action for action, _, _ in await audited(strata_server.program.database)]
    assert [action for action in actions if action.startswith("replay")] == [
        "replay.create", "replay.pause", "replay.continue", "replay.cancel",
    ]  # fmt: skip

    other = await strata_server.key_ring.create_tenant("other")
    _, key = await strata_server.key_ring.create_key(
        tenant_id=other.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    async with open_talk(strata_server, key) as stranger:
        assert (await stranger.expect(200, "GET", REPLAYS))["data"] == []
        for method, path in REPLAY_ROUTES:
            sent: dict[str, Any] | None = {} if path.endswith("/continue") else None
            for tried in (url.rpartition("/")[2], "replay_", "nonsense", "replay_%00"):
                problem = await stranger.expect(404, method, path.format(replay_id=tried), sent)
                assert problem["code"] == "replay_not_found", (method, path, tried)
        assert (await stranger.expect(404, "POST", REPLAYS, body(conversation_id)))["code"] == "conversation_not_found"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"mode": "telepathy"}, "mode"),
        ({"limits": {"budget_usd": 0}}, "limits.budget_usd"),
        ({"assertions": [{"name": "x", "expression": "import os"}]}, "assertions.0.expression"),
        ({"selection": {"filters": {"active_after": "2026-01-31T09:30:00"}}}, "selection.filters.active_after"),
        ({"candidat": {}}, "candidat"),
    ],
)
async def test_what_cannot_be_run_is_refused_with_its_field(admin: Talk, change: dict[str, Any], path: str) -> None:
    problem = await admin.expect(422, "POST", REPLAYS, body("conv_x", **change))
    assert path.startswith(problem["errors"][0]["path"].removesuffix(".expression"))


async def test_the_command_runs_a_replay_and_fails_with_its_assertions(
    strata_server: StrataServer, emulated: EmulatedProviders, database_options: DatabaseOptions, tmp_path: Path
) -> None:
    chosen = ("--conversation", await record(strata_server, emulated, times=2))
    env = {
        "STRATA_DATABASE_URL": database_options.url,
        "STRATA_DATA_DIR": str(tmp_path),
        "STRATA_GEMINI_BASE_URL": emulated[GEMINI].url,
        KEY_VARIABLES[GEMINI][0]: "test",
    }

    async def replay(*arguments: str, code: int = 0) -> str:
        """Beside this loop, in which the emulator answers."""
        result = await asyncio.to_thread(strata, "replay", *arguments, env=env)
        assert result.returncode == code, result.stderr
        return result.stdout + result.stderr

    assert "2 calls." in await replay("run", *chosen, "--dry-run")
    assert "NAME=VALUE" in await replay("run", *chosen, "--setting", "x", code=2)
    ran = await replay("run", *chosen, "--here", "--assert", "'warm' in text", "--name", "Hot?", code=1)
    assert "1 same, 1 different" in ran
    assert "assert 'warm' in text: 0 passed, 2 failed" in ran
    found = re.search(r"replay_\w+", ran)
    assert found is not None
    assert "Hot?" in await replay("list")
    assert (await replay("report", found[0], "--format", "csv", code=1)).count("'=HOT() there") == 1
    assert "replays: 1" in await replay("delete", found[0], "--yes")
    await replay("show", found[0], code=66)
