"""Conversations of earlier days, as in a store that has been in use for a while."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from server.conversation.identifiers import ASSISTANT, TENANT, decode_id
from server.postgres.engine import Database

_INSERT = """
INSERT INTO conversations (id, tenant_id, assistant_id, assistant_version, args, context, exchange_count, created_at,
    updated_at)
VALUES ($1, $2, $3, 1, '{}', '{}', $4, $5, $6)
"""


async def add_resting(
    database: Database,
    tenant_id: str,
    assistant_id: str,
    exchange_counts: Sequence[int | None],
    *,
    created: timedelta = timedelta(days=3),
    rests: timedelta = timedelta(days=2),
) -> None:
    """Add one conversation per count, created and last used in the past."""
    now = datetime.now(UTC)
    owner = decode_id(TENANT, tenant_id), decode_id(ASSISTANT, assistant_id)
    rows = [
        (_id_of(now - created), *owner, exchange_count, now - created, now - rests)
        for exchange_count in exchange_counts
    ]
    async with database.connection() as connection:
        await connection.executemany(_INSERT, rows)


def _id_of(moment: datetime) -> UUID:
    milliseconds = int(moment.timestamp() * 1000)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | 0b10 << 62 | int.from_bytes(os.urandom(7)))
