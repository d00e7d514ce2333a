"""Timelines and calls for operators, of real conversations with both providers."""

import hashlib
from typing import Any

import pytest

from server.app.providers import open_offline_providers
from server.conversation.errors import CallNotFound, ConversationNotFound
from server.conversation.event import TextDelta, UsageReported
from server.conversation.payload import Layer
from server.conversation.turn import ModelResponseTurn
from server.inspection.calls import CallInspector, InspectedCall, RequestProof
from server.inspection.manifest_difference import BlockChange
from server.inspection.signatures import SignatureState
from server.postgres.inspection.inspector import PostgresInspector
from server.providers.choice import ANTHROPIC, GEMINI
from server.providers.token_estimate import TokenEstimate
from server.providers.wire.frames import read_frames
from tests.conftest import StrataServer
from tests.support.builders import accept, create_conversation, epoch, user_input
from tests.support.compaction_driver import walk_far
from tests.support.conversation_driver import Walk, asks, begin_walk, tells
from tests.support.emulators import BOTH, EmulatedProviders


async def look(walk: Walk, turn_seq: int, attempt: int = 1, **changes: Any) -> InspectedCall:
    database = walk.program.database
    async with open_offline_providers(walk.program.settings) as offline_providers:
        inspector = CallInspector(
            PostgresInspector(database),
            walk.program.store,
            changes.get("offline_providers", offline_providers),
            read_frames,
            TokenEstimate(),
        )
        return await inspector.inspect_call(walk.tenant_id, walk.conversation_id, turn_seq, attempt)


async def walked(server: StrataServer, emulated: EmulatedProviders, provider: str) -> Walk:
    walk = await begin_walk(server.program, server.tenant.id, emulated, provider)
    await walk.change(context={"todos": ["stay"]})
    await walk.task("How is Oslo?", asks("Oslo"), tells("Cold."))
    await walk.task("And now?", tells("Wet."))
    return walk


@pytest.mark.parametrize("provider", BOTH)
async def test_a_call_is_proven_by_its_hash(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)

    for seq in (2, 4, 6):
        found = await look(walk, seq)
        assert found.request.proof is RequestProof.EQUAL
        assert found.request.body is not None
        assert hashlib.sha256(found.request.body).hexdigest() == found.request.stored_hash
        assert found.request.first_difference is None


@pytest.mark.parametrize("provider", BOTH)
async def test_a_request_that_cannot_be_made_again_says_where_it_differs(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)
    async with walk.program.database.connection() as connection:
        await connection.execute("UPDATE turns SET native = convert_to($1, 'UTF8') WHERE seq = 2", "{}")

    found = await look(walk, 4)

    assert found.request.proof is RequestProof.DIFFERENT
    assert found.request.rebuilt_hash != found.request.stored_hash
    assert found.request.first_difference is not None
    assert found.blocks[found.request.first_difference].entry.seq == 2


async def test_a_provider_of_another_release_is_no_reason_to_show_nothing(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await walked(strata_server, emulated, GEMINI)

    found = await look(walk, 2, offline_providers={})

    assert found.request.proof is RequestProof.IMPOSSIBLE
    assert found.request.error_code == "provider_unknown"
    assert found.folded is None


@pytest.mark.parametrize("provider", BOTH)
async def test_layers_share_the_tokens_that_the_provider_counted(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)

    found = await look(walk, 6)

    assert found.call.end is not None
    assert found.are_tokens_reported
    assert sum(share.token_count for share in found.layers) == found.call.end.usage.input_tokens
    assert sum(block.token_count for block in found.blocks) == found.call.end.usage.input_tokens
    assert [share.layer for share in found.layers] == list(Layer)
    assert all(share.size_bytes for share in found.layers)


@pytest.mark.parametrize("provider", BOTH)
async def test_an_answer_is_read_again_from_its_bytes(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)

    found = await look(walk, 6)

    assert found.folded is not None
    assert found.folded.error_code is None
    assert "".join(event.text for event in found.folded.events if isinstance(event, TextDelta)) == "Wet."
    assert any(isinstance(event, UsageReported) for event in found.folded.events)
    assert len(found.frames) > 1
    turn = await walk.program.store.load_turn(walk.tenant_id, walk.conversation_id, 6)
    assert isinstance(turn, ModelResponseTurn)
    assert found.folded.answer.blocks == turn.blocks
    assert found.cost is not None
    assert found.cost.total_usd == turn.cost_usd


@pytest.mark.parametrize("provider", BOTH)
async def test_a_call_is_compared_with_the_one_before(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)

    first, second = await look(walk, 2), await look(walk, 4)

    assert first.previous is None
    assert first.compared == ()
    assert second.previous is not None
    assert second.previous.turn_seq == 2
    added = [block.entry.seq for block in second.compared if block.change is BlockChange.ADDED]
    assert {2, 3} <= set(added)
    kept = [block.entry for block in second.compared if block.change is not BlockChange.REMOVED]
    assert kept == [block.entry for block in second.blocks]


@pytest.mark.parametrize("provider", BOTH)
async def test_signatures_are_told_part_by_part(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)
    other = ANTHROPIC if provider == GEMINI else GEMINI
    await walk.switch(other)
    await walk.task("Switched?", tells("Yes."))

    signed, switched = await look(walk, 2), await look(walk, 8)

    present = [part for part in signed.received_signatures if part.state is SignatureState.PRESENT]
    assert present
    assert all(part.length and part.fingerprint for part in present)
    withheld = [part for part in switched.sent_signatures if part.state is SignatureState.WITHHELD]
    assert {part.seq for part in withheld} >= {2}
    assert {part.reason for part in withheld} == {"provider"}
    assert not [part for part in switched.sent_signatures if part.state is SignatureState.PRESENT]


async def test_a_call_that_failed_keeps_its_error_body_and_its_attempts(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, GEMINI)
    await walk.fail("Broken.", tells("One two three four five."), after_chunks=3)

    found = await look(walk, 2)

    assert found.call.end is not None
    assert found.call.end.error_code == "provider_disconnected"
    assert found.folded is not None
    assert found.folded.error_code is not None
    assert [outline.attempt for outline in found.attempts] == [1]


@pytest.mark.parametrize("provider", BOTH)
async def test_a_summary_call_of_no_turn_is_found_too(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await walked(strata_server, emulated, provider)
    with pytest.raises(CallNotFound):
        await look(walk, -7)
    with pytest.raises(CallNotFound):
        await look(walk, 2, attempt=99999999)


async def test_a_timeline_shows_turns_with_their_calls_and_what_runs(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await walked(strata_server, emulated, GEMINI)
    program = walk.program
    inspector = PostgresInspector(program.database)
    await accept(program.store, walk.tenant_id, user_input(walk.conversation_id))

    timeline = await inspector.load_timeline(walk.tenant_id, walk.conversation_id)

    assert [item.turn.seq for item in timeline.turns] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(item.calls) for item in timeline.turns] == [0, 1, 0, 1, 0, 1, 0]
    assert '"stay"' in timeline.turns[1].calls[0].dynamic
    assert timeline.running is not None
    assert timeline.running.seq == 8
    assert (timeline.earlier_seq, timeline.later_seq) == (None, None)
    assert timeline.tenant_name == "acme"
    assert timeline.conversation.context == {"todos": ["stay"]}


async def test_a_timeline_can_be_jumped_into(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await walked(strata_server, emulated, GEMINI)
    inspector = PostgresInspector(walk.program.database)

    async def seqs(**place: int) -> tuple[list[int], int | None, int | None]:
        part = await inspector.load_timeline(walk.tenant_id, walk.conversation_id, limit=2, **place)
        return [item.turn.seq for item in part.turns], part.earlier_seq, part.later_seq

    assert await seqs() == ([5, 6], 4, None)
    assert await seqs(after_seq=0) == ([1, 2], None, 3)
    assert await seqs(after_seq=2) == ([3, 4], 2, 5)
    assert await seqs(around_seq=4) == ([3, 4], 2, 5)
    assert await seqs(around_seq=1) == ([1, 2], None, 3)
    assert await seqs(after_seq=6) == ([], None, None)
    assert await seqs(around_seq=2**70) == ([5, 6], 4, None)
    assert await seqs(before_seq=5) == ([3, 4], 2, 5)
    assert await seqs(before_seq=2) == ([1], None, 2)
    assert await seqs(before_seq=2**70) == ([5, 6], 4, None)
    assert await seqs(before_seq=0) == ([], None, None)


async def test_compactions_stand_on_the_timeline(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await walk_far(strata_server, emulated, GEMINI)

    timeline = await PostgresInspector(walk.program.database).load_timeline(walk.tenant_id, walk.conversation_id)

    assert [outline.reason.value for outline in timeline.epochs][-1] == "compacted"
    assert [outline.buffer_start_seq for outline in timeline.epochs] == [9, 5]
    assert timeline.conversation.buffer_start_seq == 9


async def test_an_epoch_keeps_the_args_that_its_text_was_rendered_with(strata_server: StrataServer) -> None:
    store, tenant_id = strata_server.program.store, strata_server.tenant.id
    conversation = await create_conversation(store, tenant_id)
    await store.begin_epoch(tenant_id, conversation.id, epoch(1, args={"tone": "calm"}))
    # Compactions render nothing, and say nothing of args.
    await store.begin_epoch(tenant_id, conversation.id, epoch(2, "You help on."))
    await store.begin_epoch(tenant_id, conversation.id, epoch(3, "You help.", arguments_hash=b"other"))
    async with strata_server.program.database.connection() as connection:
        kept = [row["args"] for row in await connection.fetch("SELECT args::text FROM epochs ORDER BY number")]
    assert kept == ['{"tone":"calm"}', '{"tone":"calm"}', None]


async def test_what_another_tenant_has_does_not_exist(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await walked(strata_server, emulated, GEMINI)
    other = await strata_server.key_ring.create_tenant("other")
    inspector = PostgresInspector(walk.program.database)

    for tenant_id in (other.id, "tenant_nonsense"):
        with pytest.raises(ConversationNotFound):
            await inspector.load_timeline(tenant_id, walk.conversation_id)
        with pytest.raises(ConversationNotFound):
            await inspector.load_stored_call(tenant_id, walk.conversation_id, 2, 1)
    assert (await inspector.load_timeline(None, walk.conversation_id)).tenant_id == walk.tenant_id
    assert (await inspector.load_stored_call(None, walk.conversation_id, 2, 1)).tenant_id == walk.tenant_id
    with pytest.raises(ConversationNotFound):
        await inspector.load_timeline(None, "conv_nonsense")
