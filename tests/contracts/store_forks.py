"""The contract of the store for forking and erasing; see `store_contract`."""

import asyncio
import hashlib
from dataclasses import replace
from decimal import Decimal

import pytest

from server.conversation.api_key import Tenant
from server.conversation.block import Blob
from server.conversation.conversation import Conversation, ConversationState, Origin
from server.conversation.epoch import Segment
from server.conversation.errors import (
    ConversationBusy,
    ConversationNotFound,
    TurnNotFound,
)
from server.conversation.payload import LayerOrder
from server.conversation.store import (
    ConversationChange,
    PayloadSource,
    Store,
)
from server.conversation.turn import (
    ModelResponseTurn,
    StopReason,
    TurnState,
)
from tests.contracts.store_accepting import draw
from tests.support.builders import (
    LEASE_SECONDS,
    NASTY,
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    epoch,
    picture,
    take_exchange,
    tool_call,
    tool_response,
    user_input,
)


async def fill_conversation(store: Store, tenant: Tenant, conversation: Conversation) -> dict[int, PayloadSource]:
    """Store eight turns over three epochs, with tools, an image and a failed turn. Returns what would be sent next
    after each turn of the model.
    """
    sources = {}
    image = picture(b"img")
    failed = {"state": TurnState.FAILED, "calls": ["never asked for"], "pending_call_ids": ()}
    for number, changes in enumerate(({"calls": ["a", NASTY]}, {}, failed, {}), start=1):
        if number in (1, 2, 4):
            await compact(store, tenant, conversation, number)
        begun = (await store.load_conversation(tenant.id, conversation.id)).epoch
        turn = user_input(conversation.id, f"Question {number}", blobs=(image,), idempotency_key=f"key {number}")
        if number == 2:
            turn = tool_response(conversation.id, ["a", NASTY], idempotency_key="key 2")
        accepted = await accept(store, tenant.id, turn)
        start = call_start(epoch=begun, layer_order=LayerOrder.APPEND_ONLY, dynamic=f"dynamic {number}".encode())
        await store.end_call(accepted.lease, start, call_end(status=503))
        await store.finish_turn(accepted.lease, answer(**changes, start=replace(start, attempt=2)))  # type: ignore[arg-type]
        sources[accepted.lease.turn_seq] = await store.load_payload_source(tenant.id, conversation.id)
    return sources


async def compact(store: Store, tenant: Tenant, conversation: Conversation, number: int) -> None:
    """The next epoch, the first of them without a segment."""
    before = await store.load_conversation(tenant.id, conversation.id)
    count = before.epoch
    segment = Segment(
        generation=0, position=count - 1, first_seq=1, last_seq=2, text=f"<segment {number}>", token_count=5
    )
    begun = epoch(
        count + 1, f"Text {number}", segment_count=count, buffer_start_seq=max(1, before.next_seq - 2 * (count > 0))
    )
    await store.begin_epoch(tenant.id, conversation.id, begun, segment=segment if count else None)


class ForkContract:
    async def test_a_fork_sends_what_the_source_would_have_sent(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(
            store, tenant.id, identifier="x", source="s", direction="d", mode="m", args={"b": NASTY, "a": 1}
        )
        then = await fill_conversation(store, tenant, source)
        await store.change_conversation(
            tenant.id, source.id, ConversationChange(context={"todos": [NASTY]}, metadata={"k": NASTY})
        )
        original = await store.load_conversation(tenant.id, source.id)
        for at_seq, expected in then.items():
            fork = await store.fork_conversation(tenant.id, source.id, at_seq)
            assert fork == await store.load_conversation(tenant.id, fork.id)
            assert fork.forked_from == Origin(conversation_id=source.id, seq=at_seq)
            assert (fork.id != source.id, fork.identifier, fork.revision) == (True, None, 0)
            assert (fork.next_seq, fork.epoch) == (at_seq + 1, expected.conversation.epoch)
            assert fork.buffer_start_seq == expected.conversation.buffer_start_seq
            assert (fork.pending_call_ids, fork.pending_calls) == (
                (("a", NASTY), (tool_call("a"), tool_call(NASTY))) if at_seq == 2 else ((), ())
            )
            for name in (
                "assistant_id",
                "assistant_version",
                "args",
                "context",
                "metadata",
                "source",
                "direction",
                "mode",
            ):
                assert getattr(fork, name) == getattr(original, name), name
            assert list(fork.args) == ["b", "a"]
            found = await store.load_payload_source(tenant.id, fork.id)
            assert found == replace(expected, conversation=found.conversation)
        assert await store.load_conversation(tenant.id, source.id) == original

    async def test_a_fork_has_all_turns_and_calls_up_to_its_position(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        await fill_conversation(store, tenant, source)
        fork = await store.fork_conversation(tenant.id, source.id, 6)
        theirs = (await store.list_turns(tenant.id, source.id)).items[:6]
        ours = (await store.list_turns(tenant.id, fork.id)).items
        assert [
            replace(turn, revision=None) if isinstance(turn, ModelResponseTurn) else turn for turn in theirs
        ] == ours
        for turn_seq in (2, 4, 6):
            calls = await store.list_calls(tenant.id, fork.id, turn_seq)
            assert len(calls) == 2
            assert calls == await store.list_calls(tenant.id, source.id, turn_seq)
            for attempt in (1, 2):
                one, other = [
                    (await store.load_rebuild_source(tenant.id, conversation_id, turn_seq, attempt)).source
                    for conversation_id in (source.id, fork.id)
                ]
                assert replace(other, conversation=one.conversation) == one
        assert await store.list_calls(tenant.id, fork.id, 8) == []

    async def test_a_fork_at_an_input_does_not_include_its_answer(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        then = await fill_conversation(store, tenant, source)
        fork = await store.fork_conversation(tenant.id, source.id, 3)
        assert (fork.next_seq, fork.pending_call_ids, fork.state) == (5, (), ConversationState.IDLE)
        assert fork.forked_from == Origin(conversation_id=source.id, seq=3)
        # The epoch of the newest copied call, not of the call that answered in the source.
        assert fork.epoch == then[2].conversation.epoch
        stand_in = await store.load_turn(tenant.id, fork.id, 4)
        assert isinstance(stand_in, ModelResponseTurn)
        assert (stand_in.blocks, stand_in.state) == ((), TurnState.CANCELLED)
        assert (stand_in.stop_reason, stand_in.attempt, stand_in.cost_usd) == (StopReason.ABORTED, None, Decimal(0))
        assert (stand_in.provider, stand_in.model) == ("gemini", "gemini-3.1-pro-preview")
        [*_, buffered] = (await store.load_payload_source(tenant.id, fork.id)).buffered
        assert (buffered.seq, buffered.blocks) == (4, ())
        assert await store.list_calls(tenant.id, fork.id, 4) == []
        assert (await accept(store, tenant.id, user_input(fork.id))).seq == 5

    async def test_a_fork_before_any_call_has_no_epoch(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        await fill_conversation(store, tenant, source)
        fork = await store.fork_conversation(tenant.id, source.id, 1)
        assert (fork.epoch, fork.buffer_start_seq, fork.next_seq) == (0, 1, 3)
        found = await store.load_payload_source(tenant.id, fork.id)
        assert (found.epoch, [turn.seq for turn in found.buffered]) == (None, [1, 2])
        await store.begin_epoch(tenant.id, fork.id, epoch(1))

    async def test_a_fork_is_independent_of_its_source(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        await fill_conversation(store, tenant, source)
        before = await store.load_payload_source(tenant.id, source.id)
        fork = await store.fork_conversation(tenant.id, source.id, 2)
        await compact(store, tenant, fork, 9)
        accepted = await accept(store, tenant.id, tool_response(fork.id, [NASTY, "a"]))
        await store.finish_turn(accepted.lease, answer("Another answer"))
        found = await store.load_payload_source(tenant.id, fork.id)
        assert found.static_text == "Text 9<segment 9>"
        assert await store.load_payload_source(tenant.id, source.id) == before

    async def test_an_idempotency_key_of_the_source_is_unused_in_the_fork(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        for key in ("k", None):
            accepted = await accept(store, tenant.id, user_input(source.id, "Hello", idempotency_key=key))
            await store.finish_turn(accepted.lease, answer())
        fork = await store.fork_conversation(tenant.id, source.id, 4)
        accepted = await accept(store, tenant.id, user_input(fork.id, "Hello", announces_retry=True))
        await store.finish_turn(accepted.lease, answer())
        assert (await accept(store, tenant.id, user_input(fork.id, "Hello", idempotency_key="k"))).seq == 7

    async def test_a_running_turn_does_not_prevent_a_fork_and_is_not_copied(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, source.id)
        running = await accept(store, tenant.id, user_input(source.id, "And now?"))
        await store.begin_call(running.lease, call_start())
        await store.request_cancel(tenant.id, source.id)
        for at_seq in (2, 3):
            fork = await store.fork_conversation(tenant.id, source.id, at_seq)
            assert fork.state is ConversationState.IDLE
            accepted = await accept(store, tenant.id, user_input(fork.id))
            assert not await store.append_chunks(accepted.lease, [], lease_seconds=LEASE_SECONDS)
        with pytest.raises(TurnNotFound):
            await store.fork_conversation(tenant.id, source.id, 4)
        await store.finish_turn(running.lease, answer())

    async def test_a_fork_at_a_missing_turn_creates_nothing(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        for at_seq in (0, 1, -1, 2**80):
            with pytest.raises(TurnNotFound):
                await store.fork_conversation(tenant.id, source.id, at_seq)
        assert len((await store.list_conversations(tenant.id)).items) == 1

    async def test_a_fork_keeps_its_images_when_the_source_is_erased(self, store: Store, tenant: Tenant) -> None:
        image = picture(b"img")
        for _ in range(10):
            source = await create_conversation(store, tenant.id)
            accepted = await accept(store, tenant.id, user_input(source.id, blobs=(image,)))
            await store.finish_turn(accepted.lease, answer())
            outcome, _ = await asyncio.gather(
                store.fork_conversation(tenant.id, source.id, 2),
                store.erase_conversation(tenant.id, source.id),
                return_exceptions=True,
            )
            if isinstance(outcome, ConversationNotFound):
                assert await store.load_blob(tenant.id, image.sha256) is None
                continue
            assert isinstance(outcome, Conversation)
            found = await store.load_payload_source(tenant.id, outcome.id)
            assert found.blobs == {image.sha256.hex(): image}
            rows = (await store.erase_conversation(tenant.id, outcome.id)).rows
            assert rows == {"conversations": 1, "turns": 2, "calls": 1, "blobs": 1, "blob_references": 1}

    async def test_a_fork_can_be_forked(self, store: Store, tenant: Tenant) -> None:
        source = await create_conversation(store, tenant.id)
        then = await fill_conversation(store, tenant, source)
        middle = await store.fork_conversation(tenant.id, source.id, 6)
        last = await store.fork_conversation(tenant.id, middle.id, 4)
        assert last.forked_from == Origin(conversation_id=middle.id, seq=4)
        found = await store.load_payload_source(tenant.id, last.id)
        assert found == replace(then[4], conversation=found.conversation)


class EraseContract:
    async def test_a_dry_run_reports_what_would_be_erased_and_changes_nothing(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        await store.begin_epoch(tenant.id, conversation.id, epoch())
        await take_exchange(store, tenant.id, conversation.id)
        report = await store.erase_conversation(tenant.id, conversation.id, dry_run=True)
        assert report.rows == {"conversations": 1, "turns": 2, "calls": 1, "epochs": 1}
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 2
        assert (await store.erase_conversation(tenant.id, conversation.id)).rows == report.rows
        with pytest.raises(ConversationNotFound):
            await store.load_conversation(tenant.id, conversation.id)

    async def test_waiting_tickets_are_erased_with_the_conversation(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        ticket = await draw(store, tenant, conversation)
        report = await store.erase_conversation(tenant.id, conversation.id)
        assert report.rows == {"conversations": 1, "waiting_turns": 1}
        assert not await store.renew_ticket(conversation.id, ticket, seconds=LEASE_SECONDS)

    async def test_no_ticket_is_issued_for_a_conversation_that_is_being_erased(
        self, store: Store, tenant: Tenant
    ) -> None:
        for _ in range(10):
            conversation = await create_conversation(store, tenant.id)
            ticket, _ = await asyncio.gather(
                draw(store, tenant, conversation),
                store.erase_conversation(tenant.id, conversation.id),
                return_exceptions=True,
            )
            assert isinstance(ticket, int | ConversationNotFound)
            if isinstance(ticket, int):
                assert not await store.renew_ticket(conversation.id, ticket, seconds=LEASE_SECONDS)

    async def test_a_running_conversation_is_not_erased(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        with pytest.raises(ConversationBusy):
            await store.erase_conversation(tenant.id, conversation.id)
        await store.finish_turn(accepted.lease, answer())
        assert (await store.erase_conversation(tenant.id, conversation.id)).rows["turns"] == 2

    async def test_a_shared_image_is_erased_with_its_last_conversation(self, store: Store, tenant: Tenant) -> None:
        blob = Blob(sha256=hashlib.sha256(b"img").digest(), media_type="image/png", data=b"img")
        conversations = []
        for _ in range(2):
            conversation = await create_conversation(store, tenant.id)
            accepted = await accept(store, tenant.id, user_input(conversation.id, blobs=(blob,)))
            await store.finish_turn(accepted.lease, answer())
            conversations.append(conversation)
        assert "blobs" not in (await store.erase_conversation(tenant.id, conversations[0].id)).rows
        assert await store.load_blob(tenant.id, blob.sha256) == blob
        assert (await store.erase_conversation(tenant.id, conversations[1].id)).rows["blobs"] == 1
        assert await store.load_blob(tenant.id, blob.sha256) is None

    async def test_an_image_that_is_used_again_survives_the_erasure(self, store: Store, tenant: Tenant) -> None:
        blob = Blob(sha256=hashlib.sha256(b"img").digest(), media_type="image/png", data=b"img")
        for _ in range(10):
            old = await create_conversation(store, tenant.id)
            accepted = await accept(store, tenant.id, user_input(old.id, blobs=(blob,)))
            await store.finish_turn(accepted.lease, answer())
            new = await create_conversation(store, tenant.id)
            await asyncio.gather(
                store.erase_conversation(tenant.id, old.id),
                store.accept_turn(tenant.id, user_input(new.id, blobs=(blob,))),
            )
            assert await store.load_blob(tenant.id, blob.sha256) == blob
