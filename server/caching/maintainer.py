"""The maintainer of explicit caches: creates them if they pay off, renews them while they are used, and deletes them
afterwards.

None of this delays a turn. A turn uses the cache that its conversation is registered for. After the call, the
maintainer prepares the next turn in the background:

| observation                                            | action                                                    |
|--------------------------------------------------------|-----------------------------------------------------------|
| the cache was used, and half of its lifetime is over   | renew it                                                  |
| the cache was missing at the provider                  | remove it from the register                               |
| no cache, but another conversation has a suitable one  | register the conversation for that cache                  |
| no cache, and one would pay off                        | create one, unless that exceeds the budget for storage    |
| caches without users                                   | delete them at the provider, then in the register         |

A cache is reserved in the register, and counts against the budget, before it is created. A process that crashes in
between leaves a reservation without a name, and possibly a cache. After some minutes the sweep of any process with the
same account finds the cache by its label and removes both. Without such a process, the cache expires.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Final
from uuid import UUID

from server.caching.explicit_policy import (
    DEFAULT_TTL_SECONDS,
    CachePlan,
    Demand,
    ExplicitChoice,
    is_worthwhile,
    needs_renewal,
    storage_usd_per_hour,
)
from server.conversation.cache_register import CacheKey, CacheRegister, RegisteredCache, cache_label
from server.conversation.errors import (
    CacheGone,
    ConversationNotFound,
    DatabaseUnavailable,
    ProviderAuthentication,
    ProviderFailed,
    ProviderQuotaExceeded,
    ProviderRateLimited,
    ProviderRejected,
)
from server.conversation.lru import LruCache
from server.conversation.manifest import encode_tools
from server.conversation.payload import Payload
from server.conversation.usage import Usage
from server.providers.model_profile import find_profile
from server.providers.pricing import find_price
from server.providers.provider import ExplicitCaches, Provider
from server.providers.token_estimate import TokenEstimate

_HOUR: Final = timedelta(hours=1)
_MAX_KEYS: Final = 10_000
_MAX_CALLS: Final = 200
_RECHECK_INTERVAL: Final = timedelta(minutes=1)
"""How long the absence of a cache, or a failure to create one, is remembered."""
_NOT_CREATED: Final = (ProviderRejected, ProviderAuthentication, ProviderRateLimited, ProviderQuotaExceeded)
"""After one of these errors there is no cache. After any other the provider may have created one."""
_log = logging.getLogger("strata.caches")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheObservation:
    """A provider call of a turn, as far as it concerns caches."""

    tenant_id: str
    conversation_id: str
    plan: CachePlan
    usage: Usage
    """Of the successful call."""
    started_at: datetime
    was_missing: bool
    """The planned cache did not exist, and the turn continued without it."""


@dataclass(slots=True)
class _PrefixStats:
    """What this process has observed about one prefix."""

    calls: deque[datetime] = field(default_factory=lambda: deque(maxlen=_MAX_CALLS))
    expected_tokens: int = 0
    read_tokens: int = 0
    observed_calls: int = 0
    recheck_at: datetime | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class CacheMaintainer:
    """Maintains the explicit caches that the turns of this process use."""

    def __init__(
        self,
        register: CacheRegister,
        providers: Mapping[str, Provider],
        estimate: TokenEstimate,
        *,
        budget_usd_per_hour: Decimal,
        sweep_seconds: float = 60.0,
    ) -> None:
        self._register = register
        self._caches = {
            provider.name: provider.caches for provider in providers.values() if provider.caches is not None
        }
        self._accounts = [provider.account for provider in providers.values() if provider.caches is not None]
        self._estimate = estimate
        self._budget_usd_per_hour = budget_usd_per_hour
        self._sweep_seconds = sweep_seconds
        self._stats: LruCache[CacheKey, _PrefixStats] = LruCache(_MAX_KEYS)
        self._running: set[asyncio.Task[None]] = set()

    def observe_call(self, call: CacheObservation) -> None:
        """Count the call and return. Maintenance that follows runs in the background."""
        plan = call.plan
        if not plan.supports_cache:
            return
        stats = self._count_call(call)
        if plan.cache is not None:
            self._start(partial(self._maintain, call, plan.cache))
        elif self._should_look(plan, stats, call.started_at):
            self._start(partial(self._join_or_create, call, stats))

    async def sweep(self) -> int:
        """Delete caches without users. Return how many were deleted."""
        removed = 0
        for cache in await self._register.claim_unused_caches(self._accounts):
            removed += await self._remove(cache)
        return removed

    async def watch(self) -> None:
        """Sweep until cancelled."""
        while self._caches:
            try:
                await self.sweep()
            except DatabaseUnavailable as error:
                _log.warning("caches.sweep_failed", extra={"code": error.code})
            await asyncio.sleep(self._sweep_seconds)

    async def settle(self) -> None:
        """Wait until all started maintenance has ended."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def close(self) -> None:
        """Cancel maintenance in progress. A later sweep finds a cache that was created and not registered."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(_log_failure(work), name="maintain explicit cache")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _count_call(self, call: CacheObservation) -> _PrefixStats:
        key = call.plan.key
        stats = self._stats.get(key)
        if stats is None:
            stats = _PrefixStats()
            self._stats.put(key, stats)
        stats.calls.append(call.started_at)
        expected = call.plan.expectation.tokens
        if call.plan.cache is None and expected and call.usage.input_tokens:
            stats.expected_tokens += expected
            stats.read_tokens += min(expected, call.usage.cache_read_tokens)
            stats.observed_calls += 1
        return stats

    def _should_look(self, plan: CachePlan, stats: _PrefixStats, now: datetime) -> bool:
        """Return whether a cache is wanted, and none was looked for recently."""
        if stats.recheck_at is not None and now < stats.recheck_at:
            return False
        return plan.settings.explicit is ExplicitChoice.ON or self._is_worthwhile(plan, stats, now)

    def _is_worthwhile(self, plan: CachePlan, stats: _PrefixStats, now: datetime) -> bool:
        static_tokens = self._estimate_static(plan.payload)
        share = Decimal(0)
        if stats.expected_tokens:
            # An estimate of the static text that is too high must not hide that all of it is read.
            static_share = Decimal(stats.expected_tokens) / max(1, static_tokens * stats.observed_calls)
            share = Decimal(stats.read_tokens) / stats.expected_tokens * max(Decimal(1), static_share)
        demand = Demand(
            static_tokens=static_tokens,
            calls_last_hour=sum(now - call <= _HOUR for call in stats.calls),
            observed_calls=stats.observed_calls,
            implicit_share=share,
        )
        profile = find_profile(plan.key.provider, plan.key.model)
        price = find_price(plan.key.model, now, demand.static_tokens)
        return is_worthwhile(plan.settings, demand, profile, price, ttl_seconds=_ttl_of(plan))

    def _estimate_static(self, payload: Payload) -> int:
        size = len(payload.static_text.encode("utf-8", "surrogatepass")) + len(encode_tools(payload.tools))
        return self._estimate.estimate(payload.model, size)

    async def _join_or_create(self, call: CacheObservation, stats: _PrefixStats) -> None:
        """Provide the cache for the conversation's next turn: an existing one, or a new one."""
        plan = call.plan
        async with stats.lock:
            now = datetime.now(UTC)
            joined = await self._register.join_cache(call.tenant_id, call.conversation_id, plan.key)
            if joined is not None:
                return
            stats.recheck_at = now + _RECHECK_INTERVAL
            if not self._is_worthwhile(plan, stats, now):
                return
            reserved_id = await self._register.reserve_cache(
                call.tenant_id,
                plan.key,
                token_count=self._estimate_static(plan.payload),
                expires_at=now + timedelta(seconds=_ttl_of(plan)),
                fits=partial(self._is_within_budget, plan.key.model, now),
            )
            if reserved_id is not None and await self._create(call, self._caches[plan.key.provider], reserved_id):
                stats.recheck_at = None

    def _is_within_budget(self, model: str, now: datetime, stored: Mapping[str, int]) -> bool:
        if storage_usd_per_hour(stored, now) <= self._budget_usd_per_hour:
            return True
        _log.warning(
            "caches.budget_exhausted", extra={"model": model, "budget_usd_per_hour": str(self._budget_usd_per_hour)}
        )
        return False

    async def _create(self, call: CacheObservation, caches: ExplicitCaches, reserved_id: UUID) -> bool:
        plan = call.plan
        try:
            created = await caches.create(
                replace(plan.payload, cached_content=None),
                lifetime_seconds=_ttl_of(plan),
                label=cache_label(reserved_id),
            )
        except ProviderFailed as error:
            _log.warning("caches.create_failed", extra={"model": plan.key.model, "code": error.code})
            if isinstance(error, _NOT_CREATED):
                await self._register.drop_cache(reserved_id)
            return False
        registered: RegisteredCache | None = None
        try:
            registered = await self._register.add_cache(
                call.tenant_id,
                call.conversation_id,
                reserved_id,
                name=created.name,
                token_count=created.token_count,
                expires_at=created.expires_at,
            )
        finally:
            # The reservation expired, the conversation was erased, or the write failed: delete the cache.
            if registered is None and await _delete(caches, created.name):
                await self._register.drop_cache(reserved_id)
        if registered is not None:
            _log.info("caches.created", extra={"model": plan.key.model, "token_count": registered.token_count})
        return registered is not None

    async def _maintain(self, call: CacheObservation, cache: RegisteredCache) -> None:
        if call.was_missing:
            await self._register.drop_cache(cache.id)
            return
        ttl_seconds = _ttl_of(call.plan)
        if not needs_renewal(cache, datetime.now(UTC), ttl_seconds=ttl_seconds):
            return
        try:
            renewed = await self._caches[cache.key.provider].prolong(cache.name, lifetime_seconds=ttl_seconds)
        except CacheGone:
            await self._register.drop_cache(cache.id)
        except ProviderFailed as error:
            _log.warning("caches.renew_failed", extra={"model": cache.key.model, "code": error.code})
        else:
            await self._register.prolong_cache(cache.id, renewed.expires_at)

    async def _remove(self, cache: RegisteredCache) -> bool:
        caches = self._caches.get(cache.key.provider)
        if caches is None:
            return False
        names = [cache.name] if cache.name else await _find(caches, cache.label)
        if names is None or not all([await _delete(caches, name) for name in names]):
            return False
        await self._register.drop_cache(cache.id)
        return True


async def _delete(caches: ExplicitCaches, name: str) -> bool:
    """Return whether the cache is deleted. If not, the sweep tries again, and finally it expires."""
    try:
        await caches.delete(name)
    except CacheGone:
        return True
    except ProviderFailed as error:
        _log.warning("caches.delete_failed", extra={"code": error.code})
        return False
    return True


async def _find(caches: ExplicitCaches, label: str) -> Sequence[str] | None:
    """Return the names of caches with this label; None if the provider does not answer."""
    try:
        return await caches.find(label)
    except ProviderFailed as error:
        _log.warning("caches.list_failed", extra={"code": error.code})
        return None


async def _log_failure(work: Callable[[], Awaitable[None]]) -> None:
    """Failures in the background do not affect turns: the next turn goes on without a cache, and maintenance is tried
    again.
    """
    try:
        await work()
    except (DatabaseUnavailable, ConversationNotFound) as error:
        _log.warning("caches.maintenance_failed", extra={"code": error.code})


def _ttl_of(plan: CachePlan) -> int:
    return plan.settings.ttl_seconds or DEFAULT_TTL_SECONDS
