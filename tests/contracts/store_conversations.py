"""The contract of the store for assistants and conversations; see `store_contract`."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from server.conversation.api_key import Tenant
from server.conversation.assistant import Instructions
from server.conversation.conversation import ConversationDraft, ConversationState
from server.conversation.errors import (
    AssistantNotFound,
    AssistantRevised,
    ConversationNotFound,
    CursorInvalid,
    RevisionMismatch,
)
from server.conversation.identifiers import ASSISTANT, CONVERSATION, new_id
from server.conversation.store import (
    ConversationChange,
    ConversationFilter,
    Store,
)
from server.conversation.turn import (
    TurnState,
)
from tests.support.builders import (
    LEASE_SECONDS,
    NASTY,
    accept,
    answer,
    create_assistant,
    create_conversation,
    definition,
    epoch,
    take_exchange,
    tool_call,
    tool_response,
    user_input,
)


class AssistantContract:
    async def test_an_assistant_comes_back_as_created(self, store: Store, tenant: Tenant) -> None:
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

    async def test_one_of_several_changes_that_expect_the_same_version_succeeds(
        self, store: Store, tenant: Tenant
    ) -> None:
        first = await create_assistant(store, tenant.id)
        tried = await asyncio.gather(
            *(
                store.revise_assistant(tenant.id, first.id, definition(name=str(n)), expected_version=1)
                for n in range(8)
            ),
            return_exceptions=True,
        )
        refused = [error for error in tried if isinstance(error, AssistantRevised)]
        assert len(refused) == 7
        assert refused[0].details == {"expected_version": 1, "version": 2}
        newest = await store.load_assistant(tenant.id, first.id)
        assert newest in tried
        saved = await store.revise_assistant(tenant.id, first.id, definition(name="third"), expected_version=2)
        assert saved.version == 3
        with pytest.raises(AssistantNotFound):
            await store.revise_assistant(tenant.id, new_id(ASSISTANT), definition(), expected_version=1)

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

    async def test_a_conversation_comes_back_as_created(self, store: Store, tenant: Tenant) -> None:
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

    async def test_an_unknown_assistant_or_version_creates_no_conversation(
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

    async def test_the_list_is_bounded_by_times_to_the_millisecond(self, store: Store, tenant: Tenant) -> None:
        before = datetime.now(UTC)
        made = await create_conversation(store, tenant.id, identifier="x")
        after = datetime.now(UTC) + timedelta(milliseconds=1)
        long_ago = datetime(1969, 7, 20, tzinfo=UTC)

        async def found(**filters: object) -> bool:
            page = await store.list_conversations(tenant.id, filters=ConversationFilter(**filters))  # type: ignore[arg-type]
            return [conversation.id for conversation in page.items] == [made.id]

        assert await found(created_after=before)
        assert await found(created_before=after)
        assert await found(created_after=long_ago, created_before=after, identifier="x")
        assert await found(created_after=before, created_before=after, assistant_id=made.assistant_id)
        assert not await found(created_after=after)
        assert not await found(created_before=before - timedelta(milliseconds=1))
        assert not await found(created_before=long_ago)
        assert not await found(created_after=after, created_before=before, identifier="x")

    async def test_a_time_divides_the_list_into_two(self, store: Store, tenant: Tenant) -> None:
        made = [(await create_conversation(store, tenant.id)).id for _ in range(6)]
        middle = (await store.load_conversation(tenant.id, made[3])).created_at
        parts = []
        for filters in (ConversationFilter(created_after=middle), ConversationFilter(created_before=middle)):
            page = await store.list_conversations(tenant.id, filters=filters)
            parts.append([conversation.id for conversation in page.items])
        later, earlier = parts
        assert later + earlier == made[::-1]

    async def test_times_and_cursors_can_be_combined(self, store: Store, tenant: Tenant) -> None:
        before = datetime.now(UTC)
        made = [(await create_conversation(store, tenant.id)).id for _ in range(5)]
        filters = ConversationFilter(created_after=before, created_before=before + timedelta(hours=1))
        first = await store.list_conversations(tenant.id, filters=filters, limit=3)
        rest = await store.list_conversations(tenant.id, filters=filters, cursor=first.next_cursor, limit=3)
        assert [conversation.id for conversation in (*first.items, *rest.items)] == made[::-1]
        assert rest.next_cursor is None

    async def test_pending_calls_are_shown_with_names_and_arguments(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        assert conversation.pending_calls == ()
        await take_exchange(store, tenant.id, conversation.id, calls=["b", NASTY])
        expected = (tool_call("b"), tool_call(NASTY))
        assert (await store.load_conversation(tenant.id, conversation.id)).pending_calls == expected
        [listed] = (await store.list_conversations(tenant.id)).items
        assert listed.pending_calls == expected
        changed = await store.change_conversation(tenant.id, conversation.id, ConversationChange(args={}))
        assert changed.pending_calls == expected
        accepted = await accept(store, tenant.id, tool_response(conversation.id, ["b", NASTY]))
        assert (await store.load_conversation(tenant.id, conversation.id)).pending_calls == ()
        await store.finish_turn(accepted.lease, answer())
        assert (await store.load_conversation(tenant.id, conversation.id)).pending_calls == ()

    async def test_calls_of_an_incomplete_turn_are_not_pending(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(
            store, tenant.id, conversation.id, calls=["a"], state=TurnState.CANCELLED, pending_call_ids=()
        )
        loaded = await store.load_conversation(tenant.id, conversation.id)
        assert (loaded.pending_call_ids, loaded.pending_calls, loaded.state) == ((), (), ConversationState.IDLE)

    async def test_a_forged_cursor_is_refused(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        for cursor in ("", "x", "!!!", "bm9uc2Vuc2U", "MTIz", "ImFzc3RfMSI", "W10", "bnVsbA", "\udc00", "AAAA" * 9000):
            with pytest.raises(CursorInvalid):
                await store.list_conversations(tenant.id, cursor=cursor)
        for cursor in ("x", "ImFzc3RfMSI", "dHJ1ZQ"):
            with pytest.raises(CursorInvalid):
                await store.list_turns(tenant.id, conversation.id, cursor=cursor)

    async def test_a_change_increments_the_revision_and_keeps_the_rest(self, store: Store, tenant: Tenant) -> None:
        before = await create_conversation(store, tenant.id, args={"a": 1}, metadata={"m": 1})
        changed = await store.change_conversation(
            tenant.id, before.id, ConversationChange(context={"todos": [NASTY]}), expected_revision=0
        )
        assert changed == replace(before, revision=1, context={"todos": [NASTY]}, updated_at=changed.updated_at)
        with pytest.raises(RevisionMismatch) as caught:
            await store.change_conversation(tenant.id, before.id, ConversationChange(args={}), expected_revision=0)
        assert caught.value.details == {"expected_revision": 0, "revision": 1}
        assert await store.load_conversation(tenant.id, before.id) == changed

    async def test_a_conversation_changes_only_to_an_existing_version(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        with pytest.raises(AssistantNotFound):
            await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
        await store.revise_assistant(tenant.id, conversation.assistant_id, definition())
        moved = await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
        assert moved.assistant_version == 2

    async def test_a_conversation_of_another_tenant_is_not_found_by_any_method(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        theirs = await create_conversation(store, other_tenant.id)
        await take_exchange(store, other_tenant.id, theirs.id)
        for conversation_id in (theirs.id, new_id(CONVERSATION), "conv_x", ""):
            for attempt in (
                store.load_conversation(tenant.id, conversation_id),
                store.change_conversation(tenant.id, conversation_id, ConversationChange(args={})),
                store.accept_turn(tenant.id, user_input(conversation_id)),
                store.find_duplicate(tenant.id, user_input(conversation_id)),
                store.enter_queue(tenant.id, conversation_id, limit=5, seconds=LEASE_SECONDS),
                store.enter_queue(tenant.id, conversation_id, limit=5, seconds=LEASE_SECONDS, first=True),
                store.request_cancel(tenant.id, conversation_id),
                store.fork_conversation(tenant.id, conversation_id, 2),
                store.load_rebuild_source(tenant.id, conversation_id, 2, 1),
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
