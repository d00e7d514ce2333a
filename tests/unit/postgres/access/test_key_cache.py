"""A loaded key is cached only as long as that is safe."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from server.conversation.api_key import ApiKey, PresentedKey, Scope, issue_key_text, parse_key_text
from server.conversation.identifiers import API_KEY, decode_id
from server.postgres.access.key_cache import KeyCache
from server.postgres.notifications import KEY_CHANNEL
from tests.support.fakes.key_ring import InMemoryKeyRing


class StubListener:
    """Receives the notifications that the test sends."""

    def __init__(self) -> None:
        self.listening = True
        self.receive: Callable[[str], None] = lambda _: None
        self.miss: Callable[[], None] = lambda: None

    def listen(self, channel: str, *, on_payload: Callable[[str], None], on_gap: Callable[[], None]) -> None:
        assert channel == KEY_CHANNEL
        self.receive, self.miss = on_payload, on_gap


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """A cache whose dependencies the test controls."""

    def __init__(self, max_keys: int = 100) -> None:
        self.key_ring, self.listener, self.clock = InMemoryKeyRing(), StubListener(), Clock()
        self.time = datetime.now(UTC)
        self.cache = KeyCache(self.listener, max_keys=max_keys, clock=self.clock, now=lambda: self.time)

    async def make_key(self, lives: timedelta | None = None) -> tuple[ApiKey, PresentedKey]:
        tenants = await self.key_ring.list_tenants()
        tenant = tenants[0] if tenants else await self.key_ring.create_tenant("acme")
        expires_at = None if lives is None else datetime.now(UTC) + lives
        key, text = await self.key_ring.create_key(
            tenant_id=tenant.id, name="k", scopes=frozenset({Scope.CLIENT}), expires_at=expires_at
        )
        presented = parse_key_text(text)
        assert presented is not None
        return key, presented

    async def find(self, presented: PresentedKey) -> ApiKey | None:
        return await self.cache.find(presented, self.key_ring.find_live_key)

    async def finds(self, presented: PresentedKey, *, asking: bool) -> bool:
        """Whether the key is live, after checking whether it was loaded from the database."""
        before = self.key_ring.lookups
        found = await self.find(presented)
        assert self.key_ring.lookups - before == asking
        return found is not None


@pytest.fixture
def memory() -> Memory:
    return Memory()


async def test_a_key_is_looked_up_once(memory: Memory) -> None:
    key, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    found = await memory.find(presented)
    assert found is not None
    assert (found.id, memory.key_ring.lookups) == (key.id, 1)


async def test_a_key_is_looked_up_again_after_half_a_minute(memory: Memory) -> None:
    _, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    memory.clock.now += 29.9
    assert await memory.finds(presented, asking=False)
    memory.clock.now += 0.1
    assert await memory.finds(presented, asking=True)
    assert await memory.finds(presented, asking=False)


async def test_another_secret_of_a_cached_key_is_rejected(memory: Memory) -> None:
    key, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    forged = parse_key_text(issue_key_text(key.id))
    assert forged is not None
    for _ in range(2):
        assert not await memory.finds(forged, asking=True)
    assert await memory.finds(presented, asking=False)


async def test_a_rejected_key_is_not_cached(memory: Memory) -> None:
    _, expired = await memory.make_key(timedelta(seconds=-1))
    for _ in range(2):
        assert not await memory.finds(expired, asking=True)


async def test_a_cached_key_expires_in_time(memory: Memory) -> None:
    _, presented = await memory.make_key(timedelta(seconds=10))
    assert await memory.finds(presented, asking=True)
    assert await memory.finds(presented, asking=False)
    memory.time += timedelta(seconds=11)
    await memory.finds(presented, asking=True)


async def test_revoking_takes_effect_at_once(memory: Memory) -> None:
    key, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    await memory.key_ring.revoke_key(key.id)
    memory.cache.remove(key.id)
    assert not await memory.finds(presented, asking=True)


async def test_a_revocation_elsewhere_takes_effect(memory: Memory) -> None:
    key, presented = await memory.make_key()
    _, other = await memory.make_key()
    for each in (presented, other):
        assert await memory.finds(each, asking=True)
    await memory.key_ring.revoke_key(key.id)
    memory.listener.receive(str(decode_id(API_KEY, key.id)))
    assert not await memory.finds(presented, asking=True)
    assert await memory.finds(other, asking=False)


@pytest.mark.parametrize("payload", ["", "nonsense", "é"])
async def test_an_unknown_payload_empties_the_cache(memory: Memory, payload: str) -> None:
    _, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    memory.listener.receive(payload)
    assert await memory.finds(presented, asking=True)


async def test_a_process_without_notifications_caches_nothing(memory: Memory) -> None:
    _, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    memory.listener.listening = False
    for _ in range(2):
        assert await memory.finds(presented, asking=True)
    memory.listener.listening = True
    memory.listener.miss()
    assert await memory.finds(presented, asking=True)
    assert await memory.finds(presented, asking=False)


async def test_a_gap_in_the_notifications_empties_the_cache(memory: Memory) -> None:
    _, presented = await memory.make_key()
    assert await memory.finds(presented, asking=True)
    memory.listener.miss()
    assert await memory.finds(presented, asking=True)


class SlowKeyRing(InMemoryKeyRing):
    """Answers when the test allows it, with the state at the time of the request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def find_live_key(self, presented: PresentedKey) -> ApiKey | None:
        found = await super().find_live_key(presented)
        self.asked.set()
        await self.answer.wait()
        return found


@pytest.mark.parametrize("where", ["here", "elsewhere", "missed"])
async def test_a_key_that_is_revoked_while_it_is_loaded_is_not_cached(where: str) -> None:
    memory = Memory()
    memory.key_ring = SlowKeyRing()
    key, presented = await memory.make_key()
    looking = asyncio.create_task(memory.find(presented))
    await memory.key_ring.asked.wait()
    await memory.key_ring.revoke_key(key.id)
    match where:
        case "here":
            memory.cache.remove(key.id)
        case "elsewhere":
            memory.listener.receive(str(decode_id(API_KEY, key.id)))
        case _:
            memory.listener.miss()
    memory.key_ring.answer.set()
    await looking
    assert not await memory.finds(presented, asking=True)


async def test_the_cache_has_a_limit() -> None:
    memory = Memory(max_keys=3)
    presented = [(await memory.make_key())[1] for _ in range(5)]
    for each in presented:
        assert await memory.finds(each, asking=True)
    assert [each in presented[2:] for each in presented] == [False, False, True, True, True]
    for each in presented[2:]:
        assert await memory.finds(each, asking=False)
    assert await memory.finds(presented[0], asking=True)


async def test_no_secret_is_kept(memory: Memory) -> None:
    _, text = await memory.key_ring.create_key(
        tenant_id=(await memory.key_ring.create_tenant(str(uuid4()))).id, name="k", scopes=frozenset(), expires_at=None
    )
    presented = parse_key_text(text)
    assert presented is not None
    assert await memory.finds(presented, asking=True)
    assert text.rpartition("_")[2] not in repr(vars(memory.cache._entries))  # noqa: SLF001  reason: the test is about the internal state
