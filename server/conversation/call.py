"""Calls: one request to a provider and its response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.manifest import NewManifest
from server.conversation.payload import LayerOrder
from server.conversation.usage import Usage

OUTCOME_UNKNOWN: Final = "outcome_unknown"
"""The kind of warning for a call that may have been made and charged, but of which no response was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """What is known when the request is sent."""

    attempt: int
    """1 for the first call of a turn, and one more for each retry and each continuation of a paused answer."""
    provider: str
    model: str
    account: str
    """Fingerprint of the credentials. Signatures and caches are not valid for other accounts."""
    epoch: int
    started_at: datetime
    manifest: Sequence[Mapping[str, JsonValue]]
    """The blocks of the payload in order: layer, role, hash, length, cache marker. Empty if `new_manifest` is set."""
    request_hash: bytes
    """SHA-256 of the request's body. Empty if the process stopped before it recorded the call; then the manifest is
    empty too."""
    layer_order: LayerOrder = LayerOrder.LAYERED
    dynamic: bytes = b""
    """The dynamic block as it was sent. In the append-only order it is sent again with every later call. Empty if there
    was none."""
    caching: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the request asked of the provider's cache, see `server.caching.policy`, and the times of its dynamic layer,
    see `server.payload.dynamic_clock`. A rebuilt request has the same."""
    cache_expected_tokens: int | None = None
    """How much should have been read from the cache; None if unknown."""
    repairs: Sequence[Mapping[str, JsonValue]] = ()
    template_failures: Sequence[Mapping[str, JsonValue]] = ()
    warnings: Sequence[Mapping[str, JsonValue]] = ()
    """Assumptions and deviations, such as an assumed profile of an unknown model, or a broken prefix."""
    new_manifest: NewManifest | None = None
    """The manifest of a call that is to be stored, with what it is compared with. None for a stored call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """What is known when the call has ended, with any outcome."""

    ended_at: datetime
    first_byte_at: datetime | None
    status: int | None
    """HTTP status; None if there was no response."""
    headers: Mapping[str, str] = field(default_factory=dict)
    raw_response: bytes | None = b""
    """The body as received; None if retention has removed it."""
    usage: Usage = field(default_factory=Usage)
    usage_reported: Mapping[str, JsonValue] | None = None
    """The provider's usage object, unchanged."""
    response_id: str | None = None
    """The provider's id of its response."""
    cache_miss_reason: str | None = None
    """Why less was read from the cache than possible, see `server.caching.expectation`."""
    cost_usd: Decimal | None = None
    error_code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A stored call."""

    turn_seq: int
    """For a call that belongs to no turn: the negative number of its epoch."""
    start: CallStart
    end: CallEnd | None
    """None while it runs, and if the process stopped before it could record the end."""

    @property
    def trigger_seq(self) -> int:
        """The newest turn in its payload. 0 if the call belongs to no turn and names none."""
        if self.turn_seq > 0:
            return self.turn_seq - 1
        return max((int(warning.get("last_seq", 0)) for warning in self.start.warnings), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrace:
    """What the next request uses of a call."""

    provider: str
    model: str
    account: str
    started_at: datetime
    usage: Usage
    """All zero if no usage was reported."""
    response_id: str | None
    caching: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a running call's response body."""

    attempt: int
    offset: int
    """Its position in the body, so that writing it twice has no effect."""
    data: bytes
