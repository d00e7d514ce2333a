"""A whole turn waits for three round trips to the database, and its hundredth for as many as its tenth.

A fourth one records the call while the provider works on it. Nothing waits for it.

The connection of the server goes through a proxy that parses the messages. Its notifications come on a separate
connection, which does not.
"""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from server.app.providers import FOLDS
from server.app.settings import Settings
from server.conversation.api_key import Tenant
from server.conversation.assistant import Instructions
from server.conversation.epoch import EpochReason, Segment
from server.conversation.event import TurnEnded
from server.conversation.turn import TurnState
from server.payload.builder import hash_prefix
from server.payload.preparation import PayloadPreparation
from server.postgres.engine import Database
from server.postgres.notifications import PostgresNotifications
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from server.telemetry.metrics import Metrics
from server.telemetry.spans import open_tracing
from server.telemetry.turns import TurnTelemetry
from server.turns.request import TurnRequest
from server.turns.running import RunningTurns
from server.turns.service import TurnService
from server.turns.tools import TurnLimits, TurnTools
from tests.support.conversation_driver import PICTURE, PICTURE_BLOB, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_service_driver import (
    WEATHER,
    answer_tools,
    calls_of,
    open_conversation,
    tool_results,
    user_task,
)
from tests.support.wire_proxy import WireProxy, open_proxy

NEVER = 3600.0
ROLES = "You know all that there is to know about the weather. " * 2000
SLACK_BYTES = 400
"""Tolerated difference between two turns of the same size: the length of numbers and signatures varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """A turn service on a single connection, and its proxy."""

    proxy: WireProxy
    service: TurnService
    tenant_id: str

    async def cost(self, request: TurnRequest) -> tuple[int, int, TurnEnded]:
        """Of a turn: round trips, and bytes that came from the database."""
        trips, weight = self.proxy.round_trips, self.proxy.bytes_received
        ended = await (await self.service.take_turn(self.tenant_id, request)).wait()
        assert ended.turn.state is TurnState.COMPLETE
        return self.proxy.round_trips - trips, self.proxy.bytes_received - weight, ended


@pytest.fixture
async def narrow(
    database: Database, tenant: Tenant, server_settings: Settings, emulated: EmulatedProviders
) -> AsyncIterator[Narrow]:
    renderer = JinjaRenderer(load_templates(None), RenderLimits())
    tracing = open_tracing(None, None, "test", "1")
    async with (
        open_proxy(database.options.url) as proxy,
        emulated.open(server_settings) as providers,
        PostgresNotifications(database.options) as notifications,
    ):
        connection = Database(replace(database.options, url=proxy.url(), pool_size=1))
        store = PostgresStore(connection)
        tools = TurnTools(
            owner="test",
            store=store,
            preparation=PayloadPreparation(store, renderer, providers.by_name),
            notifications=notifications,
            observer=TurnTelemetry(Metrics(version="1"), tracing),
            folds=FOLDS,
            # Nothing is flushed meanwhile.
            limits=TurnLimits(lease_seconds=NEVER, flush_seconds=NEVER),
        )
        yield Narrow(proxy=proxy, service=TurnService(tools, RunningTurns()), tenant_id=tenant.id)
        await connection.close()
    await renderer.close()
    tracing.shutdown()


async def _open(store: PostgresStore, tenant: Tenant, provider: str, roles: str = "You help.") -> str:
    conversation = await open_conversation(store, tenant.id, provider, instructions=Instructions(roles=roles))
    return conversation.id


async def _warm_up(narrow: Narrow, store: PostgresStore, tenant: Tenant, provider: str) -> None:
    """Prepare the statements: one that is new to a connection is prepared first."""
    conversation_id = await _open(store, tenant, provider)
    await narrow.cost(user_task(conversation_id))
    await narrow.cost(user_task(conversation_id, blocks=(PICTURE,), blobs=(PICTURE_BLOB,)))


@pytest.mark.parametrize("provider", BOTH)
async def test_a_turn_is_four_round_trips_and_one_more_if_an_epoch_begins(
    narrow: Narrow, store: PostgresStore, tenant: Tenant, emulated: EmulatedProviders, provider: str
) -> None:
    await _warm_up(narrow, store, tenant, provider)
    conversation_id = await _open(store, tenant, provider)
    emulated[provider].queue_replies(
        text_reply("Hi."), tool_reply("Oslo", "Bergen"), text_reply("Cold."), text_reply("A picture.")
    )
    trips, _, _ = await narrow.cost(user_task(conversation_id))
    assert trips == 5
    trips, _, asked = await narrow.cost(user_task(conversation_id, "Weather?"))
    assert trips == 4
    trips, _, _ = await narrow.cost(tool_results(conversation_id, calls_of(asked)))
    assert trips == 4
    trips, _, _ = await narrow.cost(user_task(conversation_id, blocks=(PICTURE,), blobs=(PICTURE_BLOB,)))
    assert trips == 4
    assert narrow.proxy.connections_made == 1


async def _compact(store: PostgresStore, tenant: Tenant, conversation_id: str) -> None:
    """Move all but the last two turns out of the buffer, as a compaction does."""
    source = await store.load_payload_source(tenant.id, conversation_id)
    assert source.epoch is not None
    assert source.static_text is not None
    text = f"Up to {source.conversation.next_seq:04d}. "
    static = source.static_text + text
    start = source.conversation.next_seq - 2
    segment = Segment(
        generation=0,
        position=source.epoch.segment_count,
        first_seq=source.conversation.buffer_start_seq,
        last_seq=start - 1,
        text=text,
        token_count=4,
    )
    epoch = replace(
        source.epoch,
        number=source.epoch.number + 1,
        reason=EpochReason.COMPACTED,
        segment_count=segment.position + 1,
        static_hash=hashlib.sha256(static.encode()).digest(),
        prefix_hash=hash_prefix(static, (WEATHER,)),
        buffer_start_seq=start,
    )
    await store.begin_epoch(tenant.id, conversation_id, epoch, segment=segment)


@pytest.mark.parametrize("provider", BOTH)
async def test_the_hundredth_turn_reads_as_little_as_the_tenth(
    narrow: Narrow, store: PostgresStore, tenant: Tenant, emulated: EmulatedProviders, provider: str
) -> None:
    await _warm_up(narrow, store, tenant, provider)
    conversation_id = await _open(store, tenant, provider, ROLES)
    weights: dict[int, int] = {}
    fresh: dict[int, int] = {}
    for number in range(1, 51):
        emulated[provider].queue_replies(tool_reply("Oslo")) if number % 5 == 0 else emulated[provider].queue_replies(
            text_reply("Fine.")
        )
        _, weight, ended = await narrow.cost(user_task(conversation_id, f"Task {number:04d}."))
        (fresh if number % 5 == 1 else weights)[ended.turn.seq] = weight
        if number % 5 == 0:
            emulated[provider].queue_replies(text_reply("Cold."))
            await answer_tools(narrow.service, tenant.id, ended)
            await _compact(store, tenant, conversation_id)
    # The same position between two compactions, early and late.
    place = sorted(weights)[5], sorted(weights)[-3]
    assert place[0] < 20
    assert place[1] > 100
    assert len(weights) == 40
    assert abs(weights[place[0]] - weights[place[1]]) <= SLACK_BYTES
    # The instructions were loaded with the first turn, the static text once after each compaction.
    assert all(weight < len(ROLES) / 4 for weight in weights.values())
    assert all(len(ROLES) < weight < len(ROLES) * 1.25 for weight in fresh.values())
