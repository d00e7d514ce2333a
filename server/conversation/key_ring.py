"""The port to tenants and their keys."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from server.conversation.api_key import ApiKey, PresentedKey, Scope, Tenant
from server.conversation.audit import OPERATOR, Actor


class KeyRing(Protocol):
    """Tenants and API keys. Expiry is judged by the database's clock, the same for every process.

    Raises `DatabaseUnavailable` from any method.
    """

    async def create_tenant(self, name: str) -> Tenant:
        """Raises `TenantExists`."""
        ...

    async def load_tenant(self, name: str) -> Tenant:
        """Raises `TenantNotFound`."""
        ...

    async def list_tenants(self) -> Sequence[Tenant]:
        """All of them, by name."""
        ...

    async def create_key(
        self,
        *,
        tenant_id: str,
        name: str,
        scopes: frozenset[Scope],
        expires_at: datetime | None,
        by: Actor = OPERATOR,
    ) -> tuple[ApiKey, str]:
        """The key and its text, which is never to be had again. The audit log tells of it in the same transaction.

        Raises `TenantNotFound`.
        """
        ...

    async def find_live_key(self, presented: PresentedKey) -> ApiKey | None:
        """The key if its secret matches and it is neither expired nor revoked. At most one round trip; notes the use,
        though not every time.
        """
        ...

    async def load_key(self, *, tenant_id: str, key_id: str) -> ApiKey:
        """Raises `ApiKeyNotFound`, also for a key of another tenant."""
        ...

    async def list_keys(self, tenant_id: str | None = None) -> Sequence[ApiKey]:
        """The keys of one tenant, or of all: oldest first, revoked and expired ones included."""
        ...

    async def revoke_key(self, key_id: str, by: Actor = OPERATOR) -> ApiKey:
        """From the moment this returns the key opens nothing in this process. Others learn of it within moments; one
        that cannot hear of it asks for every request again, or at the latest half a minute after it last did.

        Revoking twice keeps the first time. The audit log tells of it in the same transaction. Raises
        `ApiKeyNotFound`.
        """
        ...
