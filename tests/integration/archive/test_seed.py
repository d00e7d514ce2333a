"""`strata seed`: what it creates can be inspected like real conversations."""

import hashlib
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from server.app.settings import Settings
from server.archive.seed_plan import Happening, plan_id, plan_moment, plan_seed
from server.conversation.identifiers import CONVERSATION, encode_id
from server.inspection.past_payload import rebuild_call
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.support.archive_driver import export_lines, rows_of
from tests.support.emulators import EmulatedProviders
from tests.support.strata_process import strata_here

TURNS = 250


@pytest.fixture
def env(database: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:  # noqa: ARG001  reason: emptied first
    return {"STRATA_DATABASE_URL": database_options.url, "STRATA_DATA_DIR": str(tmp_path)}


def seed(env: dict[str, str], *options: str, code: int = 0) -> str:
    result = strata_here("seed", "--turns", str(TURNS), "--until", "2026-11-01", "--days", "30", *options, env=env)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


async def conversations_of(database: Database, tenant_name: str) -> list[str]:
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT c.id FROM conversations c JOIN tenants t ON t.id = c.tenant_id WHERE t.name = $1 ORDER BY 1",
            tenant_name,
        )
    return [encode_id(CONVERSATION, row["id"]) for row in rows]


async def test_every_request_of_seeded_conversations_can_be_rebuilt(
    env: dict[str, str],
    database: Database,
    store: PostgresStore,
    key_ring: PostgresKeyRing,
    emulated: EmulatedProviders,
    server_settings: Settings,
) -> None:
    output = seed(env, "--tenant", "plenty")
    assert "per second" in output
    tenant = await key_ring.load_tenant("plenty")
    ids = await conversations_of(database, "plenty")
    states, kinds, codes, turn_count, rebuilt = Counter[str](), Counter[str](), Counter[str](), 0, 0
    async with emulated.open(server_settings) as providers:
        for conversation_id in ids:
            page = await store.list_turns(tenant.id, conversation_id, limit=100)
            turn_count += len(page.items)
            for turn in page.items:
                kinds[type(turn).__name__] += 1
                states[getattr(turn, "state", "complete")] += 1
                codes[getattr(turn, "error_code", None) or ""] += 1
                for call in await store.list_calls(tenant.id, conversation_id, turn.seq):
                    source = await store.load_rebuild_source(tenant.id, conversation_id, turn.seq, call.start.attempt)
                    provider = providers.by_name[call.start.provider]
                    body = await provider.encode_request(rebuild_call(source, provider=provider))
                    assert hashlib.sha256(body).digest() == call.start.request_hash
                    assert call.end is not None
                    assert call.end.ended_at > call.start.started_at
                    rebuilt += 1
    assert TURNS <= turn_count < TURNS + 200
    assert rebuilt > TURNS // 3
    assert set(states) == {"complete", "failed", "cancelled"}
    assert set(kinds) == {"UserTaskTurn", "ModelResponseTurn", "ToolResponseTurn"}
    assert {"provider_disconnected", "provider_overloaded", "provider_authentication"} <= set(codes)
    lines = await export_lines(database, tenant.id, ids[0])
    exported = Counter(json.loads(line)["record"] for line in lines)
    assert exported["turn"] == len((await rows_of(database, ids[0]))["turns"])


async def test_they_are_within_the_requested_days_and_leave_other_conversations_unchanged(
    env: dict[str, str], database: Database, store: PostgresStore, key_ring: PostgresKeyRing
) -> None:
    seed(env)
    tenant = await key_ring.load_tenant("seed")
    first = await conversations_of(database, "seed")
    began = [(await store.load_conversation(tenant.id, each)).created_at for each in first]
    until = datetime(2026, 11, 1, tzinfo=UTC)
    copies = [moment for moment in began if moment < until]
    assert len(copies) > len(began) // 3
    assert min(copies) >= until - timedelta(days=30)
    # The conversations that were really held are of today.
    assert all(datetime.now(UTC) - moment < timedelta(hours=1) for moment in began if moment >= until)

    assert "tenant_not_empty" in seed(env, code=65)
    assert await conversations_of(database, "seed") == first
    seed(env, "--force")
    assert set(await conversations_of(database, "seed")) > set(first)


def test_the_plan_depends_on_the_seed() -> None:
    def draw(seed: int) -> object:
        random = Random(seed)  # noqa: S311  reason: it has to be predictable
        moment = plan_moment(random, datetime(2026, 1, 1, tzinfo=UTC), 90)
        return plan_seed(random, 5_000), moment, plan_id(random, moment)

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_even_a_small_sample_has_every_kind_of_event() -> None:
    plan = plan_seed(Random(1), 10)  # noqa: S311  reason: it has to be predictable
    assert {exchange.happening for exchange in plan.sample[0].exchanges} == set(Happening)
