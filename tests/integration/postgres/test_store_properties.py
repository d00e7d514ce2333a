"""Invariants for any history and any number of writers, on the real database."""

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.api_key import Tenant
from server.conversation.block import decode_blocks
from server.conversation.conversation import Lease
from server.conversation.errors import ConversationBusy, LeaseLost
from server.conversation.payload import LayerOrder
from server.conversation.store import Accepted, Duplicate, NewAnswer, NewInput
from server.conversation.turn import ModelResponseTurn, Native, UserTaskTurn
from server.postgres.store import PostgresStore
from tests.support.builders import (
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    take_exchange,
    token,
    user_input,
)
from tests.support.strategies import any_text, blocks, json_objects

FEW = settings(max_examples=15)


async def write(store: PostgresStore, tenant_id: str, conversation_id: str, text: str) -> int:
    """A writer that retries until it has sent one text."""
    while True:
        try:
            accepted = await accept(store, tenant_id, user_input(conversation_id, text))
        except ConversationBusy:
            await asyncio.sleep(0)
            continue
        await store.finish_turn(accepted.lease, answer(text))
        return accepted.seq


@FEW
@given(writers=st.integers(2, 8), conversations=st.integers(1, 3), rounds=st.integers(1, 3))
async def test_two_writers_never_get_the_same_number_and_no_number_is_missing(
    store: PostgresStore, tenant: Tenant, writers: int, conversations: int, rounds: int
) -> None:
    made = [await create_conversation(store, tenant.id) for _ in range(conversations)]

    async def writer(number: int) -> list[tuple[str, int]]:
        written = []
        for step in range(rounds):
            conversation = made[(number + step) % conversations]
            seq = await write(store, tenant.id, conversation.id, f"writer {number}, round {step}")
            written.append((conversation.id, seq))
        return written

    written = [place for places in await asyncio.gather(*map(writer, range(writers))) for place in places]
    assert len(set(written)) == writers * rounds
    for conversation in made:
        count = 2 * sum(conversation_id == conversation.id for conversation_id, _ in written)
        page = await store.list_turns(tenant.id, conversation.id, limit=100)
        assert [turn.seq for turn in page.items] == list(range(1, count + 1))
        assert (await store.load_conversation(tenant.id, conversation.id)).revision == count
        # Each answer follows its own question.
        for question, reply in zip(page.items[::2], page.items[1::2], strict=True):
            assert reply.blocks == answer(question.blocks[0].text).blocks  # type: ignore[union-attr]


@FEW
@given(contenders=st.integers(2, 10), same_key=st.booleans())
async def test_a_lease_has_one_owner(store: PostgresStore, tenant: Tenant, contenders: int, *, same_key: bool) -> None:
    conversation = await create_conversation(store, tenant.id)
    key = "the same" if same_key else None
    outcomes = await asyncio.gather(
        *(store.accept_turn(tenant.id, user_input(conversation.id, idempotency_key=key)) for _ in range(contenders)),
        return_exceptions=True,
    )
    [accepted] = [outcome for outcome in outcomes if isinstance(outcome, Accepted)]
    others = [outcome for outcome in outcomes if outcome is not accepted]
    if same_key:
        # The loser finds either the turn that won or, at the same moment, a busy conversation.
        assert all(isinstance(outcome, Duplicate | ConversationBusy) for outcome in others)
    else:
        assert all(isinstance(outcome, ConversationBusy) for outcome in others)
    strangers = [outcome for outcome in others if isinstance(outcome, Duplicate)]
    assert all((outcome.seq, outcome.running) == (1, True) for outcome in strangers)
    assert len((await store.list_turns(tenant.id, conversation.id)).items) == 1


@FEW
@given(data=st.data())
async def test_only_one_token_at_a_time_can_write(store: PostgresStore, tenant: Tenant, data: st.DataObject) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(store, tenant.id, user_input(conversation.id, lease_seconds=0))
    held, lost = accepted.lease, list[Lease]()
    for _ in range(data.draw(st.integers(0, 4))):
        taken = await store.take_over_lease(held, token=token(), owner="next", lease_seconds=0)
        lost.append(held)
        held = taken
    for stale in lost:
        for attempt in (
            store.append_chunks(stale, [], lease_seconds=60),
            store.begin_call(stale, call_start()),
            store.finish_turn(stale, answer("stale")),
        ):
            try:
                await attempt
            except LeaseLost:
                continue
            raise AssertionError
    await store.finish_turn(held, answer("held"))
    assert (await store.load_turn(tenant.id, conversation.id, 2)).blocks == answer("held").blocks


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[NewInput, NewAnswer]:
    """Any question and any answer to it."""
    native, reported, model = draw(st.binary(max_size=300)), draw(json_objects), draw(any_text)
    question = user_input(
        "", blocks=tuple(draw(st.lists(blocks, max_size=4))), language=draw(any_text), args=draw(json_objects)
    )
    reply = answer(
        blocks=tuple(draw(st.lists(blocks, max_size=4))),
        native=Native(dialect="anthropic", data=native),
        provider="anthropic",
        start=call_start(model=model, manifest=({"x": reported},), dynamic=native, layer_order=LayerOrder.APPEND_ONLY),
        end=call_end(
            raw_response=draw(st.binary(max_size=3000)), usage_reported=reported, headers={"h": model}, error_code=None
        ),
    )
    return question, reply


@given(exchange=exchanges())
async def test_a_finished_turn_is_loaded_as_committed(
    store: PostgresStore, tenant: Tenant, exchange: tuple[NewInput, NewAnswer]
) -> None:
    conversation = await create_conversation(store, tenant.id)
    question, reply = replace(exchange[0], conversation_id=conversation.id), exchange[1]
    accepted = await accept(store, tenant.id, question)
    await store.finish_turn(accepted.lease, reply)

    asked = await store.load_turn(tenant.id, conversation.id, 1)
    assert isinstance(asked, UserTaskTurn)
    assert (asked.blocks, asked.language, asked.args) == (question.blocks, question.language, question.args)
    replied = await store.load_turn(tenant.id, conversation.id, 2)
    assert isinstance(replied, ModelResponseTurn)
    assert (replied.blocks, replied.model) == (reply.blocks, reply.model)
    assert await store.load_native(tenant.id, conversation.id, 2) == reply.native
    [call] = await store.list_calls(tenant.id, conversation.id, 2)
    assert (call.start, call.end) == (reply.start, reply.end)
    source = await store.load_payload_source(tenant.id, conversation.id)
    assert [buffered.seq for buffered in source.buffered] == [1, 2]
    assert decode_blocks(source.buffered[0].native.data) == question.blocks
    assert source.buffered[0].blocks == question.blocks
    assert (source.buffered[1].native, source.buffered[1].dynamic) == (reply.native, call.start.dynamic or None)
    # The answer is of another provider than the assistant's.
    assert source.buffered[1].blocks == reply.blocks


@FEW
@given(count=st.integers(1, 6), limit=st.integers(1, 5), newest_first=st.booleans())
async def test_pages_show_every_turn_once_in_order(
    store: PostgresStore, tenant: Tenant, count: int, limit: int, *, newest_first: bool
) -> None:
    conversation = await create_conversation(store, tenant.id)
    for number in range(count):
        await take_exchange(store, tenant.id, conversation.id, str(number))
    seen: list[int] = []
    cursor = None
    while True:
        page = await store.list_turns(tenant.id, conversation.id, cursor=cursor, limit=limit, newest_first=newest_first)
        assert len(page.items) <= limit
        seen += [turn.seq for turn in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == sorted(range(1, 2 * count + 1), reverse=newest_first)
