"""The contract of the store for running turns and their leases; see `store_contract`."""

import asyncio
from dataclasses import replace

import pytest

from server.conversation.api_key import Tenant
from server.conversation.block import TextBlock
from server.conversation.call import Chunk
from server.conversation.conversation import ConversationState, Lease
from server.conversation.errors import (
    LeaseLost,
    TurnNotFound,
    TurnNotRunning,
)
from server.conversation.identifiers import CONVERSATION, new_id
from server.conversation.payload import LayerOrder
from server.conversation.store import (
    ConversationChange,
    Store,
)
from server.conversation.turn import (
    ModelResponseTurn,
    StopReason,
    TurnState,
)
from tests.support.builders import (
    LEASE_SECONDS,
    NASTY,
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    take_exchange,
    token,
    user_input,
)


class RunningTurnContract:
    async def test_a_finished_turn_is_loaded_as_committed(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        given = answer(calls=["a"])
        finished = await store.finish_turn(accepted.lease, given)
        assert finished.revision == 2
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert stored == ModelResponseTurn(
            seq=2,
            created_at=finished.created_at,
            blocks=given.blocks,
            state=TurnState.COMPLETE,
            stop_reason=StopReason.TOOL_USE,
            error_code=None,
            provider="gemini",
            model="gemini-3.1-pro-preview",
            usage=given.usage,
            cost_usd=given.cost_usd,
            attempt=1,
            revision=2,
        )
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert (call.turn_seq, call.start, call.end) == (2, given.start, given.end)
        after = await store.load_conversation(tenant.id, conversation.id)
        assert (after.state, after.revision, after.pending_call_ids) == (ConversationState.AWAITING_TOOLS, 2, ("a",))

    async def test_a_turn_may_end_before_any_call(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        given = answer(
            blocks=(),
            state=TurnState.FAILED,
            stop_reason=StopReason.ERROR,
            error_code="provider_not_configured",
            provider=NASTY,
            model=NASTY,
            account=None,
            start=None,
            end=None,
        )
        finished = await store.finish_turn(accepted.lease, given)
        assert await store.finish_turn(accepted.lease, given) == finished
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert isinstance(stored, ModelResponseTurn)
        assert (stored.attempt, stored.revision, stored.created_at) == (None, 2, finished.created_at)
        assert (stored.provider, stored.model, stored.error_code) == (NASTY, NASTY, "provider_not_configured")
        assert await store.list_calls(tenant.id, conversation.id, 2) == []
        assert (await store.load_conversation(tenant.id, conversation.id)).state is ConversationState.IDLE

    async def test_a_turn_has_the_provider_that_answered_and_a_call_the_one_that_was_called(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        start = call_start(layer_order=LayerOrder.APPEND_ONLY)
        await store.finish_turn(accepted.lease, answer(start=start, provider="p", model="m", account="a"))
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert call.start == start
        [_, reply] = (await store.load_payload_source(tenant.id, conversation.id)).buffered
        assert (reply.provider, reply.model, reply.account) == ("p", "m", "a")

    async def test_a_cancel_request_reaches_the_process_that_runs_the_turn(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        chunk = Chunk(attempt=1, offset=0, data=b"abc")
        assert not await store.append_chunks(accepted.lease, [chunk], lease_seconds=LEASE_SECONDS)
        for turn_seq in (None, 2):
            assert await store.request_cancel(tenant.id, conversation.id, turn_seq=turn_seq) == 2
        for chunks in ([], [chunk]):
            assert await store.append_chunks(accepted.lease, chunks, lease_seconds=LEASE_SECONDS)
        # It does not change the conversation.
        assert (await store.load_conversation(tenant.id, conversation.id)).revision == 1

    async def test_a_cancel_request_ends_with_its_turn(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id, lease_seconds=0))
        await store.request_cancel(tenant.id, conversation.id)
        # The process that takes the turn over has to find it.
        taken = await store.take_over_lease(accepted.lease, token=token(), owner="x", lease_seconds=LEASE_SECONDS)
        assert await store.append_chunks(taken, [], lease_seconds=LEASE_SECONDS)
        await store.finish_turn(taken, answer(state=TurnState.CANCELLED))
        following = await accept(store, tenant.id, user_input(conversation.id))
        assert not await store.append_chunks(following.lease, [], lease_seconds=LEASE_SECONDS)

    async def test_only_the_running_turn_can_be_cancelled(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        with pytest.raises(TurnNotRunning):
            await store.request_cancel(tenant.id, conversation.id)
        await take_exchange(store, tenant.id, conversation.id)
        for turn_seq in (None, 2):
            with pytest.raises(TurnNotRunning):
                await store.request_cancel(tenant.id, conversation.id, turn_seq=turn_seq)
        running = await accept(store, tenant.id, user_input(conversation.id))
        for turn_seq in (2, 3, 0, -1, 2**80):
            with pytest.raises(TurnNotRunning):
                await store.request_cancel(tenant.id, conversation.id, turn_seq=turn_seq)
        assert not await store.append_chunks(running.lease, [], lease_seconds=LEASE_SECONDS)

    async def test_a_failed_turn_keeps_what_arrived(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        given = answer(
            blocks=(TextBlock(text="It ra"),),
            state=TurnState.FAILED,
            stop_reason=None,
            error_code="provider_disconnected",
            cost_usd=None,
            end=call_end(status=None, headers={}, raw_response=b"\x00\xff", cost_usd=None, usage_reported=None),
        )
        await store.finish_turn(accepted.lease, given)
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert isinstance(stored, ModelResponseTurn)
        assert (stored.state, stored.stop_reason, stored.error_code) == (
            TurnState.FAILED,
            None,
            "provider_disconnected",
        )
        assert (stored.blocks, stored.cost_usd) == ((TextBlock(text="It ra"),), None)
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert call.end == given.end
        assert (await store.load_conversation(tenant.id, conversation.id)).state is ConversationState.IDLE

    async def test_finishing_again_with_the_same_lease_changes_nothing(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        first = await store.finish_turn(accepted.lease, answer("First"))
        # Later changes do not affect the stored end of the turn.
        await store.change_conversation(tenant.id, conversation.id, ConversationChange(args={"x": 1}))
        assert await store.finish_turn(accepted.lease, answer("Second")) == first
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert stored.blocks == answer("First").blocks

    async def test_without_the_lease_nothing_of_a_turn_is_written(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        for stranger in (
            replace(accepted.lease, token=token()),
            replace(accepted.lease, conversation_id=new_id(CONVERSATION)),
        ):
            chunks = [Chunk(attempt=1, offset=0, data=b"x")]
            for attempt in (
                store.begin_call(stranger, call_start()),
                store.end_call(stranger, call_start(), call_end()),
                store.append_chunks(stranger, chunks, lease_seconds=LEASE_SECONDS),
                store.finish_turn(stranger, answer()),
            ):
                with pytest.raises(LeaseLost):
                    await attempt
        assert await store.list_calls(tenant.id, conversation.id, 2) == []
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == []
        assert (await store.load_conversation(tenant.id, conversation.id)).state is ConversationState.RUNNING

    async def test_a_call_is_stored_from_its_start(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        start = call_start(
            repairs=({"kind": NASTY},), template_failures=({"template": "x"},), warnings=({"kind": NASTY},)
        )
        for _ in range(2):
            await store.begin_call(accepted.lease, start)
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert (call.start, call.end) == (start, None)
        given = answer(start=start)
        await store.finish_turn(accepted.lease, given)
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert (call.start, call.end) == (start, given.end)

    async def test_each_attempt_is_a_call_and_the_answer_refers_to_its_own(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        failed = call_end(status=503, error_code="provider_unavailable", raw_response=b"busy")
        await store.begin_call(accepted.lease, call_start())
        await store.append_chunks(accepted.lease, [Chunk(attempt=1, offset=0, data=b"bu")], lease_seconds=LEASE_SECONDS)
        for _ in range(2):
            await store.end_call(accepted.lease, call_start(), failed)
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == []
        await store.finish_turn(accepted.lease, answer(start=call_start(attempt=2)))
        calls = await store.list_calls(tenant.id, conversation.id, 2)
        assert [(call.start.attempt, call.end and call.end.status) for call in calls] == [(1, 503), (2, 200)]
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert isinstance(stored, ModelResponseTurn)
        assert stored.attempt == 2

    async def test_chunks_are_read_once_in_order_and_are_deleted_with_the_turn(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        pieces = [
            Chunk(attempt=1, offset=0, data=b"\x00abc"),
            Chunk(attempt=1, offset=4, data=b"\xff" * 5),
            Chunk(attempt=1, offset=9, data=b"end"),
        ]
        for batch in ([pieces[2]], pieces[:2], pieces, []):
            await store.append_chunks(accepted.lease, batch, lease_seconds=LEASE_SECONDS)
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == pieces
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1, from_offset=4) == pieces[1:]
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=2) == []
        await store.finish_turn(accepted.lease, answer())
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == []

    async def test_turns_are_paged_from_either_end(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for number in range(5):
            await take_exchange(store, tenant.id, conversation.id, str(number))

        async def seqs(*, newest_first: bool) -> list[list[int]]:
            pages, cursor = [], None
            while True:
                page = await store.list_turns(
                    tenant.id, conversation.id, cursor=cursor, limit=4, newest_first=newest_first
                )
                pages.append([turn.seq for turn in page.items])
                cursor = page.next_cursor
                if cursor is None:
                    return pages

        assert await seqs(newest_first=False) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
        assert await seqs(newest_first=True) == [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1]]

    async def test_a_page_is_never_larger_than_the_limit_of_all_pages(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for number in range(51):
            await take_exchange(store, tenant.id, conversation.id, str(number))
        page = await store.list_turns(tenant.id, conversation.id, limit=10**9)
        assert len(page.items) == 100
        assert len((await store.list_turns(tenant.id, conversation.id, limit=-5)).items) == 1

    async def test_a_missing_turn_is_not_found(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id))
        for seq in (0, 2, -1, 2**63, 2**80):
            with pytest.raises(TurnNotFound):
                await store.load_turn(tenant.id, conversation.id, seq)
            with pytest.raises(TurnNotFound):
                await store.load_native(tenant.id, conversation.id, seq)


class LeaseContract:
    async def test_an_expired_lease_is_taken_over_once(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id, lease_seconds=0))
        [(tenant_id, expired)] = await store.list_expired_leases()
        assert (tenant_id, expired) == (tenant.id, accepted.lease)
        outcomes = await asyncio.gather(
            *(
                store.take_over_lease(expired, token=token(), owner=str(n), lease_seconds=LEASE_SECONDS)
                for n in range(8)
            ),
            return_exceptions=True,
        )
        [taken] = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
        assert sum(isinstance(outcome, LeaseLost) for outcome in outcomes) == 7
        assert await store.list_expired_leases() == []
        with pytest.raises(LeaseLost):
            await store.finish_turn(accepted.lease, answer("Too late"))
        await store.finish_turn(taken, answer("", state=TurnState.INTERRUPTED, stop_reason=None))
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert isinstance(stored, ModelResponseTurn)
        assert stored.state is TurnState.INTERRUPTED
        with pytest.raises(LeaseLost):
            await store.finish_turn(accepted.lease, answer("Too late"))

    async def test_the_expired_lease_of_one_conversation_is_found(self, store: Store, tenant: Tenant) -> None:
        made = [await create_conversation(store, tenant.id) for _ in range(3)]
        leases = [
            (await accept(store, tenant.id, user_input(conversation.id, lease_seconds=seconds))).lease
            for conversation, seconds in zip(made, (0, 0, LEASE_SECONDS), strict=True)
        ]
        assert await store.list_expired_leases(conversation_id=made[1].id) == [(tenant.id, leases[1])]
        for conversation_id in (made[2].id, new_id(CONVERSATION), "conv_x"):
            assert await store.list_expired_leases(conversation_id=conversation_id) == []

    async def test_a_live_lease_is_not_taken_over(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        assert await store.list_expired_leases() == []
        with pytest.raises(LeaseLost):
            await store.take_over_lease(accepted.lease, token=token(), owner="x", lease_seconds=LEASE_SECONDS)

    async def test_taking_over_again_with_the_same_token_is_the_same_lease(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id, lease_seconds=0))
        new_token = token()
        taken = [
            await store.take_over_lease(accepted.lease, token=new_token, owner="x", lease_seconds=LEASE_SECONDS)
            for _ in range(2)
        ]
        assert taken[0] == taken[1] == replace(accepted.lease, token=new_token, owner="x")

    async def test_the_heartbeat_keeps_a_lease_alive(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id, lease_seconds=0))
        assert len(await store.list_expired_leases()) == 1
        await store.append_chunks(accepted.lease, [], lease_seconds=LEASE_SECONDS)
        assert await store.list_expired_leases() == []

    async def test_a_stopping_process_releases_only_its_own_leases(self, store: Store, tenant: Tenant) -> None:
        leases = []
        for owner in ("stopping", "stopping", "staying"):
            conversation = await create_conversation(store, tenant.id)
            leases.append((await accept(store, tenant.id, user_input(conversation.id, lease_owner=owner))).lease)
        assert await store.expire_leases("stopping") == 2
        expired = [lease for _, lease in await store.list_expired_leases()]
        assert sorted(expired, key=lambda lease: lease.conversation_id) == sorted(
            leases[:2], key=lambda lease: lease.conversation_id
        )
