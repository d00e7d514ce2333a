"""API keys, and the ports to keys and rate limits.

A key is `strata_<id>_<secret>`. The id finds the row, the secret is 256 random bits, and only its SHA-256 is stored. A
slow hash would protect a guessable password; 256 random bits cannot be guessed, and the hash is computed for every
request. The text of a key is returned once, when it is created.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.audit import OPERATOR, Actor
from server.conversation.identifiers import API_KEY, decode_id, encode_base32

_BRAND: Final = "strata"
_SECRET_BITS: Final = 256
_SECRET_LETTERS: Final = 52


class Scope(StrEnum):
    """What a key gives access to. `client` and `admin` are independent; `superadmin` includes `admin`."""

    CLIENT = "client"
    """Assistants, conversations and turns under `/v1`."""

    ADMIN = "admin"
    """Inspection and keys under `/admin`."""

    SUPERADMIN = "superadmin"
    """The same for its own tenant, and read access to the data of all tenants. Reads of other tenants' data are in the
    audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The owner of data. Every query is bound to one tenant."""

    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key, without its secret."""

    id: str
    tenant_id: str
    tenant_name: str
    name: str
    """A name for operators."""
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """Accurate to about a minute, because it is not written on every request."""

    def opens(self, scope: Scope) -> bool:
        """Return whether the key has the scope, or one that includes it."""
        return scope in self.scopes or (scope is Scope.ADMIN and Scope.SUPERADMIN in self.scopes)

    def is_live(self, now: datetime) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentedKey:
    """A key that a caller sent, parsed."""

    id: str
    secret_hash: bytes

    def matches(self, stored_hash: bytes) -> bool:
        """Compare in constant time, so that the response time reveals nothing about the hash."""
        return hmac.compare_digest(self.secret_hash, stored_hash)


def issue_key_text(key_id: str) -> str:
    """Return the text of a new key with this id. `parse_key_text(...).secret_hash` is its hash."""
    secret = encode_base32(secrets.randbits(_SECRET_BITS), _SECRET_LETTERS)
    return f"{_BRAND}_{key_id.removeprefix(API_KEY + '_')}_{secret}"


def parse_key_text(text: str) -> PresentedKey | None:
    """Parse a presented key. None if the text cannot be a key of Strata."""
    brand, _, rest = text.partition("_")
    body, _, secret = rest.partition("_")
    key_id = f"{API_KEY}_{body}"
    if brand != _BRAND or len(secret) != _SECRET_LETTERS or not secret.isascii() or decode_id(API_KEY, key_id) is None:
        return None
    return PresentedKey(id=key_id, secret_hash=hashlib.sha256(secret.encode()).digest())


class KeyRing(Protocol):
    """Tenants and API keys. Expiry is decided by the database's clock, which is the same for all processes.

    Every method raises `DatabaseUnavailable`.
    """

    async def create_tenant(self, name: str) -> Tenant:
        """Raises `TenantExists`."""
        ...

    async def load_tenant(self, name: str) -> Tenant:
        """Raises `TenantNotFound`."""
        ...

    async def list_tenants(self) -> Sequence[Tenant]:
        """List all tenants by name."""
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
        """Create a key and return it with its text, which cannot be read again. The audit entry is written in the same
        transaction.

        Raises `TenantNotFound`.
        """
        ...

    async def find_live_key(self, presented: PresentedKey) -> ApiKey | None:
        """Return the key if its secret matches and it is neither expired nor revoked. At most one round trip. Records
        the use, but not every time.
        """
        ...

    async def load_key(self, *, tenant_id: str, key_id: str) -> ApiKey:
        """Raises `ApiKeyNotFound`, also for a key of another tenant."""
        ...

    async def list_keys(self, tenant_id: str | None = None) -> Sequence[ApiKey]:
        """List the keys of one tenant or of all, oldest first, including revoked and expired ones."""
        ...

    async def revoke_key(self, key_id: str, by: Actor = OPERATOR) -> ApiKey:
        """Revoke a key. When this returns, the key is invalid in this process.

        Other processes are notified within moments. A process that cannot receive notifications checks a key for every
        request, or at the latest 30 seconds after the last check. Revoking twice keeps the first time. The audit entry
        is written in the same transaction. Raises `ApiKeyNotFound`.
        """
        ...


class RateLimiter(Protocol):
    """Counts requests per API key over all processes.

    It never admits more than the limit. If several processes serve one key, each reserves a few permissions, so
    slightly fewer may be admitted.
    """

    async def admit(self, key_id: str) -> None:
        """Count one request. Raises `RateLimited` with `retry_after_seconds` if the limit is reached."""
        ...
