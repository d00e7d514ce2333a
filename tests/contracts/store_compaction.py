"""The contract of the store for history: epochs with segments, the input of a compaction, and background calls."""

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import pytest

from server.conversation.api_key import Tenant
from server.conversation.call import Call
from server.conversation.epoch import Epoch, EpochReason, Segment, SignedSummary
from server.conversation.errors import CallNotFound, ConversationNotFound, CursorInvalid, EpochMoved
from server.conversation.store import ConversationChange, CopiedSegments, Store
from server.conversation.turn import TurnKind
from tests.support.builders import (
    NASTY,
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    definition,
    epoch,
    picture,
    take_exchange,
    user_input,
)


def piece(position: int, *, generation: int = 0, **changes: Any) -> Segment:
    values: dict[str, Any] = {
        "generation": generation,
        "position": position,
        "first_seq": 2 * position + 1,
        "last_seq": 2 * position + 2,
        "text": f"[{position}] {NASTY}\n",
        "token_count": 5 + position,
    }
    return Segment(**values | changes)


def opened(number: int, data: bytes, *, start_seq: int = 1, buffer_start_seq: int = 5) -> Epoch:
    """An epoch that begins with a signed summary."""
    signed_summary = SignedSummary(
        data=data,
        start_seq=start_seq,
        text=f"[{start_seq}] {NASTY}\n",
        token_count=7,
        kept_prefix_hashes=(b"k" * 32, b"e" * 32),
    )
    return epoch(
        number,
        reason=EpochReason.SIGNED,
        signed_summary=signed_summary,
        buffer_start_seq=buffer_start_seq,
        segment_count=1 if start_seq > 1 else 0,
    )


async def compacted(store: Store, tenant: Tenant, pieces: int, exchanges: int = 5) -> str:
    """A conversation whose history has a number of segments, an exchange each."""
    conversation = await create_conversation(store, tenant.id)
    await store.begin_epoch(tenant.id, conversation.id, epoch(1))
    for number in range(exchanges):
        await take_exchange(store, tenant.id, conversation.id, f"Question {number}", f"Reply {number}")
    for position in range(pieces):
        begun = epoch(
            position + 2,
            reason=EpochReason.COMPACTED,
            segment_count=position + 1,
            buffer_start_seq=2 * position + 3,
            static_hash=f"static {position}".encode(),
        )
        await store.begin_epoch(tenant.id, conversation.id, begun, segment=piece(position))
    return conversation.id


class CompactionContract:
    async def test_history_is_the_epoch_its_segments_and_the_buffer(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 2)
        history = await store.load_history(tenant.id, conversation_id)
        assert history.segments == (piece(0), piece(1))
        assert (history.newest_generation, history.can_append_segment) == (0, True)
        assert history.source.epoch is not None
        assert (history.source.epoch.number, history.source.epoch.base_text) == (3, "You help.")
        assert history.source.static_text == f"You help.{piece(0).text}{piece(1).text}"
        assert [turn.seq for turn in history.source.buffered] == [5, 6, 7, 8, 9, 10]
        reply = history.source.buffered[1]
        assert (reply.kind, reply.output_tokens) == (TurnKind.MODEL_RESPONSE, 2)
        assert all(turn.created_at is not None for turn in history.source.buffered)

    async def test_history_is_loaded_without_texts_that_are_cached(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 2)
        history = await store.load_history(tenant.id, conversation_id, cached_static_hashes=[b"static 1"])
        assert history.source.static_text is None
        assert history.segments == (replace(piece(0), text=""), replace(piece(1), text=""))

    async def test_a_conversation_without_an_epoch_has_no_history(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept(store, tenant.id, user_input(conversation.id, blobs=(picture(b"image"),)))
        history = await store.load_history(tenant.id, conversation.id)
        assert (history.source.epoch, history.segments) == (None, ())
        # Images are not loaded here.
        assert history.source.blobs == {}
        assert [turn.seq for turn in history.source.buffered] == [1]

    async def test_history_has_the_tools_of_its_epoch(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await store.begin_epoch(tenant.id, conversation.id, epoch(1))
        await store.revise_assistant(tenant.id, conversation.assistant_id, definition(tools=()))
        await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
        history = await store.load_history(tenant.id, conversation.id)
        assert history.source.assistant.version == 1
        assert history.source.assistant.definition.tools != ()

    async def test_an_undone_segment_closes_its_generation(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 2)
        undone = epoch(4, reason=EpochReason.COMPACTION_UNDONE, segment_count=1, buffer_start_seq=3)
        await store.begin_epoch(tenant.id, conversation_id, undone)
        history = await store.load_history(tenant.id, conversation_id)
        assert (history.segments, history.can_append_segment) == ((piece(0),), False)
        copies = CopiedSegments(generation=0, from_position=0, count=1, to_position=0)
        other = piece(1, generation=1, text="Otherwise.\n")
        begun = epoch(
            5,
            reason=EpochReason.COMPACTED,
            generation=1,
            segment_count=2,
            buffer_start_seq=5,
            static_hash=b"other",
        )
        await store.begin_epoch(tenant.id, conversation_id, begun, segment=other, copies=copies)
        history = await store.load_history(tenant.id, conversation_id)
        assert history.segments == (piece(0, generation=1), other)
        assert (history.newest_generation, history.can_append_segment) == (1, True)
        assert history.source.static_text == f"You help.{piece(0).text}Otherwise.\n"
        # The old generation is unchanged.
        assert await store.load_segments(tenant.id, conversation_id, 0, 5) == [piece(0), piece(1)]

    async def test_a_summary_replaces_the_oldest_segments(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 4)
        summary = piece(0, generation=1, last_seq=6, summarises=(0, 3), text="In short.\n")
        copies = CopiedSegments(generation=0, from_position=3, count=1, to_position=1)
        begun = epoch(
            6, reason=EpochReason.SUMMARISED, generation=1, segment_count=2, buffer_start_seq=9, static_hash=b"short"
        )
        await store.begin_epoch(tenant.id, conversation_id, begun, segment=summary, copies=copies)
        history = await store.load_history(tenant.id, conversation_id)
        moved = replace(piece(3), generation=1, position=1)
        assert history.segments == (summary, moved)
        source = await store.load_payload_source(tenant.id, conversation_id)
        assert source.static_text == f"You help.In short.\n{piece(3).text}"

    async def test_a_late_epoch_writes_and_copies_nothing(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 2)
        late = epoch(3, generation=1, segment_count=2, static_hash=b"late", buffer_start_seq=5)
        copies = CopiedSegments(generation=0, from_position=0, count=1, to_position=0)
        with pytest.raises(EpochMoved):
            await store.begin_epoch(tenant.id, conversation_id, late, segment=piece(1, generation=1), copies=copies)
        assert await store.load_segments(tenant.id, conversation_id, 1, 5) == []

    async def test_only_one_of_concurrent_compactions_takes_effect(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 1)

        async def compact(number: int) -> None:
            begun = epoch(
                3,
                reason=EpochReason.COMPACTED,
                segment_count=2,
                buffer_start_seq=5,
                static_hash=f"static of {number}".encode(),
            )
            await store.begin_epoch(tenant.id, conversation_id, begun, segment=piece(1, text=f"{number}\n"))

        outcomes = await asyncio.gather(*(compact(number) for number in range(6)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [EpochMoved] * 5
        history = await store.load_history(tenant.id, conversation_id)
        assert [segment.text for segment in history.segments[1:]] == [f"{outcomes.index(None)}\n"]

    async def test_a_signed_summary_comes_back_unchanged(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 1)
        signed = opened(3, b'{"n":1.0}\x00\xff', start_seq=3, buffer_start_seq=5)
        await store.begin_epoch(tenant.id, conversation_id, signed)
        history = await store.load_history(tenant.id, conversation_id)
        source = await store.load_payload_source(tenant.id, conversation_id)
        for found in (history.source, source):
            assert found.epoch is not None
            assert found.epoch.signed_summary == signed.signed_summary
            assert [turn.seq for turn in found.buffered] == [5, 6, 7, 8, 9, 10]
        assert history.can_append_segment
        page = await store.list_epochs(tenant.id, conversation_id)
        assert [(item.number, item.reason) for item in page.items] == [
            (3, EpochReason.SIGNED),
            (2, EpochReason.COMPACTED),
        ]
        assert page.items[0].last_segment == piece(1, text="", token_count=7)

    async def test_another_signed_summary_is_another_epoch(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 0)
        await store.begin_epoch(tenant.id, conversation_id, opened(2, b"one"))
        await store.begin_epoch(tenant.id, conversation_id, opened(2, b"one"))
        with pytest.raises(EpochMoved):
            await store.begin_epoch(tenant.id, conversation_id, opened(2, b"two"))

    async def test_the_epoch_before_a_signed_summary_is_found(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 0)
        undone = epoch(4, reason=EpochReason.COMPACTION_UNDONE)
        again = opened(5, b"one", buffer_start_seq=7)
        for begun in (opened(2, b"one"), opened(3, b"two"), undone, again):
            await store.begin_epoch(tenant.id, conversation_id, begun)
        assert await store.find_epoch_before(tenant.id, conversation_id, b"two") == opened(2, b"one")
        assert await store.find_epoch_before(tenant.id, conversation_id, b"one") == undone
        assert await store.find_epoch_before(tenant.id, conversation_id, b"three") is None
        with pytest.raises(ConversationNotFound):
            await store.find_epoch_before(tenant.id, "conv_00000000000000000000000000", b"one")

    async def test_turns_are_loaded_by_range(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 0, exchanges=3)
        turns = await store.load_turns(tenant.id, conversation_id, 2, 5)
        assert [turn.seq for turn in turns] == [2, 3, 4, 5]
        assert turns[0].blocks == answer("Reply 0").blocks
        for first, last in ((5, 2), (7, 9), (-5, 0), (2**70, 2**71)):
            assert await store.load_turns(tenant.id, conversation_id, first, last) == []
        assert len(await store.load_turns(tenant.id, conversation_id, -1, 2**80)) == 6

    async def test_epochs_of_the_history_are_listed_newest_first(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 3)
        page = await store.list_epochs(tenant.id, conversation_id, limit=2)
        assert [(item.number, item.segment_count) for item in page.items] == [(4, 3), (3, 2)]
        assert page.items[0].last_segment == replace(piece(2), text="")
        rest = await store.list_epochs(tenant.id, conversation_id, cursor=page.next_cursor, limit=2)
        # The first epoch is no compaction.
        assert ([item.number for item in rest.items], rest.next_cursor) == ([2], None)
        with pytest.raises(CursorInvalid):
            await store.list_epochs(tenant.id, conversation_id, cursor="rubbish")

    async def test_a_background_call_is_stored_and_completed(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 1)
        begun = Call(turn_seq=-2, start=call_start(epoch=2), end=None)
        assert await store.record_call(tenant.id, conversation_id, begun)
        assert await store.record_call(tenant.id, conversation_id, begun)
        assert await store.list_calls(tenant.id, conversation_id, -2) == [begun]
        ended = replace(begun, end=call_end())
        assert await store.record_call(tenant.id, conversation_id, ended)
        second = replace(ended, start=call_start(epoch=2, attempt=2))
        assert await store.record_call(tenant.id, conversation_id, second)
        assert await store.list_calls(tenant.id, conversation_id, -2) == [ended, second]
        # It does not interfere: the next payload refers to the newest call of a turn.
        source = await store.load_payload_source(tenant.id, conversation_id)
        assert source.previous_key == (8, 1)
        report = await store.erase_conversation(tenant.id, conversation_id)
        assert report.rows["calls"] == 7

    async def test_a_background_call_has_a_unique_number(self, store: Store, tenant: Tenant) -> None:
        """Two processes that call at the same time are both billed, and neither call may hide the other."""
        conversation_id = await compacted(store, tenant, 1)
        starts = [call_start(epoch=2, request_hash=bytes([number]) * 32) for number in range(4)]
        calls = [Call(turn_seq=-2, start=start, end=None) for start in starts]
        taken = await asyncio.gather(*(store.record_call(tenant.id, conversation_id, call) for call in calls))
        assert sorted(taken) == [False, False, False, True]
        winner, end = calls[taken.index(True)], call_end()
        for call in calls:
            ended = replace(call, end=end)
            assert await store.record_call(tenant.id, conversation_id, ended) == (call is winner)
        assert await store.list_calls(tenant.id, conversation_id, -2) == [replace(winner, end=end)]

    async def test_a_background_call_is_loaded_with_its_sources(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 2)
        notes = {1: {"kind": "summary"}, 2: {"kind": "signed_compaction", "last_seq": 6}}
        for attempt, note in notes.items():
            start = call_start(epoch=2, attempt=attempt, warnings=(note,))
            await store.record_call(tenant.id, conversation_id, Call(turn_seq=-2, start=start, end=None))
        found = [await store.load_rebuild_source(tenant.id, conversation_id, -2, attempt) for attempt in notes]
        assert [tuple(rebuilt.call.start.warnings) for rebuilt in found] == [(note,) for note in notes.values()]
        # The epoch of the call, although another one has begun since.
        assert {rebuilt.source.epoch.number for rebuilt in found if rebuilt.source.epoch is not None} == {2}
        assert found[0].source.static_text == "You help." + piece(0).text
        assert [turn.seq for turn in found[0].source.buffered] == []
        assert [turn.seq for turn in found[1].source.buffered] == [3, 4, 5, 6]
        with pytest.raises(CallNotFound):
            await store.load_rebuild_source(tenant.id, conversation_id, -3, 1)

    async def test_the_template_of_a_background_call_is_archived(self, store: Store, tenant: Tenant) -> None:
        conversation_id = await compacted(store, tenant, 1)
        source = "Sum it up, né?"
        call = Call(turn_seq=-2, start=call_start(epoch=2), end=None)
        for _ in range(2):
            assert await store.record_call(tenant.id, conversation_id, call, template_source=source)
        assert await store.load_template(hashlib.sha256(source.encode()).digest()) == source

    async def test_history_is_visible_to_its_tenant_only(
        self, store: Store, tenant: Tenant, other_tenant: Tenant
    ) -> None:
        conversation_id = await compacted(store, tenant, 1)
        for asked in (
            store.load_history(other_tenant.id, conversation_id),
            store.load_segments(other_tenant.id, conversation_id, 0, 1),
            store.load_turns(other_tenant.id, conversation_id, 1, 2),
            store.list_epochs(other_tenant.id, conversation_id),
            store.record_call(other_tenant.id, conversation_id, Call(turn_seq=-1, start=call_start(), end=call_end())),
        ):
            with pytest.raises(ConversationNotFound):
                await asked
        assert await store.list_calls(tenant.id, conversation_id, -1) == []
