"""The request path costs one round trip per step, and no more in a long conversation than in a short one.

The connection of the client goes through a proxy that parses the messages.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pytest

from server.conversation.api_key import PresentedKey, Scope, Tenant, parse_key_text
from server.conversation.block import Blob
from server.conversation.call import Chunk
from server.conversation.conversation import Lease
from server.conversation.epoch import EpochReason, Segment
from server.conversation.identifiers import API_KEY, new_id
from server.conversation.manifest import NewManifest
from server.conversation.payload import Layer, ManifestEntry
from server.postgres.access.key_cache import KeyCache
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.access.rate_limit import PostgresRateLimiter
from server.postgres.engine import Database
from server.postgres.notifications import PostgresNotifications
from server.postgres.store import PostgresStore
from tests.support.builders import (
    LEASE_SECONDS,
    accept,
    answer,
    call_start,
    create_conversation,
    epoch,
    take_exchange,
    user_input,
)
from tests.support.wire_proxy import WireProxy, open_proxy

Result = TypeVar("Result")

SLACK_BYTES = 64
"""Tolerated difference between two answers of the same size: the length of some fields varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A store and a key ring on a single connection, and its proxy."""

    proxy: WireProxy
    database: Database
    store: PostgresStore
    key_ring: PostgresKeyRing

    async def cost(self, step: Callable[[], Awaitable[object]]) -> int:
        """Round trips of a step."""
        before = self.proxy.round_trips
        await step()
        return self.proxy.round_trips - before

    async def weight(self, step: Callable[[], Awaitable[Result]]) -> tuple[int, Result]:
        """Bytes that a step receives."""
        before = self.proxy.bytes_received
        result = await step()
        return self.proxy.bytes_received - before, result


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    async with open_proxy(database.options.url) as proxy:
        narrow = Database(replace(database.options, url=proxy.url(), pool_size=1))
        yield Wire(proxy=proxy, database=narrow, store=PostgresStore(narrow), key_ring=PostgresKeyRing(narrow))
        await narrow.close()


@pytest.fixture
async def presented(key_ring: PostgresKeyRing, tenant: Tenant) -> PresentedKey:
    _, text = await key_ring.create_key(
        tenant_id=tenant.id, name="k", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    presented = parse_key_text(text)
    assert presented is not None
    return presented


async def _take_turns(wire: Wire, tenant: Tenant, conversation_id: str, presented: PresentedKey) -> dict[str, int]:
    """The steps of a turn in order, and the cost of each."""
    turn = user_input(conversation_id, abandons_calls=True)
    lease = Lease(
        conversation_id=conversation_id,
        token=turn.lease_token,
        owner=turn.lease_owner,
        turn_seq=(await wire.store.load_conversation(tenant.id, conversation_id)).next_seq + 1,
    )
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "find_live_key": lambda: wire.key_ring.find_live_key(presented),
        "find_duplicate": lambda: wire.store.find_duplicate(tenant.id, turn),
        "accept_turn": lambda: wire.store.accept_turn(tenant.id, turn),
        "load_payload_source": lambda: wire.store.load_payload_source(tenant.id, conversation_id),
        "begin_call": lambda: wire.store.begin_call(lease, call_start()),
        "append_chunks": lambda: wire.store.append_chunks(
            lease, [Chunk(attempt=1, offset=0, data=b"abc")], lease_seconds=LEASE_SECONDS
        ),
        "request_cancel": lambda: wire.store.request_cancel(tenant.id, conversation_id),
        "finish_turn": lambda: wire.store.finish_turn(lease, answer(calls=["a"])),
        "load_conversation": lambda: wire.store.load_conversation(tenant.id, conversation_id),
        "list_conversations": lambda: wire.store.list_conversations(tenant.id),
        "find_expired_lease": lambda: wire.store.list_expired_leases(conversation_id=conversation_id),
    }
    return {name: await wire.cost(step) for name, step in steps.items()}


@pytest.mark.parametrize("turn_count", [2, 200])
async def test_each_step_of_a_turn_is_one_round_trip(
    wire: Wire, store: PostgresStore, tenant: Tenant, presented: PresentedKey, turn_count: int
) -> None:
    conversation = await create_conversation(store, tenant.id)
    for _ in range(turn_count // 2):
        await take_exchange(store, tenant.id, conversation.id)
    await _take_turns(
        wire, tenant, conversation.id, presented
    )  # A statement that is new to a connection is prepared first.
    costs = await _take_turns(wire, tenant, conversation.id, presented)
    assert costs == dict.fromkeys(costs, 1)
    assert wire.proxy.connections_made == 1


async def test_a_turn_that_ends_without_a_call_is_one_round_trip(
    wire: Wire, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    costs = []
    for _ in range(2):
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        costs.append(await wire.cost(lambda: wire.store.finish_turn(accepted.lease, answer(start=None, end=None))))  # noqa: B023  reason: awaited at once
    assert costs[1] == 1


async def test_a_cached_key_costs_no_round_trip(wire: Wire, database: Database, presented: PresentedKey) -> None:
    async with PostgresNotifications(database.options) as listener:
        await listener.wait_until_listening()
        keys = PostgresKeyRing(wire.database, KeyCache(listener))
        assert await keys.find_live_key(presented) is not None
        assert await wire.cost(lambda: keys.find_live_key(presented)) == 0


async def test_the_rate_limit_queries_once_for_many_requests(wire: Wire) -> None:
    limiter = PostgresRateLimiter(wire.database, 500, window_seconds=1e10)
    key_id = new_id(API_KEY)
    for _ in range(10):
        await limiter.admit(key_id)  # Prepares the statement.

    async def admit(count: int) -> None:
        for _ in range(count):
            await limiter.admit(key_id)

    assert await wire.cost(lambda: admit(100)) == 10


async def _converse(store: PostgresStore, tenant: Tenant, *, compacted: int, buffered: int, static: str) -> str:
    """A conversation with that many turns before the start of the buffer and after it."""
    conversation = await create_conversation(store, tenant.id)
    await store.begin_epoch(tenant.id, conversation.id, epoch(1, static))
    for _ in range(compacted // 2):
        await take_exchange(store, tenant.id, conversation.id)
    segment = Segment(
        generation=0, position=0, first_seq=1, last_seq=compacted, text="What was said before.", token_count=5
    )
    compaction = epoch(2, static, reason=EpochReason.COMPACTED, segment_count=1, buffer_start_seq=segment.last_seq + 1)
    await store.begin_epoch(tenant.id, conversation.id, compaction, segment=segment)
    for _ in range(buffered // 2):
        await take_exchange(store, tenant.id, conversation.id)
    return conversation.id


async def test_loading_a_payload_depends_on_the_buffer_and_not_on_earlier_turns(
    wire: Wire, store: PostgresStore, tenant: Tenant
) -> None:
    weights = []
    for compacted in (2, 400):
        conversation_id = await _converse(store, tenant, compacted=compacted, buffered=20, static="You help.")
        await wire.store.load_payload_source(tenant.id, conversation_id)  # Prepares the statement.
        weight, source = await wire.weight(lambda: wire.store.load_payload_source(tenant.id, conversation_id))  # noqa: B023  reason: awaited at once
        assert len(source.buffered) == 20
        assert source.buffered[0].seq == compacted + 1
        weights.append(weight)
    assert abs(weights[0] - weights[1]) <= SLACK_BYTES


async def test_a_cached_static_text_is_not_loaded_again(wire: Wire, store: PostgresStore, tenant: Tenant) -> None:
    static = "You help. " * 20_000
    conversation_id = await _converse(store, tenant, compacted=2, buffered=2, static=static)
    _, source = await wire.weight(lambda: wire.store.load_payload_source(tenant.id, conversation_id))
    assert source.epoch is not None
    held = [source.epoch.static_hash]
    whole, full = await wire.weight(lambda: wire.store.load_payload_source(tenant.id, conversation_id))
    rest, without = await wire.weight(
        lambda: wire.store.load_payload_source(tenant.id, conversation_id, cached_static_hashes=held)
    )
    assert full.static_text == static + "What was said before."
    assert without.static_text is None
    assert whole - rest >= len(static)
    assert rest < 4096
    assert without.buffered == full.buffered


async def test_a_manifest_is_not_loaded_by_the_store_that_has_written_it(
    wire: Wire, store: PostgresStore, tenant: Tenant
) -> None:
    """It has an entry for each piece of the static text, so it grows with the history."""
    conversation = await create_conversation(store, tenant.id)
    manifest = tuple(
        ManifestEntry(layer=Layer.STATIC, kind="static", role="system", hash=f"{number:032x}", length=1)
        for number in range(500)
    )
    whole = NewManifest(entries=manifest, base=None)
    start = call_start(manifest=(), new_manifest=whole, request_hash=bytes(31) + b"1")
    lease = (await accept(wire.store, tenant.id, user_input(conversation.id))).lease
    await wire.store.finish_turn(lease, answer(start=start))
    lease = (await accept(wire.store, tenant.id, user_input(conversation.id))).lease
    weights = []
    for reader in (wire.store, PostgresStore(wire.database)):
        await reader.load_payload_source(tenant.id, conversation.id)  # Prepares the statement.
        weight, source = await wire.weight(partial(reader.load_payload_source, tenant.id, conversation.id))
        assert source.previous_manifest == manifest
        weights.append(weight)
    assert weights[0] < 4096
    assert weights[1] - weights[0] > 500 * 40

    # Another store takes the next turn: its manifest is not the one that is held.
    newest = call_start(
        manifest=(), new_manifest=NewManifest(entries=manifest[:2], base=None), request_hash=bytes(31) + b"2"
    )
    await store.finish_turn(lease, answer(start=newest))
    await accept(store, tenant.id, user_input(conversation.id))
    source = await wire.store.load_payload_source(tenant.id, conversation.id)
    assert source.previous_manifest == manifest[:2]


async def test_cached_images_are_not_loaded_again(wire: Wire, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    data = bytes(range(256)) * 400
    image = Blob(sha256=hashlib.sha256(data).digest(), media_type="image/png", data=data)
    await accept(store, tenant.id, user_input(conversation.id, blobs=(image,)))
    await wire.store.load_payload_source(tenant.id, conversation.id)  # Prepares the statement.
    whole, _ = await wire.weight(lambda: wire.store.load_payload_source(tenant.id, conversation.id))
    rest, _ = await wire.weight(
        lambda: wire.store.load_payload_source(tenant.id, conversation.id, cached_blobs=[image.sha256])
    )
    assert whole - rest >= len(data)
    assert rest < 4096


async def test_accepting_receives_as_little_in_a_long_conversation_as_in_a_short_one(
    wire: Wire, store: PostgresStore, tenant: Tenant
) -> None:
    weights = []
    for exchanges in (1, 100):
        conversation = await create_conversation(store, tenant.id)
        for _ in range(exchanges):
            await take_exchange(store, tenant.id, conversation.id)
        warm = await accept(wire.store, tenant.id, user_input(conversation.id))
        await wire.store.finish_turn(warm.lease, answer())
        weight, accepted = await wire.weight(lambda: accept(wire.store, tenant.id, user_input(conversation.id)))  # noqa: B023  reason: awaited at once
        finish, _ = await wire.weight(lambda: wire.store.finish_turn(accepted.lease, answer()))  # noqa: B023  reason: awaited at once
        weights.append((weight, finish))
    assert weights[0] == weights[1]
