"""Replays: created, loaded, listed, paused, continued, cancelled."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from server.conversation.audit import Action, Actor, AuditDraft
from server.conversation.errors import ConversationNotFound, ReplayEnded, ReplayNotFound
from server.conversation.identifiers import API_KEY, CONVERSATION, REPLAY, TENANT, decode_id, encode_id, new_uuid
from server.conversation.page import Page
from server.postgres.connections import Connection
from server.postgres.engine import Statement
from server.postgres.inspection.audit_log import append_on
from server.postgres.paging import before_id, bounded, page_of
from server.postgres.replay.rows import REPLAY_COLUMNS, encode_draft, limits_from, replay_from
from server.postgres.replay.statements import (
    ReplayDatabase,
    change_state,
    end_if_done,
    execute,
    fetch,
    fetch_one,
    lock_replay,
    replay_key,
)
from server.replay.rerun.budget import is_spent
from server.replay.rerun.replay import Replay, ReplayDraft, ReplayLimits, ReplayState
from server.replay.rerun.validation import check_draft, check_size, find_limit_faults, refuse

# Locked until the items are inserted: a concurrent erasure of a source waits, and then finds its items.
_LOCK_SOURCES: Final = Statement("""
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
SELECT source.id, :replay, repetition, (repetition - 1) * cardinality(:ids::uuid[]) + source.position, 'waiting'
FROM unnest(:ids::uuid[]) WITH ORDINALITY AS source (id, position), generate_series(1, :repetitions::int) AS repetition
""")
_LOAD: Final = Statement(f"""
SELECT {REPLAY_COLUMNS} FROM replays r WHERE r.id = :replay AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
""")  # noqa: S608  reason: constants of our own only
# Without the counts of items, which would make reading all pages of a list quadratic.
_FIND: Final = Statement("""
SELECT FROM replays WHERE id = :replay AND (:tenant::uuid IS NULL OR tenant_id = :tenant)
""")
_LIST_SQL: Final = f"""
SELECT {REPLAY_COLUMNS} FROM replays r WHERE %mine% r.id < :before ORDER BY r.id DESC LIMIT :count
"""  # noqa: S608  reason: constants of our own only
_LIST_ONE: Final = Statement(_LIST_SQL.replace("%mine%", "r.tenant_id = :tenant AND"))
_LIST_ALL: Final = Statement(_LIST_SQL.replace("%mine%", ""))
# The time of the last call does not change; only the interval after it does.
_CHANGE_LIMITS: Final = Statement("""
UPDATE replays SET parallelism = :parallelism, calls_per_minute = :calls_per_minute, budget_usd = :budget_usd,
    budget_tokens = :budget_tokens,
    next_call_at = next_call_at + make_interval(secs => 60.0 / :calls_per_minute::int - 60.0 / calls_per_minute)
WHERE id = :replay
""")
_WAIT_AGAIN: Final = Statement("""
UPDATE replay_items SET state = 'waiting', ended_at = NULL WHERE replay_id = :replay AND state = 'skipped'
""")


class ReplayRuns(ReplayDatabase):
    """A replay is one row, locked for a short time by each transaction that claims or ends an item or makes a call."""

    async def create_replay(
        self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str], *, actor: Actor
    ) -> Replay:
        check_draft(draft)
        check_size(len(conversation_ids), draft.limits)
        replay, tenant = new_uuid(), decode_id(TENANT, tenant_id)
        ids = [decode_id(CONVERSATION, conversation_id) for conversation_id in conversation_ids]
        async with self._database.transaction() as connection:
            locked = await fetch(connection, _LOCK_SOURCES, ids=ids, tenant=tenant)
            if len(locked) != len(set(ids)):
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
            created = await _load(connection, replay)
            await _audit(connection, created, Action.CREATE_REPLAY, actor, item_count=created.item_count)
        return created

    async def load_replay(self, tenant_id: str | None, replay_id: str) -> Replay:
        rows = await self._database.run(_LOAD, **replay_key(tenant_id, replay_id))
        if not rows:
            raise ReplayNotFound
        return replay_from(rows[0])

    async def list_replays(self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20) -> Page[Replay]:
        page: dict[str, Any] = {"before": before_id(cursor, REPLAY), "count": bounded(limit) + 1}
        if tenant_id is None:
            rows = await self._database.run(_LIST_ALL, **page)
        else:
            rows = await self._database.run(_LIST_ONE, tenant=decode_id(TENANT, tenant_id), **page)
        return page_of(rows, limit, replay_from, lambda replay: replay.id)

    async def pause_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        async with self._database.transaction() as connection:
            row = await lock_replay(connection, tenant_id, replay_id)
            state = ReplayState(row["state"])
            if state not in {ReplayState.RUNNING, ReplayState.PAUSED}:
                raise ReplayEnded
            if state is ReplayState.RUNNING:
                await change_state(connection, row["id"], ReplayState.PAUSED)
            paused = await _load(connection, row["id"])
            if state is ReplayState.RUNNING:
                await _audit(connection, paused, Action.PAUSE_REPLAY, actor)
        return paused

    async def continue_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, limits: ReplayLimits | None = None
    ) -> Replay:
        async with self._database.transaction() as connection:
            row = await lock_replay(connection, tenant_id, replay_id)
            state = ReplayState(row["state"])
            if state in {ReplayState.DONE, ReplayState.CANCELLED}:
                raise ReplayEnded
            wanted = limits or limits_from(row)
            refuse(list(find_limit_faults(wanted)))
            if is_spent(wanted, row["spent_usd"], row["spent_tokens"]):
                refuse([("limits", "The budget is spent. Continue the replay with a larger one.")])
            if limits is not None:
                await execute(connection, _CHANGE_LIMITS, replay=row["id"], **_limit_values(limits))
            if state is ReplayState.STOPPED_BY_BUDGET:
                await execute(connection, _WAIT_AGAIN, replay=row["id"])
            if state is not ReplayState.RUNNING:
                await change_state(connection, row["id"], ReplayState.RUNNING)
                await end_if_done(connection, row["id"])
            continued = await _load(connection, row["id"])
            await _audit(connection, continued, Action.CONTINUE_REPLAY, actor, has_new_limits=limits is not None)
        return continued

    async def cancel_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        async with self._database.transaction() as connection:
            row = await lock_replay(connection, tenant_id, replay_id)
            state = ReplayState(row["state"])
            if state is ReplayState.DONE:
                raise ReplayEnded
            if state is not ReplayState.CANCELLED:
                await change_state(connection, row["id"], ReplayState.CANCELLED)
            cancelled = await _load(connection, row["id"])
            if state is not ReplayState.CANCELLED:
                await _audit(connection, cancelled, Action.CANCEL_REPLAY, actor)
        return cancelled

    async def _require_replay(self, tenant_id: str | None, replay_id: str) -> None:
        """Check that a replay exists, without counting its items. Raises `ReplayNotFound`."""
        if not await self._database.run(_FIND, **replay_key(tenant_id, replay_id)):
            raise ReplayNotFound


async def _audit(connection: Connection, replay: Replay, action: Action, actor: Actor, **details: object) -> None:
    draft = AuditDraft(tenant_id=replay.tenant_id, actor=actor, action=action, object_id=replay.id, details=details)
    await append_on(connection, draft)


async def _load(connection: Connection, replay: UUID) -> Replay:
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
