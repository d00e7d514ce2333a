"""`strata usage`, as a real process on a real database."""

import csv
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from server.conversation.api_key import KeyRing, Tenant
from server.conversation.conversation import ConversationDraft
from server.conversation.usage import Usage
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.support.builders import call_end, call_start, create_assistant, take_exchange
from tests.support.strata_process import strata_here

USAGE = Usage(fresh_input_tokens=500, cache_read_tokens=9_000, cache_write_tokens=500, output_tokens=70)
TODAY = datetime.now(UTC)


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    return {"STRATA_DATABASE_URL": database_options.url, "STRATA_DATA_DIR": str(tmp_path)}


async def spend(
    store: PostgresStore, tenant: Tenant, name: str, *, calls: int = 1, cost: str | None = "0.25", at: datetime = TODAY
) -> tuple[str, str]:
    """Create an assistant of this name, and a conversation with this many calls."""
    assistant = await create_assistant(store, tenant.id, name=name)
    conversation = await store.create_conversation(tenant.id, ConversationDraft(assistant_id=assistant.id))
    for _ in range(calls):
        start = call_start(started_at=at, model="gemini-3.8-flash", cache_expected_tokens=9_500)
        end = call_end(usage=USAGE, cost_usd=None if cost is None else Decimal(cost))
        await take_exchange(store, tenant.id, conversation.id, start=start, end=end)
    return assistant.id, conversation.id


def usage(env: dict[str, str], *options: str) -> str:
    result = strata_here("usage", *options, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def report(env: dict[str, str], *options: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(usage(env, "--json", *options))
    return read


async def test_the_table_shows_usage_by_group_and_the_total(
    env: dict[str, str], store: PostgresStore, tenant: Tenant
) -> None:
    large, _ = await spend(store, tenant, "Large [one]\x1b[31m", calls=3)
    small, _ = await spend(store, tenant, "Small")
    shown = usage(env, "--by", "assistant")
    lines = [line for line in shown.splitlines() if "asst_" in line or "total" in line]
    assert [name in line for name, line in zip((large, small, "total"), lines, strict=True)] == [True] * 3
    assert "Large [one]" in lines[0]
    assert "\x1b" not in shown
    for number in ("3", "1,500", "27,000", "210", "90.0%", "95.0%", "0.7500"):
        assert f" {number} " in lines[0], number
    for number in ("4", "36,000", "1.0000"):
        assert f" {number} " in lines[2], number


async def test_programs_get_json_and_csv(
    env: dict[str, str], store: PostgresStore, tenant: Tenant, key_ring: KeyRing
) -> None:
    _, first = await spend(store, tenant, "=HYPERLINK()", calls=2)
    await spend(store, tenant, "Second", cost=None, at=TODAY - timedelta(days=3))
    await spend(store, await key_ring.create_tenant("other"), "Third")
    everybody = report(env, "--by", "conversation", "--limit", "1")
    assert ([row["key"] for row in everybody["data"]], everybody["complete"]) == ([first], False)
    assert (everybody["total"]["calls"], everybody["total"]["cost_usd"], everybody["total"]["unpriced_calls"]) == (
        4,
        None,
        1,
    )
    ours = report(env, "--tenant", tenant.name, "--from", "2d")
    assert [(row["key"], row["calls"], row["cost_usd"]) for row in ours["data"]] == [(TODAY.date().isoformat(), 2, 0.5)]
    rows = list(csv.DictReader(usage(env, "--by", "assistant", "--csv", "--tenant", tenant.name).splitlines()))
    assert [(row["name"], row["calls"], row["cost_usd"]) for row in rows] == [
        ("'=HYPERLINK()", "2", "0.5"),
        ("Second", "1", ""),
    ]


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--by", "week"], 2, "is not one of"),
        (["--from", "yesterday"], 2, "neither a time such as 2026-11-01 nor a span"),
        (["--from", "2026-01-02", "--to", "2026-01-01"], 2, "before --to"),
        (["--from", "99999w"], 2, "before --to"),
        (["--limit", "0"], 2, "is not in the range"),
        (["--json", "--csv"], 2, "not both"),
        (["--tenant", "nobody"], 66, "There is no tenant called nobody"),
    ],
)
def test_an_impossible_report_is_rejected_with_a_message(
    env: dict[str, str], options: list[str], code: int, sentence: str
) -> None:
    result = strata_here("usage", *options, env=env)
    assert result.returncode == code
    assert sentence in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr
