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
from tests.support.compaction_driver import drive_to_full_window
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders


async def look(driver: ConversationDriver, turn_seq: int, attempt: int = 1, **changes: Any) -> InspectedCall:
    database = driver.program.database
    async with open_offline_providers(driver.program.settings) as offline_providers:
        inspector = CallInspector(
            PostgresInspector(database),
            driver.program.store,
            changes.get("offline_providers", offline_providers),
            read_frames,
            TokenEstimate(),
        )
        return await inspector.inspect_call(driver.tenant_id, driver.conversation_id, turn_seq, attempt)


async def drive_conversation(server: StrataServer, emulated: EmulatedProviders, provider: str) -> ConversationDriver:
    driver = await start_driver(server.program, server.tenant.id, emulated, provider)
    await driver.change(context={"todos": ["stay"]})
    await driver.task("How is Oslo?", tool_reply("Oslo"), text_reply("Cold."))
    await driver.task("And now?", text_reply("Wet."))
    return driver


@pytest.mark.parametrize("provider", BOTH)
async def test_a_call_is_verified_by_its_hash(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)

    for seq in (2, 4, 6):
        found = await look(driver, seq)
        assert found.request.proof is RequestProof.EQUAL
        assert found.request.body is not None
        assert hashlib.sha256(found.request.body).hexdigest() == found.request.stored_hash
        assert found.request.first_difference is None


@pytest.mark.parametrize("provider", BOTH)
async def test_a_request_that_cannot_be_rebuilt_has_the_position_of_the_difference(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)
    async with driver.program.database.connection() as connection:
        await connection.execute("UPDATE turns SET native = convert_to($1, 'UTF8') WHERE seq = 2", "{}")

    found = await look(driver, 4)

    assert found.request.proof is RequestProof.DIFFERENT
    assert found.request.rebuilt_hash != found.request.stored_hash
    assert found.request.first_difference is not None
    assert found.blocks[found.request.first_difference].entry.seq == 2


async def test_a_call_of_an_unknown_provider_is_shown(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)

    found = await look(driver, 2, offline_providers={})

    assert found.request.proof is RequestProof.IMPOSSIBLE
    assert found.request.error_code == "provider_unknown"
    assert found.folded is None


@pytest.mark.parametrize("provider", BOTH)
async def test_layers_share_the_tokens_that_the_provider_reported(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)

    found = await look(driver, 6)

    assert found.call.end is not None
    assert found.are_tokens_reported
    assert sum(share.token_count for share in found.layers) == found.call.end.usage.input_tokens
    assert sum(block.token_count for block in found.blocks) == found.call.end.usage.input_tokens
    assert [share.layer for share in found.layers] == list(Layer)
    assert all(share.size_bytes for share in found.layers)


@pytest.mark.parametrize("provider", BOTH)
async def test_an_answer_is_parsed_again_from_its_bytes(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)

    found = await look(driver, 6)

    assert found.folded is not None
    assert found.folded.error_code is None
    assert "".join(event.text for event in found.folded.events if isinstance(event, TextDelta)) == "Wet."
    assert any(isinstance(event, UsageReported) for event in found.folded.events)
    assert len(found.frames) > 1
    turn = await driver.program.store.load_turn(driver.tenant_id, driver.conversation_id, 6)
    assert isinstance(turn, ModelResponseTurn)
    assert found.folded.answer.blocks == turn.blocks
    assert found.cost is not None
    assert found.cost.total_usd == turn.cost_usd


@pytest.mark.parametrize("provider", BOTH)
async def test_a_call_is_compared_with_the_previous_one(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)

    first, second = await look(driver, 2), await look(driver, 4)

    assert first.previous is None
    assert first.compared == ()
    assert second.previous is not None
    assert second.previous.turn_seq == 2
    added = [block.entry.seq for block in second.compared if block.change is BlockChange.ADDED]
    assert {2, 3} <= set(added)
    kept = [block.entry for block in second.compared if block.change is not BlockChange.REMOVED]
    assert kept == [block.entry for block in second.blocks]


@pytest.mark.parametrize("provider", BOTH)
async def test_signatures_are_listed_part_by_part(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)
    other = ANTHROPIC if provider == GEMINI else GEMINI
    await driver.switch(other)
    await driver.task("Switched?", text_reply("Yes."))

    signed, switched = await look(driver, 2), await look(driver, 8)

    present = [part for part in signed.received_signatures if part.state is SignatureState.PRESENT]
    assert present
    assert all(part.length and part.fingerprint for part in present)
    withheld = [part for part in switched.sent_signatures if part.state is SignatureState.WITHHELD]
    assert {part.seq for part in withheld} >= {2}
    assert {part.reason for part in withheld} == {"provider"}
    assert not [part for part in switched.sent_signatures if part.state is SignatureState.PRESENT]


async def test_a_failed_call_keeps_its_error_body_and_its_attempts(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI)
    await driver.fail("Broken.", text_reply("One two three four five."), after_chunks=3)

    found = await look(driver, 2)

    assert found.call.end is not None
    assert found.call.end.error_code == "provider_disconnected"
    assert found.folded is not None
    assert found.folded.error_code is not None
    assert [outline.attempt for outline in found.attempts] == [1]


@pytest.mark.parametrize("provider", BOTH)
async def test_a_background_call_is_found_too(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)
    with pytest.raises(CallNotFound):
        await look(driver, -7)
    with pytest.raises(CallNotFound):
        await look(driver, 2, attempt=99999999)


async def test_a_timeline_shows_turns_with_their_calls_and_the_running_one(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)
    program = driver.program
    inspector = PostgresInspector(program.database)
    await accept(program.store, driver.tenant_id, user_input(driver.conversation_id))

    timeline = await inspector.load_timeline(driver.tenant_id, driver.conversation_id)

    assert [item.turn.seq for item in timeline.turns] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(item.calls) for item in timeline.turns] == [0, 1, 0, 1, 0, 1, 0]
    assert '"stay"' in timeline.turns[1].calls[0].dynamic
    assert timeline.running is not None
    assert timeline.running.seq == 8
    assert (timeline.earlier_seq, timeline.later_seq) == (None, None)
    assert timeline.tenant_name == "acme"
    assert timeline.conversation.context == {"todos": ["stay"]}


async def test_a_timeline_can_be_opened_at_any_turn(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)
    inspector = PostgresInspector(driver.program.database)

    async def seqs(**place: int) -> tuple[list[int], int | None, int | None]:
        part = await inspector.load_timeline(driver.tenant_id, driver.conversation_id, limit=2, **place)
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


async def test_compactions_are_on_the_timeline(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await drive_to_full_window(strata_server, emulated, GEMINI)

    timeline = await PostgresInspector(driver.program.database).load_timeline(driver.tenant_id, driver.conversation_id)

    assert [outline.reason.value for outline in timeline.epochs][-1] == "compacted"
    assert [outline.buffer_start_seq for outline in timeline.epochs] == [9, 5]
    assert timeline.conversation.buffer_start_seq == 9


async def test_an_epoch_keeps_the_args_that_its_text_was_rendered_with(strata_server: StrataServer) -> None:
    store, tenant_id = strata_server.program.store, strata_server.tenant.id
    conversation = await create_conversation(store, tenant_id)
    await store.begin_epoch(tenant_id, conversation.id, epoch(1, args={"tone": "calm"}))
    # Compactions render nothing, and have no args.
    await store.begin_epoch(tenant_id, conversation.id, epoch(2, "You help on."))
    await store.begin_epoch(tenant_id, conversation.id, epoch(3, "You help.", arguments_hash=b"other"))
    async with strata_server.program.database.connection() as connection:
        kept = [row["args"] for row in await connection.fetch("SELECT args::text FROM epochs ORDER BY number")]
    assert kept == ['{"tone":"calm"}', '{"tone":"calm"}', None]


async def test_objects_of_another_tenant_are_not_found(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)
    other = await strata_server.key_ring.create_tenant("other")
    inspector = PostgresInspector(driver.program.database)

    for tenant_id in (other.id, "tenant_nonsense"):
        with pytest.raises(ConversationNotFound):
            await inspector.load_timeline(tenant_id, driver.conversation_id)
        with pytest.raises(ConversationNotFound):
            await inspector.load_stored_call(tenant_id, driver.conversation_id, 2, 1)
    assert (await inspector.load_timeline(None, driver.conversation_id)).tenant_id == driver.tenant_id
    assert (await inspector.load_stored_call(None, driver.conversation_id, 2, 1)).tenant_id == driver.tenant_id
    with pytest.raises(ConversationNotFound):
        await inspector.load_timeline(None, "conv_nonsense")
