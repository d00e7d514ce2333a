"""Assistants for operators on Postgres."""

from typing import Any, Final

from server.conversation.errors import AssistantNotFound
from server.conversation.identifiers import ASSISTANT, TENANT, decode_id, encode_id, new_uuid
from server.conversation.page import Page
from server.inspection.assistants import COUNT_CAP, AssistantOutline, InspectedAssistant, VersionOutline
from server.postgres.codec import decode_cursor, decode_text
from server.postgres.engine import Statement, StorePart
from server.postgres.paging import before_id, bounded, page_of
from server.postgres.rows import Row, assistant_from

_LARGEST_VERSION: Final = 2**31 - 1

# Skips from assistant to assistant by the index: only the newest version of each is read.
_LIST: Final = """
WITH RECURSIVE heads AS (
    (
        SELECT a.id, a.version, 1 AS place FROM assistants a WHERE {mine} a.id < :before
        ORDER BY a.id DESC, a.version DESC LIMIT 1
    )
    UNION ALL
    SELECT following.id, following.version, heads.place + 1
    FROM heads CROSS JOIN LATERAL (
        SELECT a.id, a.version FROM assistants a WHERE {mine} a.id < heads.id
        ORDER BY a.id DESC, a.version DESC LIMIT 1
    ) following
    WHERE heads.place < :count
)
SELECT a.id, a.tenant_id, n.name AS tenant_name, a.name, a.provider, a.model, a.version, a.created_at AS changed_at,
    (SELECT v.created_at FROM assistants v WHERE v.id = a.id ORDER BY v.version LIMIT 1) AS created_at,
    (SELECT count(*) FROM (SELECT FROM assistants v WHERE v.id = a.id LIMIT :cap) AS counted) AS version_count,
    (
        SELECT count(*) FROM (
            SELECT FROM conversations c WHERE c.tenant_id = a.tenant_id AND c.assistant_id = a.id LIMIT :cap
        ) AS counted
    ) AS conversation_count
FROM heads JOIN assistants a ON a.id = heads.id AND a.version = heads.version JOIN tenants n ON n.id = a.tenant_id
ORDER BY a.id DESC
"""
_LIST_ONE: Final = Statement(_LIST.format(mine="a.tenant_id = :tenant AND"))
_LIST_ALL: Final = Statement(_LIST.format(mine=""))
_LOAD: Final = Statement("""
WITH newest AS (
    SELECT a.tenant_id, a.version FROM assistants a
    WHERE a.id = :assistant AND (:sees_all::bool OR a.tenant_id = :tenant::uuid)
    ORDER BY a.version DESC LIMIT 1
)
SELECT a.id AS assistant_id, a.version AS chosen_version, a.created_at AS assistant_created_at, a.name, a.language,
    a.description, a.provider, a.model, a.instructions, a.variables, a.tools, a.settings, a.tenant_id,
    n.name AS tenant_name, newest.version AS newest_version
FROM newest JOIN assistants a ON a.id = :assistant AND a.version = coalesce(:version::int, newest.version)
JOIN tenants n ON n.id = newest.tenant_id
""")
_COUNT_BY_VERSION: Final = Statement("""
SELECT assistant_version, count(*) AS conversation_count
FROM (
    SELECT c.assistant_version FROM conversations c WHERE c.tenant_id = :tenant AND c.assistant_id = :assistant
    ORDER BY c.id DESC LIMIT :cap
) AS newest
GROUP BY assistant_version
""")
_VERSIONS: Final = Statement("""
SELECT a.version, a.created_at, a.name, a.provider, a.model, json_array_length(a.tools) AS tool_count
FROM assistants a
WHERE a.id = :assistant AND (:sees_all::bool OR a.tenant_id = :tenant::uuid) AND a.version < :before
ORDER BY a.version DESC LIMIT :count
""")


class AssistantReader(StorePart):
    """Reads assistants; see `server.inspection.port.Inspector`."""

    async def list_assistants(
        self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20
    ) -> Page[AssistantOutline]:
        values: dict[str, Any] = {"before": before_id(cursor, ASSISTANT), "count": bounded(limit) + 1, "cap": COUNT_CAP}
        if tenant_id is None:
            rows = await self._database.run(_LIST_ALL, **values)
        else:
            rows = await self._database.run(_LIST_ONE, **values, tenant=decode_id(TENANT, tenant_id))
        return page_of(rows, limit, _outline_from, lambda outline: outline.id)

    async def load_assistant(
        self, tenant_id: str | None, assistant_id: str, version: int | None = None
    ) -> InspectedAssistant:
        if version is not None and not 1 <= version <= _LARGEST_VERSION:
            raise AssistantNotFound
        key = _key(tenant_id, assistant_id)
        rows = await self._database.run(_LOAD, **key, version=version)
        if not rows:
            raise AssistantNotFound
        row = rows[0]
        counts = await self._database.run(
            _COUNT_BY_VERSION, tenant=row["tenant_id"], assistant=row["assistant_id"], cap=COUNT_CAP
        )
        return InspectedAssistant(
            tenant_id=encode_id(TENANT, row["tenant_id"]),
            tenant_name=decode_text(row["tenant_name"]),
            assistant=assistant_from(row),
            newest_version=row["newest_version"],
            conversation_counts={count["assistant_version"]: count["conversation_count"] for count in counts},
        )

    async def list_versions(
        self, tenant_id: str | None, assistant_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[VersionOutline]:
        before = _LARGEST_VERSION if cursor is None else min(decode_cursor(cursor, int), _LARGEST_VERSION)
        key = _key(tenant_id, assistant_id)
        rows = await self._database.run(_VERSIONS, **key, before=max(0, before), count=bounded(limit) + 1)
        if not rows and cursor is None:
            raise AssistantNotFound
        return page_of(rows, limit, _version_from, lambda outline: outline.version)


def _key(tenant_id: str | None, assistant_id: str) -> dict[str, Any]:
    """A malformed id must match no row, rather than all."""
    return {
        "assistant": decode_id(ASSISTANT, assistant_id) or new_uuid(),
        "sees_all": tenant_id is None,
        "tenant": None if tenant_id is None else decode_id(TENANT, tenant_id),
    }


def _outline_from(row: Row) -> AssistantOutline:
    return AssistantOutline(
        id=encode_id(ASSISTANT, row["id"]),
        tenant_id=encode_id(TENANT, row["tenant_id"]),
        tenant_name=decode_text(row["tenant_name"]),
        name=decode_text(row["name"]),
        provider=decode_text(row["provider"]),
        model=decode_text(row["model"]),
        version=row["version"],
        version_count=row["version_count"],
        conversation_count=row["conversation_count"],
        created_at=row["created_at"],
        changed_at=row["changed_at"],
    )


def _version_from(row: Row) -> VersionOutline:
    return VersionOutline(
        version=row["version"],
        created_at=row["created_at"],
        name=decode_text(row["name"]),
        provider=decode_text(row["provider"]),
        model=decode_text(row["model"]),
        tool_count=row["tool_count"],
    )
