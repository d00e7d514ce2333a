"""Leases, as seen by components other than the turn that holds them: watched, cancelled, found expired, taken over,
released.

The statements that a running turn makes with its lease are in `running`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from sqlalchemy import Integer, bindparam, func, select, update

from server.conversation.conversation import Lease
from server.conversation.errors import ConversationNotFound, LeaseLost, TurnNotRunning
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, encode_id
from server.conversation.notifications import Notification
from server.postgres.codec import decode_text
from server.postgres.engine import Statement, StorePart
from server.postgres.notifications import notify_sql
from server.postgres.paging import bounded, in_range
from server.postgres.tables import conversations

_c = conversations.c

_REQUEST_CANCEL: Final = Statement(f"""
WITH seen AS (
    SELECT id FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE
),
marked AS (
    UPDATE conversations SET cancel_requested_at = coalesce(cancel_requested_at, now())
    WHERE id = :conversation AND EXISTS (SELECT FROM seen) AND lease_token IS NOT NULL
        AND (:turn_seq::bigint IS NULL OR lease_turn_seq = :turn_seq)
    RETURNING id, lease_turn_seq
)
SELECT marked.lease_turn_seq, (SELECT {notify_sql(Notification.CANCELLING, "marked.id")} WHERE marked.id IS NOT NULL)
FROM seen LEFT JOIN marked ON true
""")  # noqa: S608  reason: constants of this module only
# Does not write the row again while an earlier request is valid for longer, such as one of another process.
_REQUEST_GROWTH: Final = Statement("""
UPDATE conversations SET listened_until = now() + :seconds::float8 * interval '1 second'
WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE AND lease_turn_seq = :turn_seq::bigint
    AND (listened_until > now() + :seconds::float8 * interval '1 second') IS NOT TRUE
""")
_EXPIRED: Final = select(_c.tenant_id, _c.id, _c.lease_token, _c.lease_owner, _c.lease_turn_seq).where(
    _c.lease_token.is_not(None), _c.lease_expires_at < func.now()
)
_LIST_EXPIRED: Final = Statement(_EXPIRED.order_by(_c.id).limit(bindparam("count", type_=Integer)))
_FIND_EXPIRED: Final = Statement(_EXPIRED.where(_c.id == bindparam("conversation")))
_TAKE_OVER: Final = Statement("""
UPDATE conversations SET
    lease_token = :new_token,
    lease_owner = :owner,
    lease_expires_at = now() + :lease_seconds::float8 * interval '1 second'
WHERE id = :conversation AND ((lease_token = :token AND lease_expires_at < now()) OR lease_token = :new_token)
RETURNING id
""")
_SURRENDER: Final = Statement(
    update(conversations)
    .where(_c.lease_token.is_not(None), _c.lease_owner == bindparam("owner"))
    .values(lease_expires_at=func.now())
    .returning(_c.id)
)


class LeaseStore(StorePart):
    """Requests cancellations and notifications, and lists, takes over and expires leases."""

    async def request_cancel(self, tenant_id: str, conversation_id: str, *, turn_seq: int | None = None) -> int:
        rows = await self._database.run(
            _REQUEST_CANCEL,
            conversation=decode_id(CONVERSATION, conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            turn_seq=None if turn_seq is None else in_range(turn_seq),
        )
        if not rows:
            raise ConversationNotFound
        running: int | None = rows[0]["lease_turn_seq"]
        if running is None:
            raise TurnNotRunning
        return running

    async def request_growth_notifications(
        self, tenant_id: str, conversation_id: str, turn_seq: int, *, seconds: float
    ) -> None:
        await self._database.run(
            _REQUEST_GROWTH,
            conversation=decode_id(CONVERSATION, conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            turn_seq=in_range(turn_seq),
            seconds=seconds,
        )

    async def list_expired_leases(
        self, *, conversation_id: str | None = None, limit: int = 100
    ) -> Sequence[tuple[str, Lease]]:
        if conversation_id is None:
            rows = await self._database.run(_LIST_EXPIRED, count=bounded(limit))
        else:
            rows = await self._database.run(_FIND_EXPIRED, conversation=decode_id(CONVERSATION, conversation_id))
        return [
            (
                encode_id(TENANT, row["tenant_id"]),
                Lease(
                    conversation_id=encode_id(CONVERSATION, row["id"]),
                    token=row["lease_token"],
                    owner=decode_text(row["lease_owner"]),
                    turn_seq=row["lease_turn_seq"],
                ),
            )
            for row in rows
        ]

    async def take_over_lease(self, lease: Lease, *, token: UUID, owner: str, lease_seconds: float) -> Lease:
        rows = await self._database.run(
            _TAKE_OVER,
            conversation=decode_id(CONVERSATION, lease.conversation_id),
            token=lease.token,
            new_token=token,
            owner=owner,
            lease_seconds=lease_seconds,
        )
        if not rows:
            raise LeaseLost
        return replace(lease, token=token, owner=owner)

    async def expire_leases(self, owner: str) -> int:
        return len(await self._database.run(_SURRENDER, owner=owner))
