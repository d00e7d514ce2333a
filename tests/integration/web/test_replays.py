"""Replays over HTTP and on the command line: estimated, created, run, read as numbers and as files, stopped, erased."""

import asyncio
import csv
import hashlib
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.conversation.api_key import Scope
from server.conversation.turn import ModelResponseTurn
from server.emulator.reply import Reply
from server.postgres.connections import DatabaseOptions
from server.postgres.inspection.search_index import index_new
from server.providers.choice import GEMINI, KEY_VARIABLES
from server.replay.rerun.source import list_turns
from tests.conftest import StrataServer
from tests.support.conversation_driver import start_driver, text_reply, tool_reply
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import ApiClient, open_api
from tests.support.page_driver import audited, open_operator
from tests.support.replay_driver import arm_again
from tests.support.strata_process import strata_here

REPLAYS = "/admin/api/replays"
REPLAY_ROUTES = (
    *(("GET", f"{REPLAYS}/{{replay_id}}{part}") for part in ("", "/report", "/items", "/results", "/export")),
    ("GET", f"{REPLAYS}/{{replay_id}}/items/{{number}}/conversation"),
    *(
        ("GET", f"{REPLAYS}/{{replay_id}}/items/{{number}}/calls/{{turn_seq}}/{{attempt}}{part}")
        for part in ("", "/request", "/response")
    ),
    *(("POST", f"{REPLAYS}/{{replay_id}}{part}") for part in ("/pause", "/continue", "/cancel")),
    ("DELETE", f"{REPLAYS}/{{replay_id}}"),
)
"""Routes with an id: none of them opens a replay of another tenant."""
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mode": "telepathy"}, "mode"),
    ({"candidate": {"layer_order": 5}}, "candidate.layer_order"),
    ({"limits": {"budget_usd": 0}}, "limits.budget_usd"),
    ({"assertions": [{"name": "x", "expression": "import os"}]}, "assertions.0"),
    ({"selection": {"filters": {"active_after": "2026-01-31T09:30:00"}}}, "selection.filters.active_after"),
    ({"selection": {"filters": {"active_before": "soon"}}}, "selection.filters.active_before"),
    ({"candidat": {}}, "candidat"),
    ({"candidate": {"model": "x/%2e%2e/gemini-3.8-flash"}}, "candidate.model"),
    (
        {"judge": {"provider": "gemini", "model": "%2e%2e/cachedContents#", "prompt": "Is it good?"}},
        "judge.model",
    ),
)
"""Invalid drafts, each with its invalid field."""


@pytest.fixture
async def admin(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server, strata_server.admin_key) as api:
        yield api


async def record(server: StrataServer, emulated: EmulatedProviders, *, times: int = 1) -> str:
    """A conversation of two answers; the providers will give another second answer, this many times."""
    driver = await start_driver(server.program, server.tenant.id, emulated, GEMINI)
    await driver.task("How is Oslo?", text_reply("It is cold."))
    await driver.task("And Rome?", text_reply("It is warm."))
    turns = await list_turns(server.program.store, server.tenant.id, driver.conversation_id)
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    arm_again(emulated, [turn for _ in range(times) for turn in turns], {answers[1].seq: Reply(text="=HOT() there")})
    return driver.conversation_id


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
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient
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
    await look_at_call(admin, f"{url}/items/{worst['item']}", worst)
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


async def test_an_answer_beyond_the_recording_has_its_own_task(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI)
    await driver.task("How is Oslo?", tool_reply("Oslo"), text_reply("It is cold."))
    await driver.task("And Rome?", text_reply("It is warm."))
    emulated[GEMINI].queue_replies(
        tool_reply("Oslo"), tool_reply("Oslo"), text_reply("It is cold."), text_reply("It is warm.")
    )
    asked = body(driver.conversation_id, mode="free_running", limits={}, assertions=[])
    url = f"{REPLAYS}/{(await admin.expect(201, 'POST', REPLAYS, asked))['id']}"
    await strata_server.program.replays.items.run_all(url.rpartition("/")[2])
    results = (await admin.expect(200, "GET", f"{url}/export"))["results"]
    assert [(entry["position"], entry["source_seq"], entry["task"]) for entry in results] == [
        (1, 2, "How is Oslo?"), (2, 4, "How is Oslo?"), (3, None, "How is Oslo?"), (4, 6, "And Rome?"),
    ]  # fmt: skip
    async with open_operator(strata_server.url) as operator:
        await operator.log_in(strata_server.admin_key)
        page = (await operator.get(f"{url.replace('/api', '')}/items/1")).text
        assert "Answer 3, without a recorded answer" in page
        assert "There is no recorded answer." in page
        call = (await operator.get(f"{url.replace('/api', '')}/items/1/calls/6/1")).text
        # The answer of a free-running candidate is its turn, and has the content of its bytes.
        assert "say something else than the stored turn" not in call
        assert "The turn is complete." in call
        for wrong in ("items/0", f"items/{2**40}", "items/1/calls/99/1", "items/1/calls/99/1/request"):
            assert (await operator.get(f"{url.replace('/api', '')}/{wrong}")).status_code == 404, wrong


async def look_at_call(admin: ApiClient, item: str, entry: dict[str, Any]) -> None:
    """The request and the response are stored byte for byte, although the turn of the replay conversation has the
    recorded answer.
    """
    call = f"{item}/calls/{entry['replay_seq']}/{entry['attempt']}"
    found = await admin.expect(200, "GET", call)
    assert (found["request"]["proof"], found["differs_from_turn"]) == ("equal", False)
    assert {"static", "trigger"} <= {layer["layer"] for layer in found["layers"] if layer["tokens"]}
    sent = await admin.ask("GET", f"{call}/request")
    assert hashlib.sha256(sent.content).hexdigest() == found["request"]["stored_hash"]
    assert b'"text": "=HOT() "' in (await admin.ask("GET", f"{call}/response")).content
    went = await admin.expect(200, "GET", f"{item}/conversation?after=2")
    assert [(entry["turn"]["seq"], len(entry["calls"])) for entry in went["turns"]] == [(3, 0), (4, 1)]
    assert "It is warm." in str(went["turns"][1])
    assert (await admin.expect(404, "GET", f"{item}/calls/99/1"))["code"] == "call_not_found"
    for number in ("9", "0", str(2**40)):
        other = item.replace("/items/1", f"/items/{number}")
        assert (await admin.expect(404, "GET", f"{other}/conversation"))["code"] == "replay_not_found"


async def test_a_replay_is_paused_continued_and_cancelled_by_its_tenant_only(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient
) -> None:
    conversation_id = await record(strata_server, emulated)
    url = f"{REPLAYS}/{(await admin.expect(201, 'POST', REPLAYS, body(conversation_id)))['id']}"
    assert (await admin.expect(409, "DELETE", url))["code"] == "replay_busy"
    assert (await admin.expect(200, "POST", f"{url}/pause"))["state"] == "paused"
    waiting = await admin.expect(404, "GET", f"{url}/items/1/conversation")
    assert waiting["code"] == "conversation_not_found"
    longer = {"limits": {"parallelism": 2, "calls_per_minute": 30, "repetitions": 9}}
    await admin.expect(200, "POST", f"{url}/continue", longer)
    assert (await admin.expect(200, "POST", f"{url}/continue"))["draft"]["limits"]["calls_per_minute"] == 30
    # Omitted limits stay: raising the budget does not remove the rate limit.
    going = await admin.expect(200, "POST", f"{url}/continue", {"limits": {"budget_usd": 9.5}})
    limits = going["draft"]["limits"]
    assert (going["state"], float(limits.pop("budget_usd"))) == ("running", 9.5)
    assert limits == {"repetitions": 2, "parallelism": 2, "calls_per_minute": 30, "budget_tokens": None}
    free = await admin.expect(200, "POST", f"{url}/continue", {"limits": {"calls_per_minute": None}})
    assert free["draft"]["limits"]["calls_per_minute"] is None
    assert (await admin.expect(200, "POST", f"{url}/cancel"))["items"]["cancelled"] == 2
    assert (await admin.expect(409, "POST", f"{url}/continue", {}))["code"] == "replay_ended"
    actions = [action for action, _, _ in await audited(strata_server.program.database)]
    assert [action for action in actions if action.startswith("replay")] == [
        "replay.create", "replay.pause", *("replay.continue",) * 4, "replay.cancel",
    ]  # fmt: skip

    other = await strata_server.key_ring.create_tenant("other")
    _, key = await strata_server.key_ring.create_key(
        tenant_id=other.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    async with open_api(strata_server, key) as stranger:
        assert (await stranger.expect(200, "GET", REPLAYS))["data"] == []
        for method, path in REPLAY_ROUTES:
            for tried in (url.rpartition("/")[2], "replay_", "nonsense", "replay_%00"):
                tried_path = path.format(replay_id=tried, number=1, turn_seq=2, attempt=1)
                problem = await stranger.expect(404, method, tried_path)
                assert problem["code"] == "replay_not_found", (method, path, tried)
        assert (await stranger.expect(404, "POST", REPLAYS, body(conversation_id)))["code"] == "conversation_not_found"


async def test_every_field_of_a_draft_can_be_set_over_http(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient
) -> None:
    await record(strata_server, emulated)
    filters = {
        "provider": GEMINI, "state": "complete", "stop_reason": "end_turn", "cost_from": 0, "tokens_to": 10**9,
        "active_after": "2026-01-31T09:30:00Z", "active_before": "2100-01-31T09:30:00+01:00", "text": "Oslo",
    }  # fmt: skip
    await index_new(strata_server.program.database)
    asked = {
        "name": "All",
        "selection": {"filters": filters, "sample_count": 5, "sample_seed": -3},
        "candidate": {"settings": {"thinking": "low"}, "layer_order": "layered", "variables": {"city": "Oslo"}},
        "mode": "free_running",
        "on_missing_result": "synthetic_error",
        "judge": {"provider": GEMINI, "model": "gemini-3-flash-preview", "prompt": "Is it good?"},
        "dry_run": True,
    }
    estimate = await admin.expect(200, "POST", REPLAYS, asked)
    assert (estimate["conversation_count"], estimate["call_count"], estimate["is_rough"]) == (1, 4, True)
    for change, path in WRONG:
        problem = await admin.expect(422, "POST", REPLAYS, {**asked, **change})
        [fault] = problem["errors"]
        assert (fault["path"], fault["source"]) == (path, "body"), fault


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
        """In a thread next to this loop, in which the emulator answers."""
        result = await asyncio.to_thread(strata_here, "replay", *arguments, env=env)
        assert result.returncode == code, result.stderr
        return result.stdout + result.stderr

    assert "2 calls." in await replay("run", *chosen, "--dry-run")
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({"dry_run": True, "assertions": None}))
    assert "2 calls." in await replay("run", *chosen, "--draft", str(draft))
    assert "There are no replays." in await replay("list")
    for wrong, sentence in (
        ('{"assertions": 5}', "assertions"), ('{"selection": []}', "selection"), ("[" * 10**6, "nested"),
        ('{"name": 5}', "name"), ("{", "JSON"), ('{"limits": {"parallelism": 65}}', "limits.parallelism"),
    ):  # fmt: skip
        draft.write_text(wrong)
        output = await replay("run", *chosen, "--draft", str(draft), code=2)
        assert sentence in output and "Traceback" not in output, wrong  # noqa: PT018  reason: the output is the message
    assert "parallelism" in await replay("continue", "replay_x", "--parallelism", "65", code=2)
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
