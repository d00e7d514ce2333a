"""What a call should read from the provider's cache, and why it read less.

The expectation is measured against the call before: what that one left in the cache, as far as the new request begins
with the same blocks and comes in time. Its own usage says how many tokens that is: exactly where all of it comes again,
else by the share of its bytes. A conversation that nothing disturbs reads what is expected, to the token.

Other conversations may keep the same text warm, so more may come than was expected; that is no concern.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.caching.policy import SHORT_SECONDS
from server.conversation.call import CallTrace
from server.conversation.manifest import share_signed_summary
from server.conversation.payload import Layer, LayerOrder, ManifestEntry
from server.conversation.usage import Usage
from server.providers.model_profile import ModelProfile

_SLACK: Final = Decimal("0.05")
"""Less than this share missing is no miss: tokens of a part are estimated by its bytes."""


class MissReason(StrEnum):
    """Why less came from the cache than could have. A provider's own reason stands in its own words."""

    MODEL_CHANGED = "model_changed"
    ACCOUNT_CHANGED = "account_changed"
    EPOCH_BEGAN = "epoch_began"
    """The static text, the tools or the signed summary changed on purpose."""
    ORDER_CHANGED = "order_changed"
    PREFIX_BREAK = "prefix_break"
    """A block changed that should not have; the call's warnings name it."""
    TTL_EXPIRED = "ttl_expired"
    BELOW_MINIMUM = "below_minimum"
    """The request before was too short to be cached."""
    CACHE_GONE = "cache_gone"
    """An explicit cache stood for it, which is no more."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What of a request decides whether it can read what another has left."""

    provider: str
    model: str
    account: str
    order: LayerOrder
    prefix_hash: bytes | None
    manifest: Sequence[ManifestEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheExpectation:
    """What should come from the cache."""

    tokens: int | None = 0
    """None where nobody can say, because the call before was not answered."""
    possible_tokens: int = 0
    """What could come if nothing had changed."""
    reason: MissReason | None = None
    """Why the first is less than the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A place up to which the call before can be read."""

    count: int
    """Blocks before it."""
    seconds: int
    tokens: int


def expect_cache_read(
    previous: Request | None,
    trace: CallTrace | None,
    current: Request,
    profile: ModelProfile,
    *,
    elapsed_seconds: float,
) -> CacheExpectation:
    """For a request without an explicit cache. `trace` is of the call that `previous` was sent with."""
    if previous is None or trace is None:
        return CacheExpectation()
    if not trace.usage.input_tokens:
        return CacheExpectation(tokens=None)
    if "cached_content" in trace.caching:
        possible = trace.usage.cache_read_tokens
        return CacheExpectation(possible_tokens=possible, reason=_find_end(previous, current))
    previous, current = _in_order(previous, profile), _in_order(current, profile)
    shared = _count_shared(previous.manifest, current.manifest)
    due = max(shared, _count_due(previous))
    entries = [entry for entry in _find_entries(previous, trace, profile) if entry.count <= due]
    possible = max((entry.tokens for entry in entries), default=0)
    if reason := _find_change(previous, current):
        return CacheExpectation(possible_tokens=possible, reason=reason)
    if possible < profile.cache_minimum_tokens:
        # Of a request that was too short as a whole nothing was cached, and all of it could have been.
        whole = trace.usage.input_tokens
        possible = possible or (whole if whole < profile.cache_minimum_tokens else 0)
        return CacheExpectation(possible_tokens=possible, reason=MissReason.BELOW_MINIMUM)
    standing = [entry for entry in entries if entry.count <= shared]
    alive = [entry for entry in standing if elapsed_seconds <= entry.seconds]
    tokens = max((entry.tokens for entry in alive), default=0)
    if tokens < profile.cache_minimum_tokens:
        tokens = 0
    if tokens >= possible:
        return CacheExpectation(tokens=tokens, possible_tokens=possible)
    reason = MissReason.TTL_EXPIRED if len(alive) < len(standing) else _find_edit(previous, current)
    return CacheExpectation(tokens=tokens, possible_tokens=possible, reason=reason)


def explain_miss(expectation: CacheExpectation, usage: Usage, provider_reason: str | None) -> str | None:
    """Why less came than could have; None where nothing is missing, or nothing was reported."""
    if not usage.input_tokens or _is_enough(usage.cache_read_tokens, expectation.possible_tokens):
        return None
    if _is_enough(usage.cache_read_tokens, expectation.tokens or 0) and expectation.reason is not None:
        return expectation.reason
    return provider_reason or MissReason.UNKNOWN


def _is_enough(read_tokens: int, wanted_tokens: int) -> bool:
    return read_tokens >= wanted_tokens * (1 - _SLACK)


def _in_order(request: Request, profile: ModelProfile) -> Request:
    """With the blocks as the provider reads them: where no markers are needed, tools stand behind the static text."""
    if profile.breakpoints:
        return request
    return replace(request, manifest=sorted(request.manifest, key=_rank))


def _rank(entry: ManifestEntry) -> int:
    return 2 if entry.layer is not Layer.STATIC else int(entry.kind == "tools")


def _count_shared(previous: Sequence[ManifestEntry], current: Sequence[ManifestEntry]) -> int:
    """How many blocks both begin with."""
    count = 0
    for one, other in zip(previous, current, strict=False):
        if (one.kind, one.hash) != (other.kind, other.hash):
            break
        count += 1
    return count


def _count_due(previous: Request) -> int:
    """How many blocks should come again: in the layered order those of the static layer, else all."""
    if previous.order is LayerOrder.APPEND_ONLY:
        return len(previous.manifest)
    return sum(entry.layer is Layer.STATIC for entry in previous.manifest)


def _find_entries(previous: Request, trace: CallTrace, profile: ModelProfile) -> Iterator[_Entry]:
    """Where markers stood; where none are needed, behind every block."""
    sizes = [_size_of(entry) for entry in previous.manifest]
    total_tokens, total_size = trace.usage.input_tokens, sum(sizes)
    cached_tokens = trace.usage.cache_read_tokens + trace.usage.cache_write_tokens
    marked = [place for place, entry in enumerate(previous.manifest) if entry.marked]
    places = marked if profile.breakpoints else range(len(sizes))
    for place in places:
        if profile.breakpoints and place == marked[-1]:
            tokens = cached_tokens
        elif place == len(sizes) - 1:
            tokens = total_tokens
        else:
            tokens = total_tokens * sum(sizes[: place + 1]) // max(1, total_size)
        yield _Entry(count=place + 1, seconds=_seconds_of(previous.manifest[place], trace), tokens=tokens)


def _size_of(entry: ManifestEntry) -> int:
    """A dynamic block inside a message is among the message's bytes already."""
    return 0 if entry.kind == "dynamic" and entry.seq is not None else entry.length


def _seconds_of(entry: ManifestEntry, trace: CallTrace) -> int:
    seconds = int(trace.caching.get("cache_seconds", SHORT_SECONDS))
    if entry.layer is Layer.STATIC:
        return max(seconds, int(trace.caching.get("static_cache_seconds", SHORT_SECONDS)))
    return seconds


def _find_change(previous: Request, current: Request) -> MissReason | None:
    if (previous.provider, previous.model) != (current.provider, current.model):
        return MissReason.MODEL_CHANGED
    return MissReason.ACCOUNT_CHANGED if previous.account != current.account else None


def _find_end(previous: Request, current: Request) -> MissReason:
    """Why an explicit cache, which the request before named, stands for this one no more."""
    if reason := _find_change(previous, current):
        return reason
    return MissReason.EPOCH_BEGAN if previous.prefix_hash != current.prefix_hash else MissReason.CACHE_GONE


def _find_edit(previous: Request, current: Request) -> MissReason:
    if previous.prefix_hash != current.prefix_hash or not share_signed_summary(previous.manifest, current.manifest):
        return MissReason.EPOCH_BEGAN
    return MissReason.ORDER_CHANGED if previous.order is not current.order else MissReason.PREFIX_BREAK
