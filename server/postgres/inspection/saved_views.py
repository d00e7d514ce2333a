"""Saved views on Postgres."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncpg import exceptions as pg

from server.conversation.audit import Action, Actor, AuditDraft
from server.conversation.errors import ViewExists, ViewLimitReached, ViewNotFound
from server.conversation.identifiers import API_KEY, SAVED_VIEW, TENANT, decode_id, encode_id, new_id
from server.inspection.conversation_list import VIEW_LIMIT, SavedView
from server.postgres.codec import decode_json, decode_text, encode_json
from server.postgres.engine import Database, Statement
from server.postgres.inspection.audit_log import AUDIT_COLUMNS, AUDIT_VALUES, audit_values
from server.postgres.rows import Row

_COLUMNS: Final = "id, name, filters, api_key_id, created_at"
_LIST: Final = Statement(f"SELECT {_COLUMNS} FROM saved_views WHERE tenant_id = :tenant ORDER BY name, id")  # noqa: S608  reason: constants of this module only
_LOAD: Final = Statement(f"SELECT {_COLUMNS} FROM saved_views WHERE id = :view AND tenant_id = :tenant")  # noqa: S608  reason: the same
# Saves are serialized to enforce the limit. The lock does not block other work of the tenant.
_LOCK: Final = Statement("SELECT id FROM tenants WHERE id = :tenant FOR NO KEY UPDATE")
_AUDITED: Final = f"""
audited AS (
    INSERT INTO audit_log ({AUDIT_COLUMNS}) SELECT {AUDIT_VALUES} FROM changed ON CONFLICT (id) DO NOTHING
)
SELECT * FROM changed
"""  # noqa: S608  reason: the same
_SAVE: Final = Statement(f"""
WITH changed AS (
    INSERT INTO saved_views (id, tenant_id, name, filters, api_key_id)
    SELECT :view, :tenant, :name, :filters::jsonb, :key::uuid
    WHERE (SELECT count(*) FROM saved_views WHERE tenant_id = :tenant) < :limit
    RETURNING {_COLUMNS}
),
{_AUDITED}""")  # noqa: S608  reason: constants of this module only
_RENAME: Final = Statement(f"""
WITH changed AS (
    UPDATE saved_views SET name = :name WHERE id = :view AND tenant_id = :tenant RETURNING {_COLUMNS}
),
{_AUDITED}""")  # noqa: S608  reason: constants of this module only
_DELETE: Final = Statement(f"""
WITH changed AS (
    DELETE FROM saved_views WHERE id = :view AND tenant_id = :tenant RETURNING {_COLUMNS}
),
{_AUDITED}""")  # noqa: S608  reason: constants of this module only


class PostgresSavedViews:
    """Implements `server.inspection.conversation_list.SavedViews`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list_views(self, tenant_id: str) -> Sequence[SavedView]:
        return [_view_from(row) for row in await self._database.run(_LIST, tenant=decode_id(TENANT, tenant_id))]

    async def load_view(self, tenant_id: str, view_id: str) -> SavedView:
        rows = await self._database.run(_LOAD, view=decode_id(SAVED_VIEW, view_id), tenant=decode_id(TENANT, tenant_id))
        if not rows:
            raise ViewNotFound
        return _view_from(rows[0])

    async def save_view(self, tenant_id: str, name: str, filters: Mapping[str, str], by: Actor) -> SavedView:
        view_id = new_id(SAVED_VIEW)
        tenant = decode_id(TENANT, tenant_id)
        values = {
            **_values(tenant_id, view_id, Action.SAVE_VIEW, by),
            "name": name,
            "filters": encode_json(dict(filters)),
            "key": by.key_id and decode_id(API_KEY, by.key_id),
            "limit": VIEW_LIMIT,
        }
        try:
            async with self._database.transaction() as connection:
                await _LOCK.fetch(connection, tenant=tenant)
                rows = await _SAVE.fetch(connection, **values)
        except pg.UniqueViolationError as error:
            raise _name_taken(name) from error
        if not rows:
            raise ViewLimitReached(f"The tenant has {VIEW_LIMIT} saved views, which is the maximum.")
        return _view_from(rows[0])

    async def rename_view(self, tenant_id: str, view_id: str, name: str, by: Actor) -> SavedView:
        values = {**_values(tenant_id, view_id, Action.RENAME_VIEW, by), "name": name}
        try:
            rows = await self._database.run(_RENAME, **values)
        except pg.UniqueViolationError as error:
            raise _name_taken(name) from error
        if not rows:
            raise ViewNotFound
        return _view_from(rows[0])

    async def delete_view(self, tenant_id: str, view_id: str, by: Actor) -> None:
        if not await self._database.run(
            _DELETE, repeatable=False, **_values(tenant_id, view_id, Action.DELETE_VIEW, by)
        ):
            raise ViewNotFound


def _values(tenant_id: str, view_id: str, action: Action, by: Actor) -> dict[str, Any]:
    """The parameters of the view and of its audit entry, which does not contain the name."""
    draft = AuditDraft(tenant_id=tenant_id, actor=by, action=action, object_id=view_id)
    return {
        **audit_values(draft),
        "view": decode_id(SAVED_VIEW, view_id),
        "tenant": decode_id(TENANT, tenant_id),
    }


def _name_taken(name: str) -> ViewExists:
    return ViewExists(f"A saved view named “{name}” exists already.")


def _view_from(row: Row) -> SavedView:
    return SavedView(
        id=encode_id(SAVED_VIEW, row["id"]),
        name=decode_text(row["name"]),
        filters=decode_json(row["filters"]),
        key_id=None if row["api_key_id"] is None else encode_id(API_KEY, row["api_key_id"]),
        created_at=row["created_at"],
    )
