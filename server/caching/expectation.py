"""How much a call should read from the provider's cache, and why it read less.

The expectation is derived from the previous call: the prefix that it left in the cache, as far as the new request
begins with the same blocks and is sent before the cache expires. The previous call's usage gives the number of tokens:
exact if the whole request is repeated, otherwise by its share of the bytes. In an undisturbed conversation the provider
reports exactly the expected number.

A call may read more than expected, because other conversations use the same text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.caching.policy import SHORT_SECONDS
from server.conversation.call import CallTrace
from server.conversation.manifest import count_shared, list_static, repeats_all, share_signed_summary
from server.conversation.payload import Layer, LayerOrder, ManifestEntry
from server.conversation.usage import Usage
from server.providers.model_profile import ModelProfile

_TOLERANCE: Final = Decimal("0.05")
"""A smaller share missing is no miss, because the tokens of a part are estimated by its bytes."""


class MissReason(StrEnum):
    """Why a call read less than it could have. A provider's own reason is stored as the provider gave it."""

    MODEL_CHANGED = "model_changed"
    ACCOUNT_CHANGED = "account_changed"
    EPOCH_BEGAN = "epoch_began"
    """The static text, the tools or the signed summary changed with a new epoch."""
    ORDER_CHANGED = "order_changed"
    PREFIX_BREAK = "prefix_break"
    """A block changed unexpectedly; the call's warnings name it."""
    TTL_EXPIRED = "ttl_expired"
    BELOW_MINIMUM = "below_minimum"
    """The previous request was too short to be cached."""
    CACHE_GONE = "cache_gone"
    """The explicit cache of the request has expired or was deleted."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The parts of a request that decide whether it can read the cache of another."""

    provider: str
    model: str
    account: str
    order: LayerOrder
    prefix_hash: bytes | None
    manifest: Sequence[ManifestEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheExpectation:
    """How much should be read from the cache."""

    tokens: int | None = 0
    """None if unknown, because the previous call had no answer."""
    possible_tokens: int = 0
    """How much could be read if nothing had changed."""
    reason: MissReason | None = None
    """Why `tokens` is less than `possible_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedPrefix:
    """A prefix of the previous request that can be read."""

    count: int
    """Number of blocks."""
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
    """Estimate the cache read of a request without an explicit cache. `trace` is the call of `previous`."""
    if previous is None or trace is None:
        return CacheExpectation()
    if not trace.usage.input_tokens:
        return CacheExpectation(tokens=None)
    if "cached_content" in trace.caching:
        possible = trace.usage.cache_read_tokens
        return CacheExpectation(possible_tokens=possible, reason=_explain_missing_cache(previous, current))
    previous, current = _in_cache_order(previous, profile), _in_cache_order(current, profile)
    shared = count_shared(previous.manifest, current.manifest, by_hash=True)
    expected_count = max(shared, _count_repeated(previous, current))
    prefixes = [
        entry
        for entry in _list_cached_prefixes(previous, trace, profile, (shared, expected_count))
        if entry.count <= expected_count
    ]
    possible = max((entry.tokens for entry in prefixes), default=0)
    if reason := _explain_change(previous, current):
        return CacheExpectation(possible_tokens=possible, reason=reason)
    if possible < profile.cache_minimum_tokens:
        # A request that was too short was not cached at all, and could have been cached completely.
        whole = trace.usage.input_tokens
        possible = possible or (whole if whole < profile.cache_minimum_tokens else 0)
        return CacheExpectation(possible_tokens=possible, reason=MissReason.BELOW_MINIMUM)
    unchanged = [entry for entry in prefixes if entry.count <= shared]
    alive = [entry for entry in unchanged if elapsed_seconds <= entry.seconds]
    tokens = max((entry.tokens for entry in alive), default=0)
    if tokens < profile.cache_minimum_tokens:
        tokens = 0
    if tokens >= possible:
        return CacheExpectation(tokens=tokens, possible_tokens=possible)
    reason = MissReason.TTL_EXPIRED if len(alive) < len(unchanged) else _explain_edit(previous, current)
    return CacheExpectation(tokens=tokens, possible_tokens=possible, reason=reason)


def explain_miss(expectation: CacheExpectation, usage: Usage, provider_reason: str | None) -> str | None:
    """Return why less was read than possible. None if nothing is missing, or the provider reported no usage."""
    if not usage.input_tokens or _is_enough(usage.cache_read_tokens, expectation.possible_tokens):
        return None
    if _is_enough(usage.cache_read_tokens, expectation.tokens or 0) and expectation.reason is not None:
        return expectation.reason
    return provider_reason or MissReason.UNKNOWN


def _is_enough(read_tokens: int, expected_tokens: int) -> bool:
    return read_tokens >= expected_tokens * (1 - _TOLERANCE)


def _in_cache_order(request: Request, profile: ModelProfile) -> Request:
    """Order the blocks as the provider caches them: without breakpoints, tools come after the static text."""
    if profile.breakpoints:
        return request
    static = list_static(request.manifest)
    if not static or static[0].kind != "tools":
        return request
    return replace(request, manifest=(*static[1:], static[0], *request.manifest[len(static) :]))


def _count_repeated(previous: Request, current: Request) -> int:
    """Count the blocks that should be repeated: those of the static layer if a separate dynamic block has changed,
    otherwise all.
    """
    if repeats_all(previous.manifest, current.manifest, previous.order):
        return len(previous.manifest)
    return len(list_static(previous.manifest))


def _list_cached_prefixes(
    previous: Request, trace: CallTrace, profile: ModelProfile, counts: tuple[int, ...]
) -> Iterator[_CachedPrefix]:
    """The prefixes before the breakpoints. If the model needs none, it caches after every block; then those of the
    static layer and of `counts` blocks are listed.
    """
    sizes = [_size_of(entry) for entry in previous.manifest]
    total_tokens, total_size = trace.usage.input_tokens, sum(sizes)
    cached_tokens = trace.usage.cache_read_tokens + trace.usage.cache_write_tokens
    marked = [index for index, entry in enumerate(previous.manifest) if entry.marked]
    listed = {count - 1 for count in (len(list_static(previous.manifest)), *counts) if 0 < count <= len(sizes)}
    for index in marked if profile.breakpoints else sorted(listed):
        if profile.breakpoints and index == marked[-1]:
            tokens = cached_tokens
        elif index == len(sizes) - 1:
            tokens = total_tokens
        else:
            tokens = total_tokens * sum(sizes[: index + 1]) // max(1, total_size)
        yield _CachedPrefix(count=index + 1, seconds=_lifetime_of(previous.manifest[index], trace), tokens=tokens)


def _size_of(entry: ManifestEntry) -> int:
    """0 for a dynamic block inside a message, because the message's bytes include it."""
    return 0 if entry.kind == "dynamic" and entry.seq is not None else entry.length


def _lifetime_of(entry: ManifestEntry, trace: CallTrace) -> int:
    seconds = int(trace.caching.get("cache_seconds", SHORT_SECONDS))
    if entry.layer is Layer.STATIC:
        return max(seconds, int(trace.caching.get("static_cache_seconds", SHORT_SECONDS)))
    return seconds


def _explain_change(previous: Request, current: Request) -> MissReason | None:
    if (previous.provider, previous.model) != (current.provider, current.model):
        return MissReason.MODEL_CHANGED
    return MissReason.ACCOUNT_CHANGED if previous.account != current.account else None


def _explain_missing_cache(previous: Request, current: Request) -> MissReason:
    """Return why the explicit cache of the previous request is not used for this one."""
    if reason := _explain_change(previous, current):
        return reason
    return MissReason.EPOCH_BEGAN if previous.prefix_hash != current.prefix_hash else MissReason.CACHE_GONE


def _explain_edit(previous: Request, current: Request) -> MissReason:
    if previous.prefix_hash != current.prefix_hash or not share_signed_summary(previous.manifest, current.manifest):
        return MissReason.EPOCH_BEGAN
    return MissReason.ORDER_CHANGED if previous.order is not current.order else MissReason.PREFIX_BREAK
