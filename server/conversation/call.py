"""Calls: one request to a provider and everything that came back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.payload import LayerOrder
from server.conversation.usage import Usage

OUTCOME_UNKNOWN: Final = "outcome_unknown"
"""The kind of warning of a call that may have been made and billed, and of whose answer nothing was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """What is known when the request leaves."""

    attempt: int
    """1 for the first call of a turn, then one more for each retry and each continuation of a paused answer."""
    provider: str
    model: str
    account: str
    """Fingerprint of the credentials: signatures and caches do not cross accounts."""
    epoch: int
    started_at: datetime
    manifest: Sequence[Mapping[str, JsonValue]]
    """The ordered blocks of the payload: layer, role, hash, length, cache marker."""
    request_hash: bytes
    """SHA-256 of the request's body. Empty where the process died before it had recorded the call: then the manifest is
    empty too, and neither says anything about the request."""
    layer_order: LayerOrder = LayerOrder.LAYERED
    dynamic: bytes = b""
    """The dynamic layer as it was sent; in the append-only order it is sent again for ever. Empty: there was none."""
    caching: Mapping[str, JsonValue] = field(default_factory=dict)
    """What was asked of the provider's cache, see `server.caching.policy`: a rebuilt request asks for the same."""
    cache_expected_tokens: int | None = None
    """What should have come from the cache; None where nobody can say."""
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
    response_id: str | None = None
    """The provider's name for its answer."""
    cache_miss_reason: str | None = None
    """Why less came from the cache than could have, see `server.caching.expectation`."""
    cost_usd: Decimal | None = None
    error_code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A stored call."""

    turn_seq: int
    """Below zero for a call that belongs to no turn: the number of its epoch, negative."""
    start: CallStart
    end: CallEnd | None
    """None while it runs, and for ever where the process died before it could say."""

    @property
    def trigger_seq(self) -> int:
        """The newest turn in its payload. 0 where there is none: the call belongs to no turn and names none."""
        if self.turn_seq > 0:
            return self.turn_seq - 1
        return max((int(warning.get("last_seq", 0)) for warning in self.start.warnings), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrace:
    """What the next request wants to know of a call."""

    provider: str
    model: str
    account: str
    started_at: datetime
    usage: Usage
    """All zero where nothing was reported."""
    response_id: str | None
    caching: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a running call's body."""

    attempt: int
    offset: int
    """Where the piece begins in the body, so that a piece written twice is written once."""
    data: bytes
