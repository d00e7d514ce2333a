"""Sessions of operators: a session represents an admin key, so that a browser does not store the key.

The cookie contains a token of 256 random bits, and the database its SHA-256. A session ends by logout, inactivity or
age, and immediately when its key is revoked. Failed logins are counted per key and address over all processes, and
delay further attempts of this pair. The right secret always works, so that failed attempts cannot lock out the owner of
a key: a secret of 256 bits cannot be guessed, so only the load and the entries in the audit log have to be limited.
"""

import hashlib
import hmac
import ipaddress
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from server.conversation.api_key import ApiKey, PresentedKey, Scope
from server.conversation.audit import Actor

_SECRET_BYTES: Final = 32
_CSRF_PURPOSE: Final = b"strata-csrf"
_IPV6_NETWORK_BITS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of sessions and of failed logins."""

    idle_seconds: float = 30 * 60
    """A session ends after this time without a request."""
    age_seconds: float = 12 * 60 * 60
    """A session ends at this age."""
    max_failures: int = 5
    """Number of wrong secrets for one key from one address after which further ones are delayed."""
    lock_seconds: float = 15 * 60
    """Maximum delay. It starts with one second and doubles with each failure. Older failures are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSession:
    """The session of an operator."""

    id: str
    """Identifies the session in the audit log; not a secret."""
    key: ApiKey
    csrf_secret: bytes
    address: str | None
    created_at: datetime
    last_seen_at: datetime

    @property
    def tenant_scope(self) -> str | None:
        """The tenant whose data is shown. None for all tenants."""
        return None if Scope.SUPERADMIN in self.key.scopes else self.key.tenant_id

    @property
    def csrf_token(self) -> str:
        """The token in the forms of the session."""
        return hmac.digest(self.csrf_secret, _CSRF_PURPOSE, "sha256").hex()

    def takes(self, csrf_token: str) -> bool:
        """Whether a form was made for this session; compared in constant time."""
        return hmac.compare_digest(self.csrf_token.encode(), csrf_token.encode("utf-8", "replace"))

    def actor(self, address: str | None) -> Actor:
        """Return the actor for the audit log."""
        return Actor(key_id=self.key.id, session_id=self.id, address=address)


def new_secret() -> bytes:
    """Return 256 random bits."""
    return secrets.token_bytes(_SECRET_BYTES)


def hash_token(token: str) -> bytes:
    """Hash a token for storage. A fast hash is enough, because 256 bits cannot be guessed."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def lock_subject(known_key_id: str | None, address: str | None) -> str:
    """Return the name under which failed logins are counted: the key and the address.

    Unknown keys are counted together, otherwise each would be a row of its own. IPv6 addresses are counted by their
    network of 64 bits, since one host usually has all addresses of it.
    """
    return f"{known_key_id or 'unknown'} {_network_of(address) if address else 'unknown'}"


def _network_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))
    return str(parsed)


class AdminSessions(Protocol):
    """Stores sessions, by the clock of the database. Every method may raise `DatabaseUnavailable`.

    Logins, failed logins and logouts are audited in the same transaction. Failures during a delay are not audited,
    because their number is not limited.
    """

    async def log_in(self, presented: PresentedKey | None, *, address: str | None) -> tuple[AdminSession, str]:
        """Open a session and return it with its token, which cannot be read again. The right secret always works.

        Raises `KeyRejected`, `ScopeMissing` for a valid key without an admin scope, and `LoginLocked` instead of either
        during a delay.
        """
        ...

    async def find_session(self, token: str) -> AdminSession | None:
        """Find the session of a token and record the activity, in one round trip. None if it has ended."""
        ...

    async def log_out(self, session: AdminSession, *, address: str | None) -> None:
        """End a session. Does nothing if it has ended."""
        ...
