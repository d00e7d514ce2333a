"""Calls: one request to a provider and everything that came back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from server.block import JsonValue
from server.payload import LayerOrder
from server.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """What is known when the request leaves."""

    attempt: int
    """1 for the first call of a turn, then one more for each retry."""
    provider: str
    model: str
    account: str
    """Fingerprint of the credentials: signatures and caches do not cross accounts."""
    epoch: int
    started_at: datetime
    manifest: Sequence[Mapping[str, JsonValue]]
    """The ordered blocks of the payload: layer, role, hash, length, cache marker."""
    request_hash: bytes
    layer_order: LayerOrder = LayerOrder.LAYERED
    dynamic: bytes = b""
    """The dynamic layer as it was sent; in the append-only order it is sent again for ever. Empty: there was none."""
    cache_expected_tokens: int | None = None
    repairs: Sequence[Mapping[str, JsonValue]] = ()
    template_failures: Sequence[Mapping[str, JsonValue]] = ()
    warnings: Sequence[Mapping[str, JsonValue]] = ()
    """What was assumed or done without, such as the profile of a model that is not listed, or a prefix that broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """What is known when it is over, however it ended."""

    ended_at: datetime
    first_byte_at: datetime | None
    status: int | None
    """HTTP status; None where no answer came."""
    headers: Mapping[str, str] = field(default_factory=dict)
    raw_response: bytes | None = b""
    """Every byte of the body, as it came from the wire; None where retention has removed them."""
    usage: Usage = field(default_factory=Usage)
    usage_reported: Mapping[str, JsonValue] | None = None
    """The provider's own usage object, untouched."""
    cache_miss_reason: str | None = None
    cost_usd: Decimal | None = None
    error_code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A stored call."""

    turn_seq: int
    start: CallStart
    end: CallEnd | None
    """None while it runs, and for ever where the process died before it could say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a running call's body."""

    attempt: int
    offset: int
    """Where the piece begins in the body, so that a piece written twice is written once."""
    data: bytes
