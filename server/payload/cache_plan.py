"""The cache plan of a built payload: what it asks of the provider's cache, and how much it should read.

The content of the payload does not change. The plan chooses the lifetime of its breakpoints, the response that the
provider should compare with for its diagnosis, and whether an explicit cache replaces its static text and tools.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from typing import Final

from server.caching.expectation import CacheExpectation, Request, expect_cache_read
from server.caching.explicit_policy import CachePlan, CacheSettings, choose_cache, supports_cache
from server.caching.policy import Rhythm, measure_gaps, plan_lifetimes
from server.conversation.cache_register import CacheKey
from server.conversation.manifest import without_continuation
from server.conversation.payload import LayerOrder, ManifestEntry, Payload
from server.conversation.store import PayloadSource
from server.payload.builder import BuiltPayload
from server.payload.settings import read_cache_settings
from server.providers.model_profile import ModelProfile
from server.providers.pricing import find_price
from server.providers.provider import Provider

_LENGTH: Final = attrgetter("length")


def plan_caching(
    source: PayloadSource,
    built: BuiltPayload,
    *,
    provider: Provider,
    profile: ModelProfile,
    prefix_hash: bytes,
    now: datetime,
) -> CachePlan:
    """Plan the caching of a payload. Pure: the same values give the same plan."""
    settings = read_cache_settings(source.assistant.definition.settings)
    key = CacheKey(provider=provider.name, account=provider.account, model=profile.model, prefix_hash=prefix_hash)
    fits = (
        provider.caches is not None
        and supports_cache(profile, built.order, settings)
        and provider.caches.may_stand_for(built.payload)
    )
    cache = choose_cache(source.cache, key, now) if fits else None
    if cache is not None:
        payload = replace(built.payload, cached_content=cache.name)
        expectation = CacheExpectation(tokens=cache.token_count, possible_tokens=cache.token_count)
    else:
        payload = _request_breakpoints(source, built, key, profile, settings, now)
        expectation = _expect(source, built.order, built.manifest, key, profile, now)
    return CachePlan(
        payload=payload, expectation=expectation, key=key, settings=settings, supports_cache=fits, cache=cache
    )


def _request_breakpoints(
    source: PayloadSource,
    built: BuiltPayload,
    key: CacheKey,
    profile: ModelProfile,
    settings: CacheSettings,
    now: datetime,
) -> Payload:
    if not profile.breakpoints:
        return built.payload
    rhythm = _measure_rhythm(source, built, now)
    price = find_price(profile.model, now, rhythm.prefix_tokens)
    lifetimes = plan_lifetimes(rhythm, price, requested_seconds=settings.ttl_seconds)
    previous = source.previous_call
    is_comparable = previous is not None and (previous.provider, previous.account) == (key.provider, key.account)
    return replace(
        built.payload,
        cache_seconds=lifetimes.message_seconds,
        static_cache_seconds=lifetimes.static_seconds,
        requests_diagnosis=True,
        previous_response_id=previous.response_id if previous is not None and is_comparable else None,
    )


def _measure_rhythm(source: PayloadSource, built: BuiltPayload, now: datetime) -> Rhythm:
    gaps = measure_gaps(source.recent_call_times, now)
    if source.previous_call is None:
        return Rhythm(gaps_seconds=gaps, prefix_tokens=0, growth_tokens=0)
    tokens = source.previous_call.usage.input_tokens
    before = sum(map(_LENGTH, source.previous_manifest))
    grown = max(0, sum(map(_LENGTH, built.manifest)) - before)
    return Rhythm(gaps_seconds=gaps, prefix_tokens=tokens, growth_tokens=grown * tokens // max(1, before))


def expect_background_read(
    source: PayloadSource, manifest: Sequence[ManifestEntry], key: CacheKey, profile: ModelProfile, now: datetime
) -> CacheExpectation:
    """Estimate the cache read of a call that belongs to no turn: at most what it shares with the previous call."""
    aside = replace(source, previous_order=source.previous_order and LayerOrder.LAYERED)
    return _expect(aside, LayerOrder.LAYERED, manifest, key, profile, now)


def _expect(
    source: PayloadSource,
    present_order: LayerOrder,
    manifest: Sequence[ManifestEntry],
    key: CacheKey,
    profile: ModelProfile,
    now: datetime,
) -> CacheExpectation:
    trace, order = source.previous_call, source.previous_order
    current = Request(
        provider=key.provider,
        model=key.model,
        account=key.account,
        order=present_order,
        prefix_hash=key.prefix_hash,
        manifest=manifest,
    )
    if trace is None or order is None:
        return expect_cache_read(None, None, current, profile, elapsed_seconds=0)
    previous = Request(
        provider=trace.provider,
        model=trace.model,
        account=trace.account,
        order=order,
        prefix_hash=source.previous_prefix_hash,
        manifest=without_continuation(source.previous_manifest),
    )
    elapsed = (now - trace.started_at).total_seconds()
    return expect_cache_read(previous, trace, current, profile, elapsed_seconds=elapsed)
