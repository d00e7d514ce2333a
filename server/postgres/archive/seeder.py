"""Copies of conversations with other ids and times, for seeding a database with many conversations.

A copy has all rows of its original, as a fork does, so every request of it can be rebuilt byte for byte. Only ids,
times and durations differ. Each batch of complete conversations is written in one transaction with COPY.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final

from sqlalchemy import Table

from server.archive.seed_plan import plan_id, plan_moment
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.postgres.engine import Database
from server.postgres.tables import blob_references, calls, conversations, epochs, segments, turns

_COPIED: Final[Sequence[Table]] = (epochs, segments, turns, blob_references, calls)
_TOKENS_PER_SECOND: Final = 70.0
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A conversation to be copied, with all its rows."""

    conversation: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    """By table."""

    @property
    def turn_count(self) -> int:
        return len(self.rows[turns.name])


async def count_tenant_conversations(database: Database, tenant_id: str) -> int:
    """Count the conversations of a tenant."""
    async with database.connection() as connection:
        count: int = await connection.fetchval(
            "SELECT count(*) FROM conversations WHERE tenant_id = $1", decode_id(TENANT, tenant_id)
        )
    return count


async def load_originals(database: Database, conversation_ids: Sequence[str]) -> list[Original]:
    """Load conversations with all their rows."""
    found = []
    async with database.connection() as connection:
        for conversation_id in conversation_ids:
            key = decode_id(CONVERSATION, conversation_id)
            row = await connection.fetchrow("SELECT * FROM conversations WHERE id = $1", key)
            rows = {
                table.name: [
                    dict(each)
                    for each in await connection.fetch(f"SELECT * FROM {table.name} WHERE conversation_id = $1", key)  # noqa: S608  reason: names of our own tables
                ]
                for table in _COPIED
            }
            if row is not None:
                found.append(Original(conversation=dict(row), rows=rows))
    return found


class Copies:
    """Copies that are not written yet."""

    def __init__(self, originals: Sequence[Original], random: Random, *, until: datetime, days: int) -> None:
        self._originals = originals
        self._random = random
        self._until = until
        self._days = days
        self._waiting: dict[str, list[tuple[Any, ...]]] = {}
        self.turn_count = 0
        """The number of turns of all copies so far."""

    def add(self) -> None:
        """Add a copy of a random original."""
        original = self._random.choice(self._originals)
        began_at = plan_moment(self._random, self._until, self._days)
        times = _Times(began_at, timedelta(seconds=self._random.uniform(20, 240)), self._random)
        conversation_id = plan_id(self._random, began_at)
        self._put(conversations, original.conversation | times.of_conversation(original) | {"id": conversation_id})
        for table in _COPIED:
            for row in original.rows[table.name]:
                self._put(table, row | times.of_row(table, row) | {"conversation_id": conversation_id})
        self.turn_count += original.turn_count

    def _put(self, table: Table, row: dict[str, Any]) -> None:
        self._waiting.setdefault(table.name, []).append(tuple(row[column.name] for column in table.c))

    async def write(self, database: Database) -> None:
        """Write all added copies in one transaction."""
        async with database.transaction() as connection:
            for table in (conversations, *_COPIED):
                rows = self._waiting.get(table.name)
                if rows:
                    names = [column.name for column in table.c]
                    await connection.copy_records_to_table(table.name, records=rows, columns=names)
        self._waiting.clear()


class _Times:
    """The times of one copy: turns at equal intervals, calls with a duration that follows from their tokens."""

    __slots__ = ("_began_at", "_pace", "_random")

    def __init__(self, began_at: datetime, pace: timedelta, random: Random) -> None:
        self._began_at = began_at
        self._pace = pace
        self._random = random

    def at(self, seq: int) -> datetime:
        return self._began_at + self._pace * max(0, seq)

    def of_conversation(self, original: Original) -> dict[str, Any]:
        return {"created_at": self._began_at, "updated_at": self.at(original.conversation["next_seq"] - 1)}

    def of_row(self, table: Table, row: dict[str, Any]) -> dict[str, Any]:
        match table.name:
            case turns.name:
                return {"created_at": self.at(row["seq"])}
            case calls.name:
                return self._of_call(row)
            case epochs.name:
                return {"created_at": self.at(row["buffer_start_seq"])}
            case segments.name:
                return {"created_at": self.at(row["last_seq"] + 1)}
            case _:
                return {}

    def _of_call(self, row: dict[str, Any]) -> dict[str, Any]:
        # A call without a turn belongs to an epoch: the lower its number, the later the call.
        started_at = self.at(row["turn_seq"] - 1 if row["turn_seq"] > 0 else -2 * row["turn_seq"])
        first_byte_at = started_at + timedelta(seconds=0.2 + self._random.expovariate(1.5))
        generated_tokens = (row["output_tokens"] or 0) + (row["reasoning_tokens"] or 0)
        seconds = generated_tokens / _TOKENS_PER_SECOND * self._random.uniform(0.6, 2.0)
        ended_at = first_byte_at + timedelta(seconds=seconds) + _MICROSECOND
        return {
            "started_at": started_at,
            "first_byte_at": None if row["first_byte_at"] is None else first_byte_at,
            "ended_at": None if row["ended_at"] is None else ended_at,
        }


async def renew_statistics(database: Database) -> None:
    """Update the statistics of the planner."""
    async with database.connection() as connection:
        for table in (conversations, *_COPIED):
            await connection.execute(f"ANALYZE {table.name}")
