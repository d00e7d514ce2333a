"""API keys: who may come in, and what for.

A key is `strata_<id>_<secret>`. The id finds the row, the secret is 256 random bits, and only its SHA-256 is stored: a
slow hash would protect a guessable password, but nobody guesses 256 bits, and every request pays for it. The text of a
key exists once, in the answer to its creation.
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
    """What a key opens. `client` and `admin` contain nothing of each other; `superadmin` contains `admin`."""

    CLIENT = "client"
    """Assistants, conversations and turns under `/v1`."""

    ADMIN = "admin"
    """Inspection and keys under `/admin`."""

    SUPERADMIN = "superadmin"
    """The same for its own tenant, and reading the data of all tenants. It changes nothing of another tenant, and what
    it reads there is in the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose data it is. Every query is bound to one."""

    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it is stored: everything but its secret."""

    id: str
    tenant_id: str
    tenant_name: str
    name: str
    """What the operator called it, for telling keys apart."""
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """Right to about a minute: it is not written on every request."""

    def opens(self, scope: Scope) -> bool:
        """Whether the key has the scope, or one that contains it."""
        return scope in self.scopes or (scope is Scope.ADMIN and Scope.SUPERADMIN in self.scopes)

    def is_live(self, now: datetime) -> bool:
        """Whether the key still opens anything."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentedKey:
    """A key as a caller sent it, taken apart."""

    id: str
    secret_hash: bytes

    def matches(self, stored_hash: bytes) -> bool:
        """Compares in constant time, so that the answer's delay tells nothing of the hash."""
        return hmac.compare_digest(self.secret_hash, stored_hash)


def issue_key_text(key_id: str) -> str:
    """The text of a new key with this id. Its hash is what `parse_key_text(...).secret_hash` gives."""
    secret = encode_base32(secrets.randbits(_SECRET_BITS), _SECRET_LETTERS)
    return f"{_BRAND}_{key_id.removeprefix(API_KEY + '_')}_{secret}"


def parse_key_text(text: str) -> PresentedKey | None:
    """A presented key, or None where the text cannot be one of ours."""
    brand, _, rest = text.partition("_")
    body, _, secret = rest.partition("_")
    key_id = f"{API_KEY}_{body}"
    if brand != _BRAND or len(secret) != _SECRET_LETTERS or not secret.isascii() or decode_id(API_KEY, key_id) is None:
        return None
    return PresentedKey(id=key_id, secret_hash=hashlib.sha256(secret.encode()).digest())


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


class RateLimiter(Protocol):
    """Counts requests per API key over all processes. Never lets more through than the limit; where several processes
    serve one key, each holds a few permissions in reserve, so slightly less may get through.
    """

    async def admit(self, key_id: str) -> None:
        """Counts one request. Raises `RateLimited` with `retry_after_seconds` where the key has none left."""
        ...
