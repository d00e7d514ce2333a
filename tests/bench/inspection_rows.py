"""How many rows, pages of the database and queries a list, a search, a timeline and an overview need.

    python -m tests.bench.inspection_rows --url postgresql://... [--tenant tenant_...]

Reads any database, the larger the better, and changes nothing in it: what to look for is drawn from what is there. Each
statement is run once more under EXPLAIN (ANALYZE, BUFFERS). Rows are those that scans have looked at, whether they
passed or not, entries of bitmaps among them; pages are those of 8 KiB that were touched, cached or not. They must not
grow with the tables: `tests/integration/inspection/test_rows.py` compares them at two sizes.
"""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from asyncpg import Record

from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.inspection.conversation_list import InspectedState, InspectionFilter
from server.inspection.overview import OverviewBy
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database, Statement
from server.postgres.inspection.inspector import PostgresInspector

SAMPLE = 2000
_NOT_TABLES = frozenset({"CTE Scan", "Subquery Scan", "Function Scan", "Values Scan", "WorkTable Scan"})
_SAMPLED_WORDS = """
SELECT word, ndoc FROM ts_stat(format('SELECT tsv FROM turn_texts WHERE tenant_id = %L LIMIT {sample}', $1::uuid))
WHERE word ~ '^[a-z]{{3,}}$' ORDER BY ndoc DESC, word
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a page needs."""

    queries: int
    rows: int
    pages: int
    shown: int
    """How many items it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is looked for: things that are there, frequent and rare."""

    conversation_id: str
    """With the most turns of a sample."""
    last_seq: int
    newest_at: datetime
    filters: Mapping[str, InspectionFilter]


class WatchedDatabase(Database):
    """A database that notes what its statements read."""

    def __init__(self, options: DatabaseOptions) -> None:
        super().__init__(options)
        self.queries = self.rows = self.pages = 0
        self._is_watching = False

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: Any) -> list[Record]:
        self.queries += 1
        # Whatever is written here would be written twice.
        if self._is_watching and not statement.sql.lstrip().startswith("EXPLAIN"):
            async with self.connection() as connection:
                explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement.sql}"
                plan = json.loads(await connection.fetchval(explain, *statement.arguments(values)))[0]["Plan"]
            self.rows += count_rows(plan)
            self.pages += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return await super().run(statement, repeatable=repeatable, **values)

    async def watch(self, page: Awaitable[int]) -> Reading:
        """What a page needs, which says how many items it has."""
        self.queries = self.rows = self.pages = 0
        self._is_watching = True
        try:
            shown = await page
        finally:
            self._is_watching = False
        return Reading(queries=self.queries, rows=self.rows, pages=self.pages, shown=shown)


def count_rows(plan: Mapping[str, Any]) -> int:
    """The rows that a plan's scans have looked at."""
    rows = sum(count_rows(below) for below in plan.get("Plans", ()))
    kind = plan["Node Type"]
    if "Scan" not in kind or kind in _NOT_TABLES:
        return rows
    looked_at = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    return rows + int(plan["Actual Loops"] * sum(plan.get(name, 0) for name in looked_at))


async def draw_wanted(database: Database, tenant_id: str) -> Wanted:
    """What there is to look for in a tenant's conversations."""
    tenant = decode_id(TENANT, tenant_id)
    async with database.connection() as connection:
        facts = await connection.fetch(
            "SELECT * FROM conversation_facts WHERE tenant_id = $1 ORDER BY last_activity_at DESC LIMIT $2",
            tenant,
            SAMPLE,
        )
        words = [row["word"] for row in await connection.fetch(_SAMPLED_WORDS.format(sample=SAMPLE), tenant)]
        texts = await connection.fetchval(
            "SELECT text FROM turn_texts WHERE tenant_id = $1 AND text ~ '^\\w+ \\w+ \\w+' LIMIT 1", tenant
        )
    longest = max(facts, key=lambda row: row["turn_count"])
    return Wanted(
        conversation_id=encode_id(CONVERSATION, longest["conversation_id"]),
        last_seq=longest["last_indexed_seq"],
        newest_at=facts[0]["last_activity_at"],
        filters={**_text_filters(words, texts.split()[:3]), **_fact_filters(facts)},
    )


def _text_filters(words: list[str], texts: Sequence[str]) -> dict[str, InspectionFilter]:
    return {
        "no filter": InspectionFilter(),
        "a rare word": InspectionFilter(text=words[-1]),
        "a common word": InspectionFilter(text=words[0]),
        "common words": InspectionFilter(text=" ".join(texts)),
        "one word without another": InspectionFilter(text=f"{words[0]} -{words[-1]}"),
        "a word that nobody said": InspectionFilter(text="thisnobodysaid"),
        "a phrase": InspectionFilter(phrase=" ".join(texts)),
        "a phrase that nobody said": InspectionFilter(phrase=f"{words[0]} {words[0]} {words[0]}"),
        "a common word and a flag": InspectionFilter(text=words[0], has_prefix_break=True),
    }


def _fact_filters(facts: list[Record]) -> dict[str, InspectionFilter]:
    def most(column: str) -> str | None:
        values = [value for row in facts for value in row[column]]
        return max(set(values), key=values.count) if values else None

    newest = facts[0]
    costs = sorted(row["cost_usd"] for row in facts)
    return {
        "assistant": InspectionFilter(assistant_id=encode_id(ASSISTANT, newest["assistant_id"])),
        "model": InspectionFilter(model=most("models")),
        "provider": InspectionFilter(provider=most("providers")),
        "error": InspectionFilter(error_code=most("error_codes") or "internal"),
        "an error that nobody had": InspectionFilter(error_code="no_such_error"),
        "tool": InspectionFilter(tool_name=most("tool_names") or "none"),
        "state": InspectionFilter(state=InspectedState.COMPLETE),
        "running": InspectionFilter(state=InspectedState.RUNNING),
        "flag": InspectionFilter(has_prefix_break=True),
        "cost": InspectionFilter(cost_from=costs[len(costs) // 2]),
        "a cost that nothing has": InspectionFilter(cost_from=costs[-1] * 1000 + 1),
        "time": InspectionFilter(active_before=newest["last_activity_at"] - timedelta(hours=1)),
        "all together": InspectionFilter(
            model=most("models"), state=InspectedState.COMPLETE, tokens_from=1, active_before=newest["last_activity_at"]
        ),
    }


async def measure(
    database: WatchedDatabase, tenant_id: str, wanted: Wanted, overview: timedelta = timedelta(days=1)
) -> dict[str, Reading]:
    """What every page needs. An overview is of the newest time that is so long."""
    inspector = PostgresInspector(database)

    async def show_list(whose: str | None, filters: InspectionFilter) -> int:
        return len((await inspector.list_conversations(whose, filters=filters, limit=50)).items)

    async def show_second(filters: InspectionFilter) -> int:
        first = await inspector.list_conversations(tenant_id, filters=filters, limit=50)
        page = await inspector.list_conversations(tenant_id, filters=filters, cursor=first.next_cursor, limit=50)
        return len(page.items)

    async def show_timeline(**place: int) -> int:
        return len((await inspector.load_timeline(tenant_id, wanted.conversation_id, **place)).turns)

    async def show_overview(whose: str | None, by: OverviewBy) -> int:
        until = wanted.newest_at + timedelta(seconds=1)
        return (await inspector.load_overview(whose, by, since=until - overview, until=until)).total.call_count

    pages: dict[str, Callable[[], Awaitable[int]]] = {
        "timeline, newest": show_timeline,
        "timeline, around": lambda: show_timeline(around_seq=wanted.last_seq // 2),
        "overview by model": lambda: show_overview(tenant_id, OverviewBy.MODEL),
        "overview by assistant, all tenants": lambda: show_overview(None, OverviewBy.ASSISTANT),
        "list of all tenants, no filter": lambda: show_list(None, InspectionFilter()),
        "list, second page": lambda: show_second(InspectionFilter()),
    }
    found = {name: await database.watch(page()) for name, page in pages.items()}
    for name, filters in wanted.filters.items():
        found[f"list, {name}"] = await database.watch(show_list(tenant_id, filters))
    return found


async def find_largest_tenant(database: Database) -> str:
    """Whose conversations are the most, in a sample of the newest."""
    async with database.connection() as connection:
        tenant: UUID = await connection.fetchval(
            "SELECT tenant_id FROM (SELECT * FROM conversation_facts ORDER BY last_activity_at DESC LIMIT $1) AS n "
            "GROUP BY tenant_id ORDER BY count(*) DESC LIMIT 1",
            SAMPLE,
        )
    return encode_id(TENANT, tenant)


async def run(url: str, tenant_id: str | None) -> None:
    database = WatchedDatabase(DatabaseOptions(url=url))
    try:
        whose = tenant_id or await find_largest_tenant(database)
        async with database.connection() as connection:
            sizes = await connection.fetch(
                "SELECT relname, reltuples::bigint AS rows FROM pg_class WHERE relname = ANY($1)",
                ["turns", "calls", "conversation_facts", "turn_texts"],
            )
        _show(
            f"{datetime.now(UTC):%Y-%m-%d}, about: " + ", ".join(f"{row['relname']} {row['rows']:,}" for row in sizes)
        )
        _show(f"{'page':<46} {'queries':>7} {'rows':>9} {'pages':>9} {'shown':>6}")
        for name, reading in (await measure(database, whose, await draw_wanted(database, whose))).items():
            _show(f"{name:<46} {reading.queries:>7} {reading.rows:>9,} {reading.pages:>9,} {reading.shown:>6}")
    finally:
        await database.close()


def _show(line: str) -> None:
    print(line, flush=True)  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--tenant")
    chosen = parser.parse_args()
    asyncio.run(run(chosen.url, chosen.tenant))
