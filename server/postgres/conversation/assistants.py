"""Assistants: versions are added, never changed."""

from typing import Any, Final

from asyncpg import exceptions as pg
from sqlalchemy import Integer, bindparam, func, select
from sqlalchemy.dialects.postgresql import distinct_on, insert

from server.conversation.assistant import Assistant, AssistantDefinition
from server.conversation.errors import AssistantNotFound, AssistantRevised
from server.conversation.identifiers import ASSISTANT, TENANT, decode_id, new_uuid
from server.conversation.page import Page
from server.postgres.codec import encode_json
from server.postgres.connections import Connection
from server.postgres.engine import Statement, StorePart
from server.postgres.paging import before_id, bounded, page_of
from server.postgres.rows import assistant_from
from server.postgres.tables import assistants

_c = assistants.c
_COLUMNS: Final = (
    _c.id.label("assistant_id"),
    _c.version.label("chosen_version"),
    _c.created_at.label("assistant_created_at"),
    _c.name,
    _c.language,
    _c.description,
    _c.provider,
    _c.model,
    _c.instructions,
    _c.variables,
    _c.tools,
    _c.settings,
)
_DEFINED: Final = (
    "name",
    "language",
    "description",
    "provider",
    "model",
    "instructions",
    "variables",
    "tools",
    "settings",
)
_CONTENT: Final = [bindparam(name, type_=_c[name].type) for name in _DEFINED]
_THIS: Final = (_c.id == bindparam("assistant"), _c.tenant_id == bindparam("tenant"))

_CREATE: Final = Statement(
    insert(assistants)
    .values(
        id=bindparam("assistant"),
        tenant_id=bindparam("tenant"),
        version=1,
        **dict(zip(_DEFINED, _CONTENT, strict=True)),
    )
    # A repeated statement finds the row that it inserted the first time.
    .on_conflict_do_update(index_elements=[_c.id, _c.version], set_={"version": _c.version})
    .returning(*_COLUMNS)
)
_REVISE: Final = Statement(
    insert(assistants)
    .from_select(
        ["id", "tenant_id", "version", *_DEFINED],
        select(_c.id, _c.tenant_id, func.max(_c.version) + 1, *_CONTENT)
        .where(*_THIS)
        .group_by(_c.id, _c.tenant_id)
        .having(func.max(_c.version) == func.coalesce(bindparam("expected", type_=Integer), func.max(_c.version))),
    )
    .returning(*_COLUMNS)
)
_LOAD: Final = Statement(select(*_COLUMNS).where(*_THIS, _c.version == bindparam("version")))
_LOAD_NEWEST: Final = Statement(select(*_COLUMNS).where(*_THIS).order_by(_c.version.desc()).limit(1))
_LIST: Final = Statement(
    select(*_COLUMNS)
    .where(_c.tenant_id == bindparam("tenant"), _c.id < bindparam("before"))
    .ext(distinct_on(_c.id))
    .order_by(_c.id.desc(), _c.version.desc())
    .limit(bindparam("count", type_=Integer))
)


class AssistantStore(StorePart):
    """Creates, revises and reads assistants."""

    async def create_assistant(self, tenant_id: str, definition: AssistantDefinition) -> Assistant:
        return assistant_from((await self._database.run(_CREATE, **_creation_values(tenant_id, definition)))[0])

    async def revise_assistant(
        self,
        tenant_id: str,
        assistant_id: str,
        definition: AssistantDefinition,
        *,
        expected_version: int | None = None,
    ) -> Assistant:
        values = _key(tenant_id, assistant_id) | _definition_values(definition) | {"expected": expected_version}
        while True:
            try:
                rows = await self._database.run(_REVISE, repeatable=False, **values)
            except pg.UniqueViolationError:
                # A concurrent revision took the number, and the next attempt sees it. One attempt per round succeeds.
                continue
            if rows:
                return assistant_from(rows[0])
            newest = await self.load_assistant(tenant_id, assistant_id)
            raise AssistantRevised(expected_version=expected_version, version=newest.version)

    async def load_assistant(self, tenant_id: str, assistant_id: str, version: int | None = None) -> Assistant:
        key = _key(tenant_id, assistant_id)
        if version is None:
            rows = await self._database.run(_LOAD_NEWEST, **key)
        else:
            rows = await self._database.run(_LOAD, **key, version=version)
        if not rows:
            raise AssistantNotFound
        return assistant_from(rows[0])

    async def list_assistants(self, tenant_id: str, *, cursor: str | None = None, limit: int = 20) -> Page[Assistant]:
        rows = await self._database.run(
            _LIST,
            tenant=decode_id(TENANT, tenant_id),
            before=before_id(cursor, ASSISTANT),
            count=bounded(limit) + 1,
        )
        return page_of(rows, limit, assistant_from, lambda assistant: assistant.id)


async def create_assistant_on(connection: Connection, tenant_id: str, definition: AssistantDefinition) -> Assistant:
    """Create an assistant within a transaction."""
    return assistant_from((await _CREATE.fetch(connection, **_creation_values(tenant_id, definition)))[0])


def _key(tenant_id: str, assistant_id: str) -> dict[str, Any]:
    return {"assistant": decode_id(ASSISTANT, assistant_id), "tenant": decode_id(TENANT, tenant_id)}


def _creation_values(tenant_id: str, definition: AssistantDefinition) -> dict[str, Any]:
    return {"assistant": new_uuid(), "tenant": decode_id(TENANT, tenant_id)} | _definition_values(definition)


def _definition_values(definition: AssistantDefinition) -> dict[str, Any]:
    instructions = definition.instructions
    return {
        "name": definition.name,
        "language": definition.language,
        "description": definition.description,
        "provider": definition.provider,
        "model": definition.model,
        "instructions": encode_json(
            {
                "roles": instructions.roles,
                "procedure": instructions.procedure,
                "constraints": instructions.constraints,
            }
        ),
        "variables": encode_json(definition.variables),
        "tools": encode_json(
            [
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
                for tool in definition.tools
            ]
        ),
        "settings": encode_json(definition.settings),
    }
