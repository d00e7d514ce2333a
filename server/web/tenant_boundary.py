"""Requests of superadmin keys for data of other tenants: reads are audited, everything else is refused.

The guards of all routes under `/admin` call `TenantBoundary.cross`, so that no handler has to. A read is audited before
it is answered. The same read within ten minutes leaves no second row: pages are reloaded, and some reload themselves.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from litestar.connection import ASGIConnection

from server.conversation.api_key import ApiKey, Scope
from server.conversation.audit import Action, Actor, AuditDraft, AuditLog
from server.conversation.errors import NotFound, OtherTenantReadOnly, ValidationFailed
from server.conversation.lru import LruCache
from server.inspection.port import Inspector
from server.replay.rerun.service import ReplayService

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_READ_ONLY_POSTS: Final = frozenset(
    {
        "/admin/api/assistants/{assistant_id}/render",
        "/admin/api/assistants/{assistant_id}/check",
        "/admin/assistants/{assistant_id}/check",
        "/admin/conversations/{conversation_id}/export",
    }
)
"""Routes that change nothing although their method is POST."""
_ACTION_PAGES: Final = frozenset(
    {
        *(
            f"/admin/conversations/{{conversation_id}}/{name}"
            for name in ("fork", "cancel", "compact", "undo", "erase")
        ),
        "/admin/assistants/{assistant_id}/edit",
        "/admin/replays/{replay_id}/{action}",
    }
)
"""Pages that ask for confirmation of a change; refused like the change itself."""
_PAGES_OF_ALL_TENANTS: Final = frozenset(
    {"/admin", "/admin/conversations", "/admin/assistants", "/admin/replays", "/admin/audit"}
)
"""Pages without an object that show a superadmin the data of all tenants."""
_REPEAT_SECONDS: Final = 600.0
_MAX_REMEMBERED: Final = 10_000

_Connection = ASGIConnection[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A read of another tenant's data. Equal reads are audited once in `_REPEAT_SECONDS`."""

    key_id: str
    route: str
    tenant_id: str | None
    """None: all tenants."""
    object_id: str | None
    other_parameters: tuple[tuple[str, str], ...]
    """The other path parameters, such as the number of a call."""
    filters: tuple[str, ...]
    """The names of the query parameters. Their values may be content."""


class TenantBoundary:
    """Audits reads of superadmins in other tenants, and refuses changes there."""

    def __init__(
        self,
        *,
        inspector: Inspector,
        replay_service: ReplayService,
        audit_log: AuditLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inspector = inspector
        self._replay_service = replay_service
        self._audit_log = audit_log
        self._clock = clock
        self._audited: LruCache[_Read, float] = LruCache(_MAX_REMEMBERED)

    async def cross(self, connection: _Connection, key: ApiKey, actor: Actor) -> None:
        """Audit the request if it reads data of another tenant.

        Raises `OtherTenantReadOnly` for changes, `ValidationFailed` if the query names several tenants, and
        `DatabaseUnavailable` if the read cannot be audited.
        """
        if not key.opens(Scope.SUPERADMIN):
            return
        method, route = str(connection.scope.get("method")), str(connection.scope.get("path_template"))
        parameters: Mapping[str, Any] = connection.path_params
        found = await self._find_owner(parameters)
        if found is None:
            tenant_id, object_id = _listed_tenant(connection, key, route), None
            if tenant_id == key.tenant_id:
                return
        else:
            object_id, tenant_id = found
            if tenant_id in {None, key.tenant_id}:
                # It does not exist, which the handler answers, or it belongs to the key's own tenant.
                return
            if route in _ACTION_PAGES or (method not in _SAFE_METHODS and route not in _READ_ONLY_POSTS):
                raise OtherTenantReadOnly
        await self._audit(
            _Read(
                key_id=key.id,
                route=route,
                tenant_id=tenant_id,
                object_id=object_id,
                other_parameters=tuple(
                    sorted((name, str(value)) for name, value in parameters.items() if value != object_id)
                ),
                filters=tuple(sorted(set(connection.query_params.keys()) - {"tenant"})),
            ),
            actor,
        )

    async def _find_owner(self, parameters: Mapping[str, Any]) -> tuple[str, str | None] | None:
        """Return the object of the path and its tenant, which is None if it does not exist; None without an object."""
        try:
            match parameters:
                case {"conversation_id": str(conversation_id)}:
                    return conversation_id, await self._inspector.find_tenant(conversation_id)
                case {"replay_id": str(replay_id)}:
                    return replay_id, (await self._replay_service.replays.load_replay(None, replay_id)).tenant_id
                case {"assistant_id": str(assistant_id)}:
                    return assistant_id, (await self._inspector.load_assistant(None, assistant_id)).tenant_id
                case _:
                    return None
        except NotFound:
            return "", None

    async def _audit(self, read: _Read, actor: Actor) -> None:
        now = self._clock()
        audited_at = self._audited.get(read)
        if audited_at is not None and audited_at > now - _REPEAT_SECONDS:
            return
        details: dict[str, object] = {"route": read.route, **dict(read.other_parameters)}
        if read.filters:
            details["filters"] = list(read.filters)
        if read.tenant_id is None:
            details["tenants"] = "all"
        await self._audit_log.append(
            AuditDraft(
                tenant_id=read.tenant_id,
                actor=actor,
                action=Action.READ_OTHER_TENANT,
                object_id=read.object_id,
                details=details,
            )
        )
        self._audited.put(read, now)


def _listed_tenant(connection: _Connection, key: ApiKey, route: str) -> str | None:
    """Return the tenant whose data a route without an object shows; None for all tenants. Raises `ValidationFailed`."""
    if route in _PAGES_OF_ALL_TENANTS:
        return None
    if "tenant" not in connection.route_handler.parsed_fn_signature.parameters:
        return key.tenant_id
    named = connection.query_params.getall("tenant", [key.tenant_id])
    if len(named) > 1:
        # Litestar passes the last value to the handler, which need not be the one that is audited.
        message = "Expected one value."
        raise ValidationFailed(f"tenant: {message}", errors=[{"path": "tenant", "source": "query", "message": message}])
    return None if named[0] == "all" else str(named[0])
