"""The audit log on Postgres."""

from typing import Any, Final

from server.conversation.audit import Actor, AuditDraft, AuditEntry, AuditFilter, Outcome
from server.conversation.identifiers import ADMIN_SESSION, API_KEY, AUDIT, TENANT, decode_id, encode_id, new_uuid
from server.conversation.page import Page
from server.postgres.codec import decode_json, decode_text, encode_json
from server.postgres.connections import Connection
from server.postgres.engine import Database, Statement
from server.postgres.paging import before_id, bounded, ids_within, page_of
from server.postgres.rows import Row

AUDIT_COLUMNS: Final = "id, tenant_id, api_key_id, session_id, address, action, object, details, outcome"
AUDIT_VALUES: Final = (
    ":audit_id::uuid, :audit_tenant::uuid, :audit_key::uuid, :audit_session::uuid, :audit_address::text, "
    ":audit_action::text, :audit_object::text, :audit_details::jsonb, :audit_outcome::text"
)
"""For statements that write an entry together with the audited change; `audit_values` returns the parameters."""

APPEND: Final = Statement(f"""
INSERT INTO audit_log ({AUDIT_COLUMNS}) VALUES ({AUDIT_VALUES}) ON CONFLICT (id) DO NOTHING
""")  # noqa: S608  reason: constants of this module only
_LIST: Final = """
SELECT id, tenant_id, happened_at, api_key_id, session_id, address, action, object, details, outcome
FROM audit_log
WHERE id < :before AND id >= :first AND id < :beyond {filters}
ORDER BY id DESC
LIMIT :row_count
"""
_FILTERS: Final = {
    "tenant": "AND tenant_id = :tenant",
    "action": "AND action = :action",
    "key_id": "AND api_key_id = :key_id",
    "object_id": "AND object = :object_id",
    "outcome": "AND outcome = :outcome",
}
_BY_FILTERS: dict[tuple[str, ...], Statement] = {}


def audit_values(draft: AuditDraft) -> dict[str, Any]:
    """Return the parameters of `AUDIT_VALUES`, with a new id."""
    return {
        "audit_id": new_uuid(),
        "audit_tenant": draft.tenant_id and decode_id(TENANT, draft.tenant_id),
        "audit_key": draft.actor.key_id and decode_id(API_KEY, draft.actor.key_id),
        "audit_session": draft.actor.session_id and decode_id(ADMIN_SESSION, draft.actor.session_id),
        "audit_address": draft.actor.address,
        "audit_action": str(draft.action),
        "audit_object": draft.object_id,
        "audit_details": encode_json(dict(draft.details)),
        "audit_outcome": str(draft.outcome),
    }


async def append_on(connection: Connection, draft: AuditDraft) -> None:
    """Append an entry in the transaction of the audited change."""
    await APPEND.fetch(connection, **audit_values(draft))


class PostgresAuditLog:
    """Implements `server.conversation.audit.AuditLog`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, draft: AuditDraft) -> None:
        await self._database.run(APPEND, **audit_values(draft))

    async def list_entries(
        self, tenant_id: str | None, wanted: AuditFilter, *, cursor: str | None = None, limit: int = 50
    ) -> Page[AuditEntry]:
        values: dict[str, Any] = {
            "action": wanted.action,
            # A malformed id must match no row, rather than all.
            "key_id": None if wanted.key_id is None else decode_id(API_KEY, wanted.key_id) or new_uuid(),
            "object_id": wanted.object_id,
            "outcome": None if wanted.outcome is None else str(wanted.outcome),
        }
        first, beyond = ids_within(wanted.since, wanted.until)
        used = {name: value for name, value in values.items() if value is not None}
        if tenant_id is not None:
            used["tenant"] = decode_id(TENANT, tenant_id)
        rows = await self._database.run(
            _statement_for(tuple(used)),
            before=before_id(cursor, AUDIT),
            first=first,
            beyond=beyond,
            row_count=bounded(limit) + 1,
            **used,
        )
        return page_of(rows, limit, _entry_from, lambda entry: entry.id)


def _statement_for(filters: tuple[str, ...]) -> Statement:
    """One statement per set of filters: an optional condition would keep the planner from using an index."""
    if filters not in _BY_FILTERS:
        _BY_FILTERS[filters] = Statement(_LIST.format(filters=" ".join(_FILTERS[name] for name in filters)))
    return _BY_FILTERS[filters]


def _entry_from(row: Row) -> AuditEntry:
    def text(name: str) -> str | None:
        return None if row[name] is None else decode_text(row[name])

    def identifier(prefix: str, name: str) -> str | None:
        return None if row[name] is None else encode_id(prefix, row[name])

    return AuditEntry(
        id=encode_id(AUDIT, row["id"]),
        happened_at=row["happened_at"],
        tenant_id=identifier(TENANT, "tenant_id"),
        actor=Actor(
            key_id=identifier(API_KEY, "api_key_id"),
            session_id=identifier(ADMIN_SESSION, "session_id"),
            address=text("address"),
        ),
        action=decode_text(row["action"]),
        object_id=text("object"),
        details=decode_json(row["details"]),
        outcome=Outcome(row["outcome"]),
    )
