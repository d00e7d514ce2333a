"""The contract of the store for accepting turns and for waiting to be accepted; see `store_contract`."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from server.conversation.api_key import Tenant
from server.conversation.block import Blob, ImageBlock, TextBlock, ToolResultBlock, UnknownBlock, decode_blocks
from server.conversation.conversation import Conversation, ConversationState, Lease
from server.conversation.errors import (
    ConversationBusy,
    HistoryRuleBroken,
    IdempotencyKeyReused,
    QueueFull,
    RevisionMismatch,
)
from server.conversation.identifiers import CONVERSATION, new_id
from server.conversation.store import (
    Duplicate,
    Store,
)
from server.conversation.turn import (
    STRATA_DIALECT,
    ToolResponseTurn,
    UserTaskTurn,
)
from tests.support.builders import (
    LEASE_SECONDS,
    NASTY,
    accept,
    answer,
    create_conversation,
    take_exchange,
    token,
    tool_response,
    user_input,
)

EMOJI_10_MB = "😀" * 2_500_000


class AcceptContract:
    async def test_an_accepted_turn_is_durable_and_locks_the_conversation(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        turn = user_input(conversation.id, "Hello", language="nb", args={"b": 1, "a": NASTY})
        accepted = await accept(store, tenant.id, turn)
        assert (accepted.seq, accepted.revision) == (1, 1)
        assert accepted.lease == Lease(
            conversation_id=conversation.id, token=turn.lease_token, owner="test", turn_seq=2
        )
        after = await store.load_conversation(tenant.id, conversation.id)
        assert (after.state, after.revision, after.next_seq) == (ConversationState.RUNNING, 1, 3)
        stored = await store.load_turn(tenant.id, conversation.id, 1)
        assert stored == UserTaskTurn(
            seq=1, created_at=stored.created_at, blocks=turn.blocks, language="nb", args={"b": 1, "a": NASTY}
        )

    @pytest.mark.parametrize("text", [NASTY, "", EMOJI_10_MB], ids=["nasty", "empty", "10 MB of emoji"])
    async def test_any_text_comes_back_byte_for_byte(self, store: Store, tenant: Tenant, text: str) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, text, text)
        question = await store.load_turn(tenant.id, conversation.id, 1)
        reply = await store.load_turn(tenant.id, conversation.id, 2)
        assert question.blocks == (TextBlock(text=text),)
        assert reply.blocks == answer(text).blocks
        native = await store.load_native(tenant.id, conversation.id, 1)
        assert native.dialect == STRATA_DIALECT
        assert decode_blocks(native.data) == (TextBlock(text=text),)

    async def test_tool_results_and_unknown_blocks_come_back_unchanged(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, calls=[NASTY])
        output = {"z": [1, 2.5, -0.0, 1e300, 12345678901234567890, None, True, NASTY], "a": {"": []}}
        blocks = (
            ToolResultBlock(tool_call_id=NASTY, output=output, is_error=True),
            UnknownBlock(data={"type": "hologram", NASTY: NASTY}),
        )
        await accept(store, tenant.id, tool_response(conversation.id, [NASTY], blocks=blocks))
        stored = await store.load_turn(tenant.id, conversation.id, 3)
        assert stored == ToolResponseTurn(seq=3, created_at=stored.created_at, blocks=blocks)
        native = await store.load_native(tenant.id, conversation.id, 3)
        assert list(decode_blocks(native.data)[0].output) == ["z", "a"]  # type: ignore[union-attr]

    async def test_a_second_turn_is_refused_while_one_runs(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        first = await accept(store, tenant.id, user_input(conversation.id))
        with pytest.raises(ConversationBusy) as caught:
            await store.accept_turn(tenant.id, user_input(conversation.id, "Second"))
        assert caught.value.details == {"running_seq": 2}
        await store.finish_turn(first.lease, answer())
        assert (await accept(store, tenant.id, user_input(conversation.id, "Second"))).seq == 3

    async def test_accepting_does_not_take_over_an_expired_lease(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id, lease_seconds=-1))
        with pytest.raises(ConversationBusy):
            await store.accept_turn(tenant.id, user_input(conversation.id))

    async def test_repeating_the_same_acceptance_changes_nothing(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for turn in (user_input(conversation.id), user_input(conversation.id, idempotency_key="k")):
            first = await accept(store, tenant.id, turn)
            assert await store.accept_turn(tenant.id, turn) == first
            await store.finish_turn(first.lease, answer())
        assert (await store.load_conversation(tenant.id, conversation.id)).next_seq == 5

    async def test_the_same_key_and_body_is_a_duplicate_while_it_runs_and_after(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        first = await accept(store, tenant.id, user_input(conversation.id, idempotency_key=NASTY))
        again = user_input(conversation.id, idempotency_key=NASTY)
        assert await store.accept_turn(tenant.id, again) == Duplicate(seq=1, answer_seq=2, running=True)
        await store.finish_turn(first.lease, answer())
        for _ in range(3):
            await take_exchange(store, tenant.id, conversation.id)
        # A duplicate is detected before any other check.
        late = replace(again, expected_revision=77)
        assert await store.accept_turn(tenant.id, late) == Duplicate(seq=1, answer_seq=2, running=False)
        assert (await store.load_conversation(tenant.id, conversation.id)).next_seq == 9

    async def test_the_same_key_with_another_body_is_refused(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id, "One", idempotency_key="k"))
        with pytest.raises(IdempotencyKeyReused):
            await store.accept_turn(tenant.id, user_input(conversation.id, "Two", idempotency_key="k"))

    async def test_a_key_is_valid_for_its_conversation_only(self, store: Store, tenant: Tenant) -> None:
        for _ in range(2):
            conversation = await create_conversation(store, tenant.id)
            assert (await accept(store, tenant.id, user_input(conversation.id, idempotency_key="k"))).seq == 1

    async def test_a_declared_retry_is_recognised_by_its_body(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, "Hello")
        retry = user_input(conversation.id, "Hello", announces_retry=True)
        assert await store.accept_turn(tenant.id, retry) == Duplicate(seq=1, answer_seq=2, running=False)
        other = user_input(conversation.id, "Something else", announces_retry=True)
        accepted = await accept(store, tenant.id, other)
        await store.finish_turn(accepted.lease, answer())
        # Sending the same text twice is not a retry.
        assert (await accept(store, tenant.id, user_input(conversation.id, "Something else"))).seq == 5

    async def test_a_duplicate_is_found_without_accepting(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        keyed = user_input(conversation.id, "Hello", idempotency_key=NASTY)
        retry = user_input(conversation.id, "Hello", announces_retry=True)
        for turn in (keyed, retry):
            assert await store.find_duplicate(tenant.id, turn) is None
        first = await accept(store, tenant.id, keyed)
        for turn in (keyed, retry):
            again = replace(turn, lease_token=token())
            assert await store.find_duplicate(tenant.id, again) == Duplicate(seq=1, answer_seq=2, running=True)
        await store.finish_turn(first.lease, answer())
        assert await store.find_duplicate(tenant.id, keyed) == Duplicate(seq=1, answer_seq=2, running=False)
        assert await store.find_duplicate(tenant.id, replace(retry, announces_retry=False)) is None
        with pytest.raises(IdempotencyKeyReused):
            await store.find_duplicate(tenant.id, user_input(conversation.id, "Else", idempotency_key=NASTY))
        assert (await store.load_conversation(tenant.id, conversation.id)).next_seq == 3

    async def test_a_stale_revision_is_refused_and_nothing_is_written(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id)
        with pytest.raises(RevisionMismatch) as caught:
            await store.accept_turn(tenant.id, user_input(conversation.id, expected_revision=1))
        assert caught.value.details == {"expected_revision": 1, "revision": 2}
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 2
        assert (await accept(store, tenant.id, user_input(conversation.id, expected_revision=2))).revision == 3

    async def test_tool_results_are_accepted_in_any_order_if_they_are_complete(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, calls=["a", "b", "c"])
        waiting = await store.load_conversation(tenant.id, conversation.id)
        assert (waiting.state, waiting.pending_call_ids) == (ConversationState.AWAITING_TOOLS, ("a", "b", "c"))
        accepted = await accept(store, tenant.id, tool_response(conversation.id, ["c", "a", "b"]))
        assert (await store.load_conversation(tenant.id, conversation.id)).pending_call_ids == ()
        await store.finish_turn(accepted.lease, answer())
        assert (await store.load_conversation(tenant.id, conversation.id)).state is ConversationState.IDLE

    @pytest.mark.parametrize(
        ("answers", "rule", "missing", "unexpected"),
        [
            (["a"], "all_calls_answered", ["b"], None),
            (["a", "b", "x"], "no_orphan_response", [], ["x"]),
            (["x"], "no_orphan_response", ["a", "b"], ["x"]),
            ([], "all_calls_answered", ["a", "b"], None),
        ],
    )
    async def test_results_that_do_not_match_are_refused_with_the_ids(
        self,
        store: Store,
        tenant: Tenant,
        answers: list[str],
        rule: str,
        missing: list[str],
        unexpected: list[str] | None,
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, calls=["a", "b"])
        with pytest.raises(HistoryRuleBroken) as caught:
            await store.accept_turn(tenant.id, tool_response(conversation.id, answers))
        details = caught.value.details
        assert (details["rule"], details["missing_ids"], details.get("unexpected_ids")) == (rule, missing, unexpected)
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 2

    async def test_results_without_a_pending_call_are_refused(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for answers in (["a"], []):
            with pytest.raises(HistoryRuleBroken) as caught:
                await store.accept_turn(tenant.id, tool_response(conversation.id, answers))
            assert caught.value.details["rule"] == "no_orphan_response"

    async def test_a_user_task_requires_results_unless_it_abandons_the_calls(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, calls=["a"])
        with pytest.raises(HistoryRuleBroken) as caught:
            await store.accept_turn(tenant.id, user_input(conversation.id))
        assert caught.value.details == {"rule": "call_followed_by_responses", "missing_ids": ["a"]}
        accepted = await accept(store, tenant.id, user_input(conversation.id, abandons_calls=True))
        assert accepted.seq == 3
        assert (await store.load_conversation(tenant.id, conversation.id)).pending_call_ids == ()

    async def test_an_image_is_stored_once_and_found_by_its_hash(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        data = bytes(range(256)) * 40
        digest = hashlib.sha256(data)
        blob = Blob(sha256=digest.digest(), media_type="image/png", data=data)
        image = ImageBlock(media_type="image/png", sha256=digest.hexdigest(), size_bytes=len(data))
        for _ in range(2):
            conversation = await create_conversation(store, tenant.id)
            turn = user_input(conversation.id, blocks=(image, image), blobs=(blob, blob))
            await accept(store, tenant.id, turn)
            assert (await store.load_turn(tenant.id, conversation.id, 1)).blocks == (image, image)
        assert await store.load_blob(tenant.id, blob.sha256) == blob
        assert await store.load_blob(tenant.id, b"\0" * 32) is None
        assert await store.load_blob(other_tenant.id, blob.sha256) is None
        assert await store.load_blob(tenant.id, blob.sha256, conversation_id=conversation.id) == blob
        elsewhere = await create_conversation(store, tenant.id)
        assert await store.load_blob(tenant.id, blob.sha256, conversation_id=elsewhere.id) is None


async def draw(
    store: Store, tenant: Tenant, conversation: Conversation, *, seconds: float = LEASE_SECONDS, first: bool = False
) -> int:
    return await store.enter_queue(tenant.id, conversation.id, limit=100, seconds=seconds, first=first)


class QueueContract:
    async def test_tickets_are_served_in_order(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        running = await accept(store, tenant.id, user_input(conversation.id))
        tickets = [await draw(store, tenant, conversation) for _ in range(3)]
        await store.finish_turn(running.lease, answer())
        for ticket in tickets:
            for later in [number for number in (*tickets, None) if number is None or number > ticket]:
                with pytest.raises(ConversationBusy):
                    await store.accept_turn(tenant.id, user_input(conversation.id, ticket=later))
            accepted = await accept(store, tenant.id, user_input(conversation.id, ticket=ticket))
            await store.finish_turn(accepted.lease, answer())
        # The queue is empty.
        assert (await accept(store, tenant.id, user_input(conversation.id))).seq == 9

    async def test_a_ticket_does_not_unlock_a_running_conversation(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id))
        ticket = await draw(store, tenant, conversation)
        with pytest.raises(ConversationBusy) as caught:
            await store.accept_turn(tenant.id, user_input(conversation.id, ticket=ticket))
        assert caught.value.details == {"running_seq": 2}

    async def test_a_refused_turn_keeps_its_ticket(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        ticket = await draw(store, tenant, conversation)
        with pytest.raises(RevisionMismatch):
            await store.accept_turn(tenant.id, user_input(conversation.id, ticket=ticket, expected_revision=7))
        with pytest.raises(ConversationBusy):
            await store.accept_turn(tenant.id, user_input(conversation.id))
        assert await store.renew_ticket(conversation.id, ticket, seconds=LEASE_SECONDS)

    async def test_a_duplicate_is_recognised_in_any_queue(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id, idempotency_key="k"))
        await store.finish_turn(accepted.lease, answer())
        await draw(store, tenant, conversation)
        again = user_input(conversation.id, idempotency_key="k")
        assert await store.accept_turn(tenant.id, again) == Duplicate(seq=1, answer_seq=2, running=False)

    async def test_priority_tickets_are_served_first_and_the_newest_of_them_before_the_others(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        waiting = await draw(store, tenant, conversation)
        older = await draw(store, tenant, conversation, first=True)
        newer = await draw(store, tenant, conversation, first=True)
        assert newer < older < waiting
        for late in (waiting, older):
            with pytest.raises(ConversationBusy):
                await store.accept_turn(tenant.id, user_input(conversation.id, ticket=late))
        for ticket in (newer, older, waiting):
            accepted = await accept(store, tenant.id, user_input(conversation.id, ticket=ticket))
            await store.finish_turn(accepted.lease, answer())

    async def test_an_expired_ticket_blocks_no_other_and_is_removed(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        lapsed = await draw(store, tenant, conversation, seconds=0)
        assert await store.renew_ticket(conversation.id, lapsed, seconds=0)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        await store.finish_turn(accepted.lease, answer())
        await draw(store, tenant, conversation, seconds=0)
        assert not await store.renew_ticket(conversation.id, lapsed, seconds=LEASE_SECONDS)

    async def test_a_renewed_ticket_does_not_expire(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        ticket = await draw(store, tenant, conversation, seconds=0)
        assert await store.renew_ticket(conversation.id, ticket, seconds=LEASE_SECONDS)
        with pytest.raises(ConversationBusy):
            await store.accept_turn(tenant.id, user_input(conversation.id))

    async def test_a_returned_ticket_blocks_no_other(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        ticket = await draw(store, tenant, conversation)
        for _ in range(2):
            await store.leave_queue(conversation.id, ticket)
        assert not await store.renew_ticket(conversation.id, ticket, seconds=LEASE_SECONDS)
        await accept(store, tenant.id, user_input(conversation.id))

    async def test_the_limit_of_a_queue_counts_only_valid_tickets(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await draw(store, tenant, conversation, seconds=0)
        tickets = [
            await store.enter_queue(tenant.id, conversation.id, limit=3, seconds=LEASE_SECONDS) for _ in range(3)
        ]
        with pytest.raises(QueueFull):
            await store.enter_queue(tenant.id, conversation.id, limit=3, seconds=LEASE_SECONDS)
        first = await store.enter_queue(tenant.id, conversation.id, limit=3, seconds=LEASE_SECONDS, first=True)
        assert first < min(tickets)
        await store.leave_queue(conversation.id, tickets[0])
        await store.leave_queue(conversation.id, first)
        await store.enter_queue(tenant.id, conversation.id, limit=3, seconds=LEASE_SECONDS)
        with pytest.raises(QueueFull):
            await store.enter_queue(tenant.id, conversation.id, limit=0, seconds=LEASE_SECONDS)

    async def test_the_limit_holds_under_concurrency(self, store: Store, tenant: Tenant) -> None:
        for _ in range(5):
            conversation = await create_conversation(store, tenant.id)
            drawn = await asyncio.gather(
                *(store.enter_queue(tenant.id, conversation.id, limit=3, seconds=LEASE_SECONDS) for _ in range(8)),
                return_exceptions=True,
            )
            tickets = {ticket for ticket in drawn if isinstance(ticket, int)}
            assert (len(tickets), sum(isinstance(refusal, QueueFull) for refusal in drawn)) == (3, 5)

    async def test_queues_of_two_conversations_are_independent(self, store: Store, tenant: Tenant) -> None:
        one, other = [await create_conversation(store, tenant.id) for _ in range(2)]
        ticket = await draw(store, tenant, one)
        await accept(store, tenant.id, user_input(other.id))
        assert not await store.renew_ticket(other.id, ticket, seconds=LEASE_SECONDS)
        await store.leave_queue(other.id, ticket)
        assert await store.renew_ticket(one.id, ticket, seconds=LEASE_SECONDS)
        for conversation_id in (new_id(CONVERSATION), "conv_x"):
            assert not await store.renew_ticket(conversation_id, ticket, seconds=LEASE_SECONDS)
            await store.leave_queue(conversation_id, ticket)
