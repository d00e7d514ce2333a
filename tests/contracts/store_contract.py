"""The contract of the store port: whoever implements `server.store.Store` passes this."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from server.api_key import Tenant
from server.assistant import Instructions
from server.block import Blob, ImageBlock, TextBlock, ToolResultBlock, UnknownBlock
from server.block_json import decode_blocks
from server.call import Chunk
from server.conversation import ConversationDraft, ConversationState, Lease
from server.epoch import EpochReason, Segment
from server.errors import (
    AssistantNotFound,
    ConversationBusy,
    ConversationNotFound,
    CursorInvalid,
    EpochMoved,
    HistoryRuleBroken,
    IdempotencyKeyReused,
    LeaseLost,
    RevisionMismatch,
    TurnNotFound,
)
from server.identifiers import ASSISTANT, CONVERSATION, new_id
from server.key_ring import KeyRing
from server.store import (
    ConversationChange,
    ConversationFilter,
    Duplicate,
    Store,
)
from server.turn import (
    STRATA_DIALECT,
    ModelResponseTurn,
    Native,
    StopReason,
    ToolResponseTurn,
    TurnKind,
    TurnState,
    UserTaskTurn,
)
from tests.builders import (
    LEASE_SECONDS,
    NASTY,
    accept,
    answer,
    call_end,
    call_start,
    create_assistant,
    create_conversation,
    definition,
    epoch,
    take_exchange,
    token,
    tool_response,
    user_input,
)

EMOJI_10_MB = "😀" * 2_500_000


@pytest.fixture
async def other_tenant(key_ring: KeyRing) -> Tenant:
    return await key_ring.create_tenant("other")


class AssistantContract:
    async def test_an_assistant_comes_back_as_it_was_made(self, store: Store, tenant: Tenant) -> None:
        made = await store.create_assistant(tenant.id, definition())
        assert made.version == 1
        assert made.definition == definition()
        assert await store.load_assistant(tenant.id, made.id) == made

    async def test_tool_parameters_keep_the_order_of_their_keys(self, store: Store, tenant: Tenant) -> None:
        made = await create_assistant(store, tenant.id)
        loaded = await store.load_assistant(tenant.id, made.id)
        assert list(loaded.definition.tools[0].parameters["properties"]) == ["zip", "city"]

    async def test_any_text_survives_in_every_field(self, store: Store, tenant: Tenant) -> None:
        nasty = definition(
            name=NASTY,
            language=NASTY,
            description=NASTY,
            model=NASTY,
            instructions=Instructions(roles=NASTY, procedure=NASTY, constraints=NASTY),
            variables={NASTY: [NASTY, {"deep": NASTY}]},
            settings={"stop": NASTY},
        )
        made = await store.create_assistant(tenant.id, nasty)
        assert (await store.load_assistant(tenant.id, made.id)).definition == nasty

    async def test_a_change_is_a_new_version_and_the_old_one_stays(self, store: Store, tenant: Tenant) -> None:
        first = await create_assistant(store, tenant.id)
        second = await store.revise_assistant(tenant.id, first.id, definition(name="other"))
        assert (second.id, second.version, second.definition.name) == (first.id, 2, "other")
        assert await store.load_assistant(tenant.id, first.id) == second
        assert await store.load_assistant(tenant.id, first.id, 1) == first

    async def test_concurrent_changes_each_get_a_version(self, store: Store, tenant: Tenant) -> None:
        first = await create_assistant(store, tenant.id)
        revised = await asyncio.gather(
            *(store.revise_assistant(tenant.id, first.id, definition(name=str(n))) for n in range(8))
        )
        assert sorted(assistant.version for assistant in revised) == list(range(2, 10))

    async def test_unknown_and_foreign_assistants_are_not_found(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        foreign = await create_assistant(store, other_tenant.id)
        for assistant_id in (foreign.id, new_id(ASSISTANT), "asst_nonsense", ""):
            with pytest.raises(AssistantNotFound):
                await store.load_assistant(tenant.id, assistant_id)
            with pytest.raises(AssistantNotFound):
                await store.revise_assistant(tenant.id, assistant_id, definition())
        with pytest.raises(AssistantNotFound):
            await store.load_assistant(other_tenant.id, foreign.id, 2)

    async def test_the_list_shows_the_newest_version_of_each_newest_first(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        await create_assistant(store, other_tenant.id)
        made = [await create_assistant(store, tenant.id, name=str(n)) for n in range(5)]
        revised = await store.revise_assistant(tenant.id, made[2].id, definition(name="revised"))
        first = await store.list_assistants(tenant.id, limit=3)
        assert [item.definition.name for item in first.items] == ["4", "3", "revised"]
        assert first.items[2] == revised
        second = await store.list_assistants(tenant.id, cursor=first.next_cursor, limit=3)
        assert [item.definition.name for item in second.items] == ["1", "0"]
        assert second.next_cursor is None


class ConversationContract:
    async def test_a_new_conversation_is_empty_and_pins_the_newest_version(self, store: Store, tenant: Tenant) -> None:
        assistant = await create_assistant(store, tenant.id)
        await store.revise_assistant(tenant.id, assistant.id, definition(name="second"))
        conversation = await store.create_conversation(tenant.id, ConversationDraft(assistant_id=assistant.id))
        assert conversation.assistant_version == 2
        assert (conversation.revision, conversation.next_seq, conversation.epoch) == (0, 1, 0)
        assert conversation.state is ConversationState.IDLE
        assert conversation.pending_call_ids == ()
        assert await store.load_conversation(tenant.id, conversation.id) == conversation

    async def test_a_conversation_comes_back_as_it_was_made(self, store: Store, tenant: Tenant) -> None:
        assistant = await create_assistant(store, tenant.id)
        draft = ConversationDraft(
            assistant_id=assistant.id,
            assistant_version=1,
            identifier=NASTY,
            source=NASTY,
            direction="inbound",
            mode="voice",
            args={"name": NASTY, "b": 1, "a": 2},
            context={"todos": [NASTY], "artifacts": []},
            metadata={"client.language": "nb", "nasty": NASTY},
        )
        made = await store.create_conversation(tenant.id, draft)
        loaded = await store.load_conversation(tenant.id, made.id)
        for name in ("identifier", "source", "direction", "mode", "args", "context", "metadata"):
            assert getattr(loaded, name) == getattr(draft, name), name
        assert list(loaded.args) == ["name", "b", "a"]

    async def test_an_unknown_assistant_or_version_makes_no_conversation(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        foreign = await create_assistant(store, other_tenant.id)
        own = await create_assistant(store, tenant.id)
        for draft in (
            ConversationDraft(assistant_id=foreign.id),
            ConversationDraft(assistant_id=new_id(ASSISTANT)),
            ConversationDraft(assistant_id=own.id, assistant_version=2),
        ):
            with pytest.raises(AssistantNotFound):
                await store.create_conversation(tenant.id, draft)
        assert (await store.list_conversations(tenant.id)).items == []

    async def test_the_list_is_filtered_and_paged(self, store: Store, tenant: Tenant, other_tenant: Tenant) -> None:
        await create_conversation(store, other_tenant.id, identifier="x")
        first = await create_assistant(store, tenant.id)
        second = await create_assistant(store, tenant.id)
        made = [
            await store.create_conversation(
                tenant.id,
                ConversationDraft(assistant_id=assistant.id, identifier="x" if number % 2 else None),
            )
            for number in range(6)
            for assistant in (first, second)
        ]
        newest_first = [conversation.id for conversation in reversed(made)]

        async def ids(filters: ConversationFilter) -> list[str]:
            found, cursor = [], None
            while True:
                page = await store.list_conversations(tenant.id, filters=filters, cursor=cursor, limit=4)
                found += [conversation.id for conversation in page.items]
                cursor = page.next_cursor
                if cursor is None:
                    return found

        assert await ids(ConversationFilter()) == newest_first
        by_assistant = [conversation.id for conversation in reversed(made) if conversation.assistant_id == first.id]
        assert await ids(ConversationFilter(assistant_id=first.id)) == by_assistant
        by_name = [conversation.id for conversation in reversed(made) if conversation.identifier == "x"]
        assert await ids(ConversationFilter(identifier="x")) == by_name
        both = [conversation_id for conversation_id in by_name if conversation_id in by_assistant]
        assert await ids(ConversationFilter(identifier="x", assistant_id=first.id)) == both
        assert await ids(ConversationFilter(identifier="y")) == []

    async def test_a_cursor_that_is_not_ours_is_refused(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for cursor in ("", "x", "!!!", "bm9uc2Vuc2U", "MTIz", "ImFzc3RfMSI", "W10", "bnVsbA", "\udc00", "AAAA" * 9000):
            with pytest.raises(CursorInvalid):
                await store.list_conversations(tenant.id, cursor=cursor)
        for cursor in ("x", "ImFzc3RfMSI", "dHJ1ZQ"):
            with pytest.raises(CursorInvalid):
                await store.list_turns(tenant.id, conversation.id, cursor=cursor)

    async def test_a_change_counts_as_a_revision_and_keeps_the_rest(self, store: Store, tenant: Tenant) -> None:
        before = await create_conversation(store, tenant.id, args={"a": 1}, metadata={"m": 1})
        changed = await store.change_conversation(
            tenant.id, before.id, ConversationChange(context={"todos": [NASTY]}), expected_revision=0
        )
        assert changed == replace(before, revision=1, context={"todos": [NASTY]}, updated_at=changed.updated_at)
        with pytest.raises(RevisionMismatch) as caught:
            await store.change_conversation(tenant.id, before.id, ConversationChange(args={}), expected_revision=0)
        assert caught.value.details == {"expected_revision": 0, "revision": 1}
        assert await store.load_conversation(tenant.id, before.id) == changed

    async def test_a_conversation_moves_to_a_version_that_exists_only(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        with pytest.raises(AssistantNotFound):
            await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
        await store.revise_assistant(tenant.id, conversation.assistant_id, definition())
        moved = await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
        assert moved.assistant_version == 2

    async def test_another_tenants_conversation_is_not_found_by_any_method(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        theirs = await create_conversation(store, other_tenant.id)
        await take_exchange(store, other_tenant.id, theirs.id)
        for conversation_id in (theirs.id, new_id(CONVERSATION), "conv_x", ""):
            for attempt in (
                store.load_conversation(tenant.id, conversation_id),
                store.change_conversation(tenant.id, conversation_id, ConversationChange(args={})),
                store.accept_turn(tenant.id, user_input(conversation_id)),
                store.load_payload_source(tenant.id, conversation_id),
                store.begin_epoch(tenant.id, conversation_id, epoch()),
                store.load_turn(tenant.id, conversation_id, 1),
                store.load_native(tenant.id, conversation_id, 1),
                store.list_turns(tenant.id, conversation_id),
                store.list_calls(tenant.id, conversation_id, 2),
                store.list_chunks(tenant.id, conversation_id, 2, attempt=1),
                store.erase_conversation(tenant.id, conversation_id),
                store.erase_conversation(tenant.id, conversation_id, dry_run=True),
            ):
                with pytest.raises(ConversationNotFound):
                    await attempt
        assert (await store.list_turns(other_tenant.id, theirs.id)).next_cursor is None
        assert (await store.load_conversation(other_tenant.id, theirs.id)).revision == 2


class AcceptContract:
    async def test_an_accepted_turn_is_durable_and_holds_the_conversation(self, store: Store, tenant: Tenant) -> None:
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

    async def test_tool_results_and_unknown_blocks_come_back_as_they_were(self, store: Store, tenant: Tenant) -> None:
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

    async def test_a_lease_whose_time_is_over_is_not_taken_by_accepting(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id, lease_seconds=-1))
        with pytest.raises(ConversationBusy):
            await store.accept_turn(tenant.id, user_input(conversation.id))

    async def test_sending_the_same_acceptance_again_changes_nothing(self, store: Store, tenant: Tenant) -> None:
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
        # A duplicate is seen before anything else is held against the request.
        late = replace(again, expected_revision=77)
        assert await store.accept_turn(tenant.id, late) == Duplicate(seq=1, answer_seq=2, running=False)
        assert (await store.load_conversation(tenant.id, conversation.id)).next_seq == 9

    async def test_the_same_key_with_another_body_is_refused(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id, "One", idempotency_key="k"))
        with pytest.raises(IdempotencyKeyReused):
            await store.accept_turn(tenant.id, user_input(conversation.id, "Two", idempotency_key="k"))

    async def test_a_key_belongs_to_its_conversation(self, store: Store, tenant: Tenant) -> None:
        for _ in range(2):
            conversation = await create_conversation(store, tenant.id)
            assert (await accept(store, tenant.id, user_input(conversation.id, idempotency_key="k"))).seq == 1

    async def test_a_retry_that_announces_itself_is_recognised_by_its_body(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, "Hello")
        retry = user_input(conversation.id, "Hello", announces_retry=True)
        assert await store.accept_turn(tenant.id, retry) == Duplicate(seq=1, answer_seq=2, running=False)
        other = user_input(conversation.id, "Something else", announces_retry=True)
        accepted = await accept(store, tenant.id, other)
        await store.finish_turn(accepted.lease, answer())
        # Saying the same thing twice is nobody's retry.
        assert (await accept(store, tenant.id, user_input(conversation.id, "Something else"))).seq == 5

    async def test_a_stale_revision_is_refused_and_nothing_is_written(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id)
        with pytest.raises(RevisionMismatch) as caught:
            await store.accept_turn(tenant.id, user_input(conversation.id, expected_revision=1))
        assert caught.value.details == {"expected_revision": 1, "revision": 2}
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 2
        assert (await accept(store, tenant.id, user_input(conversation.id, expected_revision=2))).revision == 3

    async def test_tool_results_are_taken_in_any_order_when_all_are_there(self, store: Store, tenant: Tenant) -> None:
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
    async def test_results_that_do_not_fit_are_refused_with_the_ids(
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

    async def test_a_user_task_waits_for_results_unless_it_gives_the_calls_up(
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


class PayloadContract:
    async def test_a_first_turn_has_no_epoch_and_itself_as_buffer(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id, context={"todos": []})
        await accept(store, tenant.id, user_input(conversation.id, "Hello", language="nb", args={"x": 1}))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert source.conversation == await store.load_conversation(tenant.id, conversation.id)
        assert source.assistant == await store.load_assistant(tenant.id, conversation.assistant_id)
        assert (source.epoch, source.static_text) == (None, None)
        [turn] = source.buffered
        assert (turn.seq, turn.kind, turn.state) == (1, TurnKind.USER_TASK, TurnState.COMPLETE)
        assert decode_blocks(turn.native.data) == (TextBlock(text="Hello"),)
        assert (turn.language, turn.args, turn.dynamic, turn.provider) == ("nb", {"x": 1}, None, None)

    async def test_the_buffer_has_the_native_bytes_and_who_answered(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        native = Native(dialect="gemini", data=bytes(range(256)))
        await take_exchange(store, tenant.id, conversation.id, native=native)
        await accept(store, tenant.id, user_input(conversation.id, "And now?"))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert [turn.seq for turn in source.buffered] == [1, 2, 3]
        reply = source.buffered[1]
        assert (reply.kind, reply.native) == (TurnKind.MODEL_RESPONSE, native)
        assert (reply.provider, reply.model, reply.account) == ("gemini", "gemini-3.1-pro-preview", "acct-1")
        assert reply.dynamic == b'{"todos":[]}'

    async def test_the_static_text_is_left_out_when_it_is_held(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        begun = epoch(text=f"You help. {NASTY}")
        await store.begin_epoch(tenant.id, conversation.id, begun)
        source = await store.load_payload_source(tenant.id, conversation.id, held_static_hashes=[b"other"])
        assert (source.epoch, source.static_text) == (begun, begun.base_text)
        held = await store.load_payload_source(
            tenant.id, conversation.id, held_static_hashes=[b"other", begun.static_hash]
        )
        assert (held.epoch, held.static_text) == (replace(begun, base_text=""), None)

    async def test_an_epoch_with_segments_moves_the_buffer(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for number in range(3):
            await take_exchange(store, tenant.id, conversation.id, f"Question {number}")
        await store.begin_epoch(tenant.id, conversation.id, epoch(1))
        for position in range(2):
            segment = Segment(
                generation=0,
                position=position,
                first_seq=2 * position + 1,
                last_seq=2 * position + 2,
                text=f"<segment {position}{NASTY}>",
                token_count=5,
            )
            next_epoch = epoch(
                position + 2,
                reason=EpochReason.COMPACTED,
                segment_count=position + 1,
                buffer_start_seq=2 * position + 3,
                static_hash=str(position).encode(),
            )
            await store.begin_epoch(tenant.id, conversation.id, next_epoch, segment=segment)
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert source.static_text == f"You help.<segment 0{NASTY}><segment 1{NASTY}>"
        assert [turn.seq for turn in source.buffered] == [5, 6]
        assert (source.conversation.epoch, source.conversation.buffer_start_seq) == (3, 5)
        # The compacted turns are still there to be read.
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 6

    async def test_an_epoch_begins_once(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await store.begin_epoch(tenant.id, conversation.id, epoch(1))
        await store.begin_epoch(tenant.id, conversation.id, epoch(1))
        for stale in (epoch(1, "Another text"), epoch(3), epoch(0)):
            with pytest.raises(EpochMoved):
                await store.begin_epoch(tenant.id, conversation.id, stale)
        assert (await store.load_conversation(tenant.id, conversation.id)).epoch == 1

    async def test_of_concurrent_epochs_one_begins(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        outcomes = await asyncio.gather(
            *(store.begin_epoch(tenant.id, conversation.id, epoch(1, f"Text {n}")) for n in range(8)),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes].count(EpochMoved) == 7
        assert outcomes.count(None) == 1


class RunningTurnContract:
    async def test_what_finish_committed_is_what_load_returns(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        given = answer(calls=["a"])
        assert await store.finish_turn(accepted.lease, given) == 2
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert stored == ModelResponseTurn(
            seq=2,
            created_at=stored.created_at,
            blocks=given.blocks,
            state=TurnState.COMPLETE,
            stop_reason=StopReason.TOOL_USE,
            error_code=None,
            provider="gemini",
            model="gemini-3.1-pro-preview",
            usage=given.usage,
            cost_usd=given.cost_usd,
            attempt=1,
        )
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert (call.turn_seq, call.start, call.end) == (2, given.start, given.end)
        after = await store.load_conversation(tenant.id, conversation.id)
        assert (after.state, after.revision, after.pending_call_ids) == (ConversationState.AWAITING_TOOLS, 2, ("a",))

    async def test_a_turn_that_failed_keeps_what_arrived(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        given = answer(
            blocks=(TextBlock(text="It ra"),),
            state=TurnState.FAILED,
            stop_reason=None,
            error_code="provider_cut",
            cost_usd=None,
            end=call_end(status=None, headers={}, raw_response=b"\x00\xff", cost_usd=None, usage_reported=None),
        )
        await store.finish_turn(accepted.lease, given)
        stored = await store.load_turn(tenant.id, conversation.id, 2)
        assert isinstance(stored, ModelResponseTurn)
        assert (stored.state, stored.stop_reason, stored.error_code) == (TurnState.FAILED, None, "provider_cut")
        assert (stored.blocks, stored.cost_usd) == ((TextBlock(text="It ra"),), None)
        [call] = await store.list_calls(tenant.id, conversation.id, 2)
        assert call.end == given.end
        assert (await store.load_conversation(tenant.id, conversation.id)).state is ConversationState.IDLE

    async def test_finishing_again_with_the_same_lease_changes_nothing(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        assert await store.finish_turn(accepted.lease, answer("First")) == 2
        assert await store.finish_turn(accepted.lease, answer("Second")) == 2
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

    async def test_a_call_is_there_from_its_start(self, store: Store, tenant: Tenant) -> None:
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

    async def test_each_attempt_is_a_call_and_the_answer_names_its_own(self, store: Store, tenant: Tenant) -> None:
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

    async def test_chunks_are_read_in_order_once_each_and_go_with_the_turn(self, store: Store, tenant: Tenant) -> None:
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

    async def test_a_turn_that_is_not_there_is_not_found(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id))
        for seq in (0, 2, -1, 2**63, 2**80):
            with pytest.raises(TurnNotFound):
                await store.load_turn(tenant.id, conversation.id, seq)
            with pytest.raises(TurnNotFound):
                await store.load_native(tenant.id, conversation.id, seq)


class LeaseContract:
    async def test_an_expired_lease_is_taken_over_by_one(self, store: Store, tenant: Tenant) -> None:
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

    async def test_a_process_that_stops_hands_back_its_own_leases_only(self, store: Store, tenant: Tenant) -> None:
        leases = []
        for owner in ("stopping", "stopping", "staying"):
            conversation = await create_conversation(store, tenant.id)
            leases.append((await accept(store, tenant.id, user_input(conversation.id, lease_owner=owner))).lease)
        assert await store.surrender_leases("stopping") == 2
        expired = [lease for _, lease in await store.list_expired_leases()]
        assert sorted(expired, key=lambda lease: lease.conversation_id) == sorted(
            leases[:2], key=lambda lease: lease.conversation_id
        )


class EraseContract:
    async def test_a_dry_run_says_what_would_go_and_changes_nothing(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await store.begin_epoch(tenant.id, conversation.id, epoch())
        await take_exchange(store, tenant.id, conversation.id)
        report = await store.erase_conversation(tenant.id, conversation.id, dry_run=True)
        assert report.rows == {"conversations": 1, "turns": 2, "calls": 1, "epochs": 1}
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 2
        assert await store.erase_conversation(tenant.id, conversation.id) == report
        with pytest.raises(ConversationNotFound):
            await store.load_conversation(tenant.id, conversation.id)

    async def test_a_running_conversation_is_not_erased(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        with pytest.raises(ConversationBusy):
            await store.erase_conversation(tenant.id, conversation.id)
        await store.finish_turn(accepted.lease, answer())
        assert (await store.erase_conversation(tenant.id, conversation.id)).rows["turns"] == 2

    async def test_a_shared_image_goes_with_its_last_conversation(self, store: Store, tenant: Tenant) -> None:
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

    async def test_an_image_that_is_being_used_anew_survives_the_erasure(self, store: Store, tenant: Tenant) -> None:
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


class StoreContract(
    AssistantContract,
    ConversationContract,
    AcceptContract,
    PayloadContract,
    RunningTurnContract,
    LeaseContract,
    EraseContract,
):
    """All of it."""
