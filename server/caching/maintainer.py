"""The keeper of explicit caches: makes them where they pay, keeps them while they are used, removes them after.

Nothing here is on a turn's path. A turn uses the cache that its conversation is registered with; when it has ended the
keeper is told, and sees in the background that the next one has what it needs:

| it sees                                          | it does                                                         |
|--------------------------------------------------|-----------------------------------------------------------------|
| the cache was used, and half of its time is over | prolongs it                                                     |
| the cache was gone                               | forgets it                                                      |
| no cache, but another conversation's would do    | registers the conversation with that one                        |
| no cache, and one would pay                      | makes one, unless that went beyond the budget for storage       |
| caches that nobody uses any more                 | removes them at the provider, then in the register              |

A cache has its place in the register, and counts against the budget, before it is made. A process that dies in between
leaves a place without a name, and perhaps a cache: after some minutes the sweep of any process looks for one by its
label, and removes both. Where nobody sweeps with its account, it ends by itself when its time is over.
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
    needs_prolonging,
    storage_usd_per_hour,
    wants_cache,
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
_REMEMBERED_KEYS: Final = 10_000
_REMEMBERED_CALLS: Final = 200
_LOOK_AGAIN: Final = timedelta(minutes=1)
"""How long it is believed that nobody has a cache for a prefix, and that a provider refuses to make one."""
_NOT_MADE: Final = (ProviderRejected, ProviderAuthentication, ProviderRateLimited, ProviderQuotaExceeded)
"""After one of these nothing is there. After any other the provider may have made a cache and nobody was told."""
_log = logging.getLogger("strata.caches")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheObservation:
    """A turn that has asked its provider, as far as caches are concerned."""

    tenant_id: str
    conversation_id: str
    plan: CachePlan
    usage: Usage
    """Of the call that got through."""
    started_at: datetime
    was_gone: bool
    """The planned cache was gone, and the turn did without it."""


@dataclass(slots=True)
class _Watched:
    """What this process has seen of one prefix."""

    calls: deque[datetime] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_CALLS))
    expected_tokens: int = 0
    read_tokens: int = 0
    observed_calls: int = 0
    recheck_at: datetime | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class CacheMaintainer:
    """Keeps the explicit caches that the turns of this process use."""

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
        self._watched: LruCache[CacheKey, _Watched] = LruCache(_REMEMBERED_KEYS)
        self._running: set[asyncio.Task[None]] = set()

    def observe_call(self, asked: CacheObservation) -> None:
        """Notes it and returns; what follows from it is done in the background."""
        plan = asked.plan
        if not plan.may_have_cache:
            return
        watched = self._watch_call(asked)
        if plan.cache is not None:
            self._start(partial(self._look_after, asked, plan.cache))
        elif self._is_worth_a_look(plan, watched, asked.started_at):
            self._start(partial(self._provide, asked, watched))

    async def sweep(self) -> int:
        """Removes the caches that nobody uses any more. How many went."""
        removed = 0
        for cache in await self._register.claim_unused_caches(self._accounts):
            removed += await self._remove(cache)
        return removed

    async def watch(self) -> None:
        """Sweeps until it is cancelled."""
        while self._caches:
            try:
                await self.sweep()
            except DatabaseUnavailable as error:
                _log.warning("caches.sweep_failed", extra={"code": error.code})
            await asyncio.sleep(self._sweep_seconds)

    async def settle(self) -> None:
        """Until everything that was begun is done."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def close(self) -> None:
        """Ends what is under way. A cache that was just made and not registered is found by a later sweep."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(_quietly(work), name="cache keeper")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _watch_call(self, asked: CacheObservation) -> _Watched:
        key = asked.plan.key
        watched = self._watched.get(key)
        if watched is None:
            watched = _Watched()
            self._watched.put(key, watched)
        watched.calls.append(asked.started_at)
        expected = asked.plan.expectation.tokens
        if asked.plan.cache is None and expected and asked.usage.input_tokens:
            watched.expected_tokens += expected
            watched.read_tokens += min(expected, asked.usage.cache_read_tokens)
            watched.observed_calls += 1
        return watched

    def _is_worth_a_look(self, plan: CachePlan, watched: _Watched, now: datetime) -> bool:
        """Whether a cache is wanted, and nobody has just said that there is none to be had."""
        if watched.recheck_at is not None and now < watched.recheck_at:
            return False
        return plan.settings.explicit is ExplicitChoice.ON or self._wants_cache(plan, watched, now)

    def _wants_cache(self, plan: CachePlan, watched: _Watched, now: datetime) -> bool:
        share = Decimal(watched.read_tokens) / watched.expected_tokens if watched.expected_tokens else Decimal(0)
        demand = Demand(
            static_tokens=self._estimate_static(plan.payload),
            calls_last_hour=sum(now - call <= _HOUR for call in watched.calls),
            observed_calls=watched.observed_calls,
            implicit_share=share,
        )
        profile = find_profile(plan.key.provider, plan.key.model)
        price = find_price(plan.key.model, now, demand.static_tokens)
        return wants_cache(plan.settings, demand, profile, price, ttl_seconds=_ttl_of(plan))

    def _estimate_static(self, payload: Payload) -> int:
        size = len(payload.static_text.encode("utf-8", "surrogatepass")) + len(encode_tools(payload.tools))
        return self._estimate.estimate(payload.model, size)

    async def _provide(self, asked: CacheObservation, watched: _Watched) -> None:
        """The cache that the conversation's next turn will use: one that is there, else a new one."""
        plan = asked.plan
        async with watched.lock:
            now = datetime.now(UTC)
            joined = await self._register.join_cache(asked.tenant_id, asked.conversation_id, plan.key)
            if joined is not None:
                return
            watched.recheck_at = now + _LOOK_AGAIN
            if not self._wants_cache(plan, watched, now):
                return
            place = await self._register.reserve_cache(
                asked.tenant_id,
                plan.key,
                token_count=self._estimate_static(plan.payload),
                expires_at=now + timedelta(seconds=_ttl_of(plan)),
                fits=partial(self._is_within_budget, plan.key.model, now),
            )
            if place is not None and await self._make(asked, self._caches[plan.key.provider], place):
                watched.recheck_at = None

    def _is_within_budget(self, model: str, now: datetime, kept: Mapping[str, int]) -> bool:
        if storage_usd_per_hour(kept, now) <= self._budget_usd_per_hour:
            return True
        _log.warning(
            "caches.budget_exhausted", extra={"model": model, "budget_usd_per_hour": str(self._budget_usd_per_hour)}
        )
        return False

    async def _make(self, asked: CacheObservation, caches: ExplicitCaches, place: UUID) -> bool:
        plan = asked.plan
        try:
            made = await caches.create(
                replace(plan.payload, cached_content=None), lifetime_seconds=_ttl_of(plan), label=cache_label(place)
            )
        except ProviderFailed as error:
            _log.warning("caches.refused", extra={"model": plan.key.model, "code": error.code})
            if isinstance(error, _NOT_MADE):
                await self._register.drop_cache(place)
            return False
        kept: RegisteredCache | None = None
        try:
            kept = await self._register.add_cache(
                asked.tenant_id,
                asked.conversation_id,
                place,
                name=made.name,
                token_count=made.token_count,
                expires_at=made.expires_at,
            )
        finally:
            # It took too long, the conversation was erased, or nobody will ever know: it must not stay.
            if kept is None and await _delete(caches, made.name):
                await self._register.drop_cache(place)
        if kept is not None:
            _log.info("caches.made", extra={"model": plan.key.model, "token_count": kept.token_count})
        return kept is not None

    async def _look_after(self, asked: CacheObservation, cache: RegisteredCache) -> None:
        if asked.was_gone:
            await self._register.drop_cache(cache.id)
            return
        ttl_seconds = _ttl_of(asked.plan)
        if not needs_prolonging(cache, datetime.now(UTC), ttl_seconds=ttl_seconds):
            return
        try:
            prolonged = await self._caches[cache.key.provider].prolong(cache.name, lifetime_seconds=ttl_seconds)
        except CacheGone:
            await self._register.drop_cache(cache.id)
        except ProviderFailed as error:
            _log.warning("caches.not_prolonged", extra={"model": cache.key.model, "code": error.code})
        else:
            await self._register.prolong_cache(cache.id, prolonged.expires_at)

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
    """Whether it is gone. Where not, the sweep tries again, and in the end its time is over."""
    try:
        await caches.delete(name)
    except CacheGone:
        return True
    except ProviderFailed as error:
        _log.warning("caches.not_removed", extra={"code": error.code})
        return False
    return True


async def _find(caches: ExplicitCaches, label: str) -> Sequence[str] | None:
    """The names of what was made for a place; None where the provider does not say."""
    try:
        return await caches.find(label)
    except ProviderFailed as error:
        _log.warning("caches.not_found", extra={"code": error.code})
        return None


async def _quietly(work: Callable[[], Awaitable[None]]) -> None:
    """What goes wrong in the background is no turn's concern: the next turn does without, and tries again."""
    try:
        await work()
    except (DatabaseUnavailable, ConversationNotFound) as error:
        _log.warning("caches.look_failed", extra={"code": error.code})


def _ttl_of(plan: CachePlan) -> int:
    return plan.settings.ttl_seconds or DEFAULT_TTL_SECONDS
