"""The contract of the store for the sources of payloads; see `store_contract`."""

import asyncio
import hashlib
from dataclasses import replace
from datetime import timedelta

import pytest

from server.conversation.api_key import Tenant
from server.conversation.block import TextBlock, ToolResultBlock, decode_blocks
from server.conversation.call import CallTrace
from server.conversation.conversation import Conversation
from server.conversation.epoch import EpochReason, Segment
from server.conversation.errors import (
    CallNotFound,
    EpochMoved,
)
from server.conversation.manifest import encode_manifest
from server.conversation.payload import LayerOrder
from server.conversation.store import (
    ConversationChange,
    PayloadSource,
    Store,
)
from server.conversation.turn import (
    Native,
    StopReason,
    TurnKind,
    TurnState,
)
from tests.support.builders import (
    A_TIME,
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
    tool_response,
    user_input,
)


async def accept_and_check_nothing_before(store: Store, tenant: Tenant, conversation: Conversation) -> None:
    """A first turn that ends without a call: nothing precedes it, and it adds nothing to the next."""
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    await store.begin_call(accepted.lease, call_start())
    source = await store.load_payload_source(tenant.id, conversation.id)
    assert (source.previous_manifest, source.previous_order, source.previous_prefix_hash) == ((), None, None)
    await store.finish_turn(accepted.lease, answer())


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

    async def test_the_buffer_has_the_native_bytes_and_their_provider(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        native = Native(dialect="gemini", data=bytes(range(256)))
        await take_exchange(store, tenant.id, conversation.id, native=native)
        await accept(store, tenant.id, user_input(conversation.id, "And now?"))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert [turn.seq for turn in source.buffered] == [1, 2, 3]
        reply = source.buffered[1]
        assert (reply.kind, reply.native) == (TurnKind.MODEL_RESPONSE, native)
        assert (reply.provider, reply.model, reply.account) == ("gemini", "gemini-3.1-pro-preview", "acct-1")

    async def test_input_has_its_blocks_as_sent(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, NASTY, calls=["a"])
        result = ToolResultBlock(tool_call_id="a", output={"z": 1, "a": [NASTY, 1e300]})
        await accept(store, tenant.id, tool_response(conversation.id, ["a"], blocks=(result,)))
        asked, _, responded = (await store.load_payload_source(tenant.id, conversation.id)).buffered
        assert (asked.blocks, responded.blocks) == ((TextBlock(text=NASTY),), (result,))
        assert responded.blocks is not None
        assert list(responded.blocks[0].output) == ["z", "a"]  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("changes", "read"),
        [
            ({}, False),
            ({"calls": ["a"]}, True),
            ({"state": TurnState.INTERRUPTED, "stop_reason": None}, True),
            ({"state": TurnState.FAILED, "stop_reason": StopReason.ERROR}, True),
            ({"provider": "anthropic"}, True),
            ({"model": "another of the same"}, False),
        ],
        ids=["complete", "calls", "interrupted", "failed", "another provider", "another model"],
    )
    async def test_the_blocks_of_an_answer_are_loaded_if_its_native_bytes_are_not_enough(
        self, store: Store, tenant: Tenant, changes: dict[str, object], *, read: bool
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        given = answer(NASTY, **changes)  # type: ignore[arg-type]
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        await store.finish_turn(accepted.lease, given)
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert source.buffered[1].blocks == (given.blocks if read else None)

    async def test_the_dynamic_block_is_loaded_if_it_was_part_of_the_input(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        kept = call_start(layer_order=LayerOrder.APPEND_ONLY, dynamic=b'{"now":1}')
        for start in (kept, replace(kept, layer_order=LayerOrder.LAYERED), replace(kept, dynamic=b"")):
            await take_exchange(store, tenant.id, conversation.id, start=start)
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert [turn.dynamic for turn in source.buffered] == [None, b'{"now":1}', None, None, None, None]

    async def test_a_turn_of_several_attempts_has_what_the_last_one_sent(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        first = call_start(layer_order=LayerOrder.APPEND_ONLY, dynamic=b"1")
        await store.end_call(accepted.lease, first, call_end(status=503))
        await store.finish_turn(accepted.lease, answer(start=replace(first, attempt=2, dynamic=b"2")))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert source.buffered[1].dynamic == b"2"

    async def test_each_answer_has_the_hash_of_its_prefix(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        epochs = [epoch(1), epoch(2, "You help more.", reason=EpochReason.ASSISTANT_CHANGED)]
        for begun in epochs:
            await store.begin_epoch(tenant.id, conversation.id, begun)
            await take_exchange(store, tenant.id, conversation.id, start=call_start(epoch=begun.number))
        await take_exchange(store, tenant.id, conversation.id, start=None, end=None)
        source = await store.load_payload_source(tenant.id, conversation.id)
        first, second = (begun.prefix_hash for begun in epochs)
        assert [turn.prefix_hash for turn in source.buffered] == [None, first, None, second, None, None]
        assert source.epoch == epochs[1]

    async def test_the_newest_call_before_the_trigger_is_the_previous_one(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await accept_and_check_nothing_before(store, tenant, conversation)
        begun = epoch()
        await store.begin_epoch(tenant.id, conversation.id, begun)
        manifest = ({"layer": "static", "kind": "static", "role": "system", "hash": NASTY, "length": 3},)
        start = call_start(manifest=manifest, layer_order=LayerOrder.APPEND_ONLY)
        await take_exchange(store, tenant.id, conversation.id, start=start)
        # A turn that ended before any call does not count.
        await take_exchange(store, tenant.id, conversation.id, start=None, end=None)
        running = await accept(store, tenant.id, user_input(conversation.id))
        await store.begin_call(running.lease, call_start(manifest=()))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert encode_manifest(source.previous_manifest) == manifest
        assert (source.previous_order, source.previous_prefix_hash) == (LayerOrder.APPEND_ONLY, begun.prefix_hash)

    async def test_a_payload_source_has_the_previous_call_and_the_times_of_the_last_ones(
        self, store: Store, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        times = [A_TIME + timedelta(minutes=minute) for minute in range(10)]
        for time in times:
            start, end = call_start(started_at=time), call_end(response_id=f"{NASTY} {time.minute}")
            await take_exchange(store, tenant.id, conversation.id, start=start, end=end)
        running = await accept(store, tenant.id, user_input(conversation.id))
        await store.begin_call(running.lease, call_start())
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert source.recent_call_times == tuple(reversed(times[2:]))
        assert source.cache is None
        assert source.previous_call == CallTrace(
            provider=start.provider,
            model=start.model,
            account=start.account,
            started_at=start.started_at,
            usage=end.usage,
            response_id=end.response_id,
            caching=start.caching,
        )

    async def test_an_edited_assistant_takes_effect_after_a_tool_loop(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id, calls=["a"])
        await store.begin_epoch(tenant.id, conversation.id, epoch())
        await store.revise_assistant(tenant.id, conversation.assistant_id, definition(provider="anthropic"))
        await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
        accepted = await accept(store, tenant.id, tool_response(conversation.id, ["a"]))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert (source.assistant.version, source.conversation.assistant_version) == (1, 2)
        await store.finish_turn(accepted.lease, answer())
        await accept(store, tenant.id, user_input(conversation.id))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert (source.assistant.version, source.assistant.definition.provider) == (2, "anthropic")
        # The answer of the other provider has to be sent as blocks from now on.
        assert all(turn.blocks is not None for turn in source.buffered)

    async def test_images_of_the_buffer_are_loaded_unless_they_are_cached(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        images = [picture(bytes([number]) * 100) for number in range(3)]
        for image in images:
            accepted = await accept(store, tenant.id, user_input(conversation.id, blobs=(image, images[2])))
            await store.finish_turn(accepted.lease, answer())
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert source.blobs == {image.sha256.hex(): image for image in images}
        held = [images[0].sha256, b"another"]
        source = await store.load_payload_source(tenant.id, conversation.id, cached_blobs=held)
        assert source.blobs == {image.sha256.hex(): image for image in images[1:]}
        await store.begin_epoch(tenant.id, conversation.id, epoch(buffer_start_seq=3))
        source = await store.load_payload_source(tenant.id, conversation.id)
        assert set(source.blobs) == {images[1].sha256.hex(), images[2].sha256.hex()}

    async def test_a_past_payload_is_loaded_as_it_was(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        image = picture(b"img")
        then: dict[int, PayloadSource] = {}
        for number in (1, 2):
            segment = None
            if number == 2:
                segment = Segment(generation=0, position=0, first_seq=1, last_seq=2, text=NASTY, token_count=5)
                await store.revise_assistant(tenant.id, conversation.assistant_id, definition(name="second"))
                await store.change_conversation(tenant.id, conversation.id, ConversationChange(assistant_version=2))
            begun = epoch(
                number,
                f"Text {number}",
                assistant_version=number,
                segment_count=number - 1,
                buffer_start_seq=2 * number - 1,
            )
            await store.begin_epoch(tenant.id, conversation.id, begun, segment=segment)
            for _ in range(2):
                accepted = await accept(store, tenant.id, user_input(conversation.id, blobs=(image,)))
                then[accepted.lease.turn_seq] = await store.load_payload_source(tenant.id, conversation.id)
                start = call_start(epoch=number, manifest=({"seq": accepted.seq},))
                await store.end_call(accepted.lease, start, call_end(status=503))
                await store.finish_turn(accepted.lease, answer(start=replace(start, attempt=2)))
        now = await store.load_conversation(tenant.id, conversation.id)
        for turn_seq, source in then.items():
            for attempt in (1, 2):
                rebuilt = await store.load_rebuild_source(tenant.id, conversation.id, turn_seq, attempt)
                assert rebuilt.source == replace(source, conversation=now)
                [call] = [
                    call
                    for call in await store.list_calls(tenant.id, conversation.id, turn_seq)
                    if call.start.attempt == attempt
                ]
                assert call.end is not None
                assert rebuilt.call == replace(call, end=replace(call.end, raw_response=None))

    async def test_a_missing_call_is_not_found(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id)
        for place in ((2, 2), (1, 1), (4, 1), (-1, -1), (2**80, 2**40)):
            with pytest.raises(CallNotFound):
                await store.load_rebuild_source(tenant.id, conversation.id, *place)

    async def test_a_template_is_archived_once_with_the_epoch_that_used_it(self, store: Store, tenant: Tenant) -> None:
        source = f"{{{{ roles }}}} {NASTY}"
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        assert await store.load_template(digest) is None
        for _ in range(2):
            conversation = await create_conversation(store, tenant.id)
            begun = epoch(template_hash=digest)
            await store.begin_epoch(tenant.id, conversation.id, begun, template_source=source)
            assert await store.load_template(digest) == source
            with pytest.raises(EpochMoved):
                await store.begin_epoch(
                    tenant.id, conversation.id, epoch(1, "Else", template_hash=b"else"), template_source="else"
                )
        assert await store.load_template(b"else") is None

    async def test_the_static_text_is_left_out_if_it_is_cached(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        begun = epoch(text=f"You help. {NASTY}")
        await store.begin_epoch(tenant.id, conversation.id, begun)
        source = await store.load_payload_source(tenant.id, conversation.id, cached_static_hashes=[b"other"])
        assert (source.epoch, source.static_text) == (begun, begun.base_text)
        held = await store.load_payload_source(
            tenant.id, conversation.id, cached_static_hashes=[b"other", begun.static_hash]
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
        # The compacted turns can still be read.
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 6

    async def test_an_epoch_begins_once(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        await store.begin_epoch(tenant.id, conversation.id, epoch(1))
        await store.begin_epoch(tenant.id, conversation.id, epoch(1))
        for stale in (epoch(1, "Another text"), epoch(3), epoch(0)):
            with pytest.raises(EpochMoved):
                await store.begin_epoch(tenant.id, conversation.id, stale)
        assert (await store.load_conversation(tenant.id, conversation.id)).epoch == 1

    async def test_only_one_of_concurrent_epochs_begins(self, store: Store, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        outcomes = await asyncio.gather(
            *(store.begin_epoch(tenant.id, conversation.id, epoch(1, f"Text {n}")) for n in range(8)),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes].count(EpochMoved) == 7
        assert outcomes.count(None) == 1
