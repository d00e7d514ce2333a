"""Operators who are logged in: a session stands for an admin key, so that a browser need not keep the key.

The cookie holds a token of 256 random bits and the database its SHA-256. A session ends by logging out, by rest, by
age, and at once with its key. Failed logins slow down the address that they come from, for the key that they name: they
are counted by this pair, over all processes. The right secret is always let in, so that nobody can lock the owner of a
key out: a secret of 256 bits is not guessed, and what has to be limited is the load and the rows in the audit log.
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
    """How long a session lasts, and how often one may fail to open one."""

    idle_seconds: float = 30 * 60
    """Without a request for so long, a session is over."""
    age_seconds: float = 12 * 60 * 60
    """And however busy it is, after so long."""
    max_failures: int = 5
    """Number of wrong secrets for one key from one address after which further ones are delayed."""
    lock_seconds: float = 15 * 60
    """Longest delay. It begins with one second and doubles with each further failure. A failure that is longer ago than
    this is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSession:
    """Somebody who is logged in."""

    id: str
    """Names the session in the audit log; it opens nothing."""
    key: ApiKey
    csrf_secret: bytes
    address: str | None
    created_at: datetime
    last_seen_at: datetime

    @property
    def tenant_scope(self) -> str | None:
        """Whose conversations and whose log are shown. None: those of all tenants."""
        return None if Scope.SUPERADMIN in self.key.scopes else self.key.tenant_id

    @property
    def csrf_token(self) -> str:
        """What the session's own forms carry and nobody else knows."""
        return hmac.digest(self.csrf_secret, _CSRF_PURPOSE, "sha256").hex()

    def takes(self, csrf_token: str) -> bool:
        """Whether a form was made for this session. In constant time."""
        return hmac.compare_digest(self.csrf_token.encode(), csrf_token.encode("utf-8", "replace"))

    def actor(self, address: str | None) -> Actor:
        """Who acts, for the audit log."""
        return Actor(key_id=self.key.id, session_id=self.id, address=address)


def new_secret() -> bytes:
    """256 random bits."""
    return secrets.token_bytes(_SECRET_BYTES)


def hash_token(token: str) -> bytes:
    """What is stored of a token. Nobody guesses 256 bits, so a quick hash will do."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def lock_subject(known_key_id: str | None, address: str | None) -> str:
    """Under which name a failed login is counted: the key and the address.

    Ids that are no key's are counted as one, or each would be a row of its own. Of an IPv6 address its network of
    64 bits counts: whoever has one address there has them all.
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
    """The sessions. Times are judged by the database's clock. Raises `DatabaseUnavailable` from any method.

    Logging in, whether it succeeds or not, and logging out are audited in the transaction that does it. Failures while
    the key and address have to wait are not: there may be any number of them.
    """

    async def log_in(self, presented: PresentedKey | None, *, address: str | None) -> tuple[AdminSession, str]:
        """A new session and its token, which is never to be had again. The right secret is let in at any time.

        Raises `KeyRejected`, `ScopeMissing` for a live key that opens no page, and `LoginLocked` instead of either
        while the key and address have to wait.
        """
        ...

    async def find_session(self, token: str) -> AdminSession | None:
        """The session of a token while it lasts; the visit keeps it from resting. One round trip."""
        ...

    async def log_out(self, session: AdminSession, *, address: str | None) -> None:
        """Ends the session. Ending it twice changes nothing."""
        ...
