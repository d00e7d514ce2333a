"""Replays: made, read, listed, paused, continued, cancelled.

Whatever changes a replay or moves one of its items locks the replay's row first and the item's second, so that there is
one order of events, and no two wait for one another.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from server.conversation.audit import Action, Actor, AuditDraft
from server.conversation.errors import ConversationNotFound, LeaseLost, ReplayEnded, ReplayNotFound
from server.conversation.identifiers import API_KEY, CONVERSATION, REPLAY, TENANT, decode_id, encode_id, new_uuid
from server.conversation.page import Page
from server.postgres.connections import Connection
from server.postgres.engine import Database, Statement
from server.postgres.inspection.audit_log import append_on
from server.postgres.paging import before_id, bounded, page_of
from server.postgres.replay.rows import REPLAY_COLUMNS, encode_draft, limits_from, replay_from
from server.postgres.replay.statements import change_state, end_if_done, execute, fetch, fetch_one
from server.postgres.rows import Row
from server.replay.rerun.budget import is_spent
from server.replay.rerun.checks import check_draft, check_size, find_limit_faults, refuse
from server.replay.rerun.replay import ItemLease, Replay, ReplayDraft, ReplayLimits, ReplayState

# The sources are held until the items are there: whoever erases one waits, and then finds its items.
_HOLD_SOURCES: Final = Statement("""
SELECT id FROM conversations WHERE id = ANY(:ids::uuid[]) AND (tenant_id = :tenant) IS TRUE
ORDER BY id FOR KEY SHARE
""")
_CREATE: Final = Statement("""
INSERT INTO replays (id, tenant_id, name, state, draft, item_count, repetitions, parallelism, calls_per_minute,
    budget_usd, budget_tokens, created_by)
VALUES (:replay, :tenant, :name, 'running', :draft::json, :item_count, :repetitions, :parallelism, :calls_per_minute,
    :budget_usd, :budget_tokens, :created_by)
""")
_CREATE_ITEMS: Final = Statement("""
INSERT INTO replay_items (conversation_id, replay_id, repetition, number, state)
SELECT source.id, :replay, repetition, (repetition - 1) * cardinality(:ids::uuid[]) + source.place, 'waiting'
FROM unnest(:ids::uuid[]) WITH ORDINALITY AS source (id, place), generate_series(1, :repetitions::int) AS repetition
""")
_LOAD: Final = Statement(f"""
SELECT {REPLAY_COLUMNS} FROM replays r WHERE r.id = :replay AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
""")  # noqa: S608  reason: constants of our own only
# Counting the items of each page would make reading all pages quadratic.
_FIND: Final = Statement("""
SELECT FROM replays WHERE id = :replay AND (:tenant::uuid IS NULL OR tenant_id = :tenant)
""")
_LIST_SQL: Final = f"""
SELECT {REPLAY_COLUMNS} FROM replays r WHERE %mine% r.id < :before ORDER BY r.id DESC LIMIT :count
"""  # noqa: S608  reason: constants of our own only
_LIST_ONE: Final = Statement(_LIST_SQL.replace("%mine%", "r.tenant_id = :tenant AND"))
_LIST_ALL: Final = Statement(_LIST_SQL.replace("%mine%", ""))
# Not FOR UPDATE: whoever writes a result holds its item, and looks whether the replay is there.
_LOCK: Final = Statement("""
SELECT * FROM replays WHERE id = :replay AND (:tenant::uuid IS NULL OR tenant_id = :tenant) FOR NO KEY UPDATE
""")
# The last call has left when it has left: only its share of the minute is another one.
_CHANGE_LIMITS: Final = Statement("""
UPDATE replays SET parallelism = :parallelism, calls_per_minute = :calls_per_minute, budget_usd = :budget_usd,
    budget_tokens = :budget_tokens,
    next_call_at = next_call_at + make_interval(secs => 60.0 / :calls_per_minute::int - 60.0 / calls_per_minute)
WHERE id = :replay
""")
_WAIT_AGAIN: Final = Statement("""
UPDATE replay_items SET state = 'waiting', ended_at = NULL WHERE replay_id = :replay AND state = 'skipped'
""")


async def create_replay(
    database: Database, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str], actor: Actor
) -> Replay:
    """See the port."""
    check_draft(draft)
    check_size(len(conversation_ids), draft.limits)
    replay, tenant = new_uuid(), decode_id(TENANT, tenant_id)
    ids = [decode_id(CONVERSATION, conversation_id) for conversation_id in conversation_ids]
    async with database.transaction() as connection:
        held = await fetch(connection, _HOLD_SOURCES, ids=ids, tenant=tenant)
        if len(held) != len(set(ids)):
            raise ConversationNotFound("A conversation to be replayed does not exist any more.")
        await execute(
            connection,
            _CREATE,
            replay=replay,
            tenant=tenant,
            name=draft.name,
            draft=encode_draft(draft),
            item_count=len(ids) * draft.limits.repetitions,
            created_by=actor.key_id and decode_id(API_KEY, actor.key_id),
            repetitions=draft.limits.repetitions,
            **_limit_values(draft.limits),
        )
        await execute(connection, _CREATE_ITEMS, replay=replay, ids=ids, repetitions=draft.limits.repetitions)
        created = await load_replay_on(connection, replay)
        await _audit(connection, created, Action.CREATE_REPLAY, actor, item_count=created.item_count)
    return created


async def load_replay(database: Database, tenant_id: str | None, replay_id: str) -> Replay:
    """See the port."""
    rows = await database.run(_LOAD, **replay_key(tenant_id, replay_id))
    if not rows:
        raise ReplayNotFound
    return replay_from(rows[0])


async def require_replay(database: Database, tenant_id: str | None, replay_id: str) -> None:
    """That it is there, without counting its items. Raises `ReplayNotFound`."""
    if not await database.run(_FIND, **replay_key(tenant_id, replay_id)):
        raise ReplayNotFound


async def list_replays(database: Database, tenant_id: str | None, cursor: str | None, limit: int) -> Page[Replay]:
    """See the port."""
    place: dict[str, Any] = {"before": before_id(cursor, REPLAY), "count": bounded(limit) + 1}
    if tenant_id is None:
        rows = await database.run(_LIST_ALL, **place)
    else:
        rows = await database.run(_LIST_ONE, tenant=decode_id(TENANT, tenant_id), **place)
    return page_of(rows, limit, replay_from, lambda replay: replay.id)


async def pause_replay(database: Database, tenant_id: str | None, replay_id: str, actor: Actor) -> Replay:
    """See the port."""
    async with database.transaction() as connection:
        row = await lock_replay(connection, tenant_id, replay_id)
        state = ReplayState(row["state"])
        if state not in {ReplayState.RUNNING, ReplayState.PAUSED}:
            raise ReplayEnded
        if state is ReplayState.RUNNING:
            await change_state(connection, row["id"], ReplayState.PAUSED)
        paused = await load_replay_on(connection, row["id"])
        if state is ReplayState.RUNNING:
            await _audit(connection, paused, Action.PAUSE_REPLAY, actor)
    return paused


async def continue_replay(
    database: Database, tenant_id: str | None, replay_id: str, limits: ReplayLimits | None, actor: Actor
) -> Replay:
    """See the port."""
    async with database.transaction() as connection:
        row = await lock_replay(connection, tenant_id, replay_id)
        state = ReplayState(row["state"])
        if state in {ReplayState.DONE, ReplayState.CANCELLED}:
            raise ReplayEnded
        wanted = limits or limits_from(row)
        refuse(list(find_limit_faults(wanted)))
        if is_spent(wanted, row["spent_usd"], row["spent_tokens"]):
            refuse([("limits", "So much is spent already; going on needs a larger budget.")])
        if limits is not None:
            await execute(connection, _CHANGE_LIMITS, replay=row["id"], **_limit_values(limits))
        if state is ReplayState.STOPPED_BY_BUDGET:
            await execute(connection, _WAIT_AGAIN, replay=row["id"])
        if state is not ReplayState.RUNNING:
            await change_state(connection, row["id"], ReplayState.RUNNING)
            await end_if_done(connection, row["id"])
        continued = await load_replay_on(connection, row["id"])
        await _audit(connection, continued, Action.CONTINUE_REPLAY, actor, has_new_limits=limits is not None)
    return continued


async def cancel_replay(database: Database, tenant_id: str | None, replay_id: str, actor: Actor) -> Replay:
    """See the port."""
    async with database.transaction() as connection:
        row = await lock_replay(connection, tenant_id, replay_id)
        state = ReplayState(row["state"])
        if state is ReplayState.DONE:
            raise ReplayEnded
        if state is not ReplayState.CANCELLED:
            await change_state(connection, row["id"], ReplayState.CANCELLED)
        cancelled = await load_replay_on(connection, row["id"])
        if state is not ReplayState.CANCELLED:
            await _audit(connection, cancelled, Action.CANCEL_REPLAY, actor)
    return cancelled


async def lock_replay(connection: Connection, tenant_id: str | None, replay_id: str) -> Row:
    """The row, held to the end of the transaction. Raises `ReplayNotFound`."""
    row = await fetch_one(connection, _LOCK, **replay_key(tenant_id, replay_id))
    if row is None:
        raise ReplayNotFound
    return row


async def hold_replay(connection: Connection, lease: ItemLease) -> Row:
    """The same for whoever runs an item: without the replay there is none. Raises `LeaseLost`."""
    try:
        return await lock_replay(connection, None, lease.replay_id)
    except ReplayNotFound:
        raise LeaseLost("The replay was erased.") from None


def replay_key(tenant_id: str | None, replay_id: str) -> dict[str, Any]:
    """A replay as statements ask for it. A tenant that cannot be one has none, rather than all."""
    tenant = None if tenant_id is None else decode_id(TENANT, tenant_id) or new_uuid()
    return {"replay": decode_id(REPLAY, replay_id), "tenant": tenant}


async def audit_replay(
    connection: Connection, tenant_id: str, replay_id: str, action: Action, actor: Actor, **details: object
) -> None:
    """Tells what was done to a replay, in the transaction that does it."""
    await append_on(
        connection,
        AuditDraft(tenant_id=tenant_id, actor=actor, action=action, object_id=replay_id, details=details),
    )


async def _audit(connection: Connection, replay: Replay, action: Action, actor: Actor, **details: object) -> None:
    await audit_replay(connection, replay.tenant_id, replay.id, action, actor, **details)


async def load_replay_on(connection: Connection, replay: UUID) -> Replay:
    """A replay within a transaction."""
    row = await fetch_one(connection, _LOAD, replay=replay, tenant=None)
    if row is None:
        raise ReplayNotFound(encode_id(REPLAY, replay))
    return replay_from(row)


def _limit_values(limits: ReplayLimits) -> dict[str, Any]:
    return {
        "parallelism": limits.parallelism,
        "calls_per_minute": limits.calls_per_minute,
        "budget_usd": limits.budget_usd,
        "budget_tokens": limits.budget_tokens,
    }
