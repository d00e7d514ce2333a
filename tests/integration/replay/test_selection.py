"""The selection of conversations for a replay, and its estimated cost."""

from dataclasses import replace
from decimal import Decimal

import pytest

from server.conversation.block import TextBlock
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import AssistantNotFound, ConversationNotFound, ValidationFailed
from server.conversation.identifiers import CONVERSATION, new_id
from server.conversation.turn import TurnState
from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectionFilter
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.inspection.search_index import index_all
from server.postgres.replay import planning
from server.postgres.store import PostgresStore
from server.replay.rerun.replay import Candidate, Judge, ReplayMode, Selection
from tests.support.builders import (
    accept,
    answer,
    call_end,
    call_start,
    create_assistant,
    create_conversation,
    take_exchange,
    user_input,
)
from tests.support.replay_builders import ReplayHarness, draft


async def select(harness: ReplayHarness, **wanted: object) -> list[str]:
    selection = Selection(**wanted)  # type: ignore[arg-type]  # reason: the fields of an example
    return [*await harness.replays.select_conversations(harness.tenant.id, selection)]


async def test_ids_are_taken_in_their_order_and_must_exist(harness: ReplayHarness) -> None:
    ids = await harness.record(3)
    assert await select(harness, conversation_ids=(ids[2], ids[0])) == [ids[2], ids[0]]
    for missing in (new_id(CONVERSATION), "conv_nonsense"):
        with pytest.raises(ConversationNotFound):
            await select(harness, conversation_ids=(ids[0], missing))


async def test_all_conversations_that_match_the_filters_are_read_page_by_page(
    harness: ReplayHarness, database: Database, monkeypatch: pytest.MonkeyPatch, key_ring: PostgresKeyRing
) -> None:
    monkeypatch.setattr(planning, "PAGE_LIMIT", 3)
    ids = await harness.record(8)
    stranger = (await key_ring.create_tenant("globex")).id
    foreign = await create_conversation(harness.store, stranger)
    await take_exchange(harness.store, stranger, foreign.id)
    await index_all(database)
    assert sorted(await select(harness)) == sorted(ids)
    assistant = (await harness.store.load_conversation(harness.tenant.id, ids[4])).assistant_id
    assert await select(harness, filters=InspectionFilter(assistant_id=assistant)) == [ids[4]]
    with pytest.raises(ValidationFailed, match="No conversation matches"):
        await select(harness, filters=InspectionFilter(model="nobody-has-this"))


async def test_a_sample_depends_only_on_its_seed(harness: ReplayHarness, database: Database) -> None:
    ids = await harness.record(12)
    await index_all(database)
    by_filter = await select(harness, sample_count=5, sample_seed=7)
    assert len(set(by_filter)) == 5
    assert await select(harness, sample_count=5, sample_seed=7) == by_filter
    assert await select(harness, conversation_ids=tuple(sorted(ids)), sample_count=5, sample_seed=7) == by_filter
    # A larger sample begins with the smaller one, and another seed gives another sample.
    assert (await select(harness, sample_count=9, sample_seed=7))[:5] == by_filter
    assert await select(harness, sample_count=5, sample_seed=8) != by_filter
    assert sorted(await select(harness, sample_count=99)) == sorted(ids)


async def test_an_estimate_applies_the_prices_of_the_candidate_to_what_was_recorded(harness: ReplayHarness) -> None:
    store, tenant = harness.store, harness.tenant.id
    small = Usage(fresh_input_tokens=1000, cache_read_tokens=9000, output_tokens=100, reasoning_tokens=400)
    large = Usage(fresh_input_tokens=150_000, cache_read_tokens=100_000, output_tokens=10)
    for usage in (small, small, large):
        conversation = await create_conversation(store, tenant)
        failed = call_start(attempt=1)
        accepted = await accept(store, tenant, user_input(conversation.id))
        await store.begin_call(accepted.lease, failed)
        await store.end_call(accepted.lease, failed, call_end(usage=small, error_code="provider_overloaded"))
        ended = answer(usage=usage, start=call_start(attempt=2), end=call_end(usage=usage))
        await store.finish_turn(accepted.lease, ended)
        broken = await accept(store, tenant, user_input(conversation.id))
        await store.finish_turn(broken.lease, answer(state=TurnState.FAILED, stop_reason=None, error_code="x"))
    ids = [found.id for found in (await store.list_conversations(tenant)).items]

    asked = draft(limits={"repetitions": 2})
    estimate = await harness.replays.estimate(tenant, asked, ids)
    assert (estimate.conversation_count, estimate.item_count, estimate.call_count) == (3, 6, 6)
    assert estimate.input_tokens == 2 * (10_000 + 10_000 + 250_000)
    assert estimate.output_tokens == 2 * (500 + 500 + 10)
    # gemini-3.1-pro-preview: 2, 0.20 and 12, and 4, 0.40 and 18 for prompts above 200,000 tokens.
    in_small = Decimal(2) * 1000 + Decimal("0.2") * 9000 + Decimal(12) * 500
    in_large = Decimal(4) * 150_000 + Decimal("0.4") * 100_000 + Decimal(18) * 10
    assert estimate.cost_usd == 2 * (2 * in_small + in_large) / 1_000_000
    assert not estimate.is_rough
    assert (estimate.unpriced_count, estimate.unmeasured_count) == (0, 0)

    other = await harness.replays.estimate(
        tenant, replace(asked, candidate=Candidate(model="claude-haiku-4-5"), mode=ReplayMode.FREE_RUNNING), ids
    )
    assert other.is_rough
    assert estimate.uncached_cost_usd is not None
    assert other.uncached_cost_usd == 2 * (Decimal(1) * 270_000 + Decimal(5) * 1010) / 1_000_000
    unknown = await harness.replays.estimate(tenant, replace(asked, candidate=Candidate(model="gemini-99")), ids)
    assert (unknown.cost_usd, unknown.unpriced_count) == (None, 6)
    cheap = await create_assistant(store, tenant, model="gemini-99")
    by_assistant = replace(asked, candidate=Candidate(assistant_id=cheap.id))
    assert (await harness.replays.estimate(tenant, by_assistant, ids)).unpriced_count == 6
    with pytest.raises(AssistantNotFound):
        await harness.replays.estimate(
            tenant, replace(asked, candidate=Candidate(assistant_id=cheap.id, assistant_version=2)), ids
        )
    same = replace(asked, candidate=Candidate(assistant_version=1))
    assert await harness.replays.estimate(tenant, same, ids) == estimate
    judge = Judge(provider="gemini", model="gemini-2.5-pro", prompt="Which is better?")
    assert (await harness.replays.estimate(tenant, replace(asked, judge=judge), ids)).call_count == 12


async def test_an_estimate_without_measurements_is_marked(harness: ReplayHarness, store: PostgresStore) -> None:
    conversation = await create_conversation(store, harness.tenant.id)
    accepted = await accept(store, harness.tenant.id, user_input(conversation.id))
    await store.finish_turn(
        accepted.lease, answer(start=None, end=None, blocks=(TextBlock(text="x"),), provider="gemini", model="m")
    )
    estimate = await harness.replays.estimate(harness.tenant.id, draft(), [conversation.id])
    assert (estimate.call_count, estimate.unmeasured_count, estimate.unpriced_count) == (1, 1, 1)
    empty = await store.create_conversation(
        harness.tenant.id, ConversationDraft(assistant_id=conversation.assistant_id)
    )
    assert (await harness.replays.estimate(harness.tenant.id, draft(), [empty.id])).call_count == 0
