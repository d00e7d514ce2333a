"""What replays have made of a conversation is erased with it, and a replay is erased with all that it has made."""

import asyncio

import pytest

from server.conversation.api_key import Tenant
from server.conversation.audit import OPERATOR
from server.conversation.errors import ConversationNotFound, LeaseLost, ReplayBusy, ReplayNotFound
from server.postgres.engine import Database
from server.postgres.replay import erasure as replay_erasing
from server.postgres.store import PostgresStore
from server.replay.rerun.replay import Granted, ItemState, ReplayState
from tests.integration.conversation.test_erasure import catalogue, rows_that_mention
from tests.support.builders import picture, user_input
from tests.support.replay_builders import ReplayHarness

MARKER = "erase-me-completely"


async def everything(database: Database) -> dict[str, int]:
    """How many rows every table has."""
    async with database.connection() as connection:
        counts = {name: await connection.fetchval(f"SELECT count(*) FROM {name}") for name in await catalogue(database)}  # noqa: S608  reason: names of the catalogue
    return {name: count for name, count in counts.items() if count}


async def test_erasing_a_source_erases_its_items_results_and_replay_conversations(
    harness: ReplayHarness, database: Database
) -> None:
    doomed, kept = await harness.record(2)
    made = await harness.begin(ids=[doomed, kept], repetitions=2)
    image = picture(MARKER.encode())
    for _ in range(4):
        claimed = await harness.claim(made)
        is_doomed = claimed.item.conversation_id == doomed
        replay_conversation = await harness.replay_conversation(claimed.lease, MARKER if is_doomed else "kept")
        if is_doomed:
            await PostgresStore(harness.replay_store).accept_turn(
                harness.tenant.id, user_input(replay_conversation.id, MARKER, blobs=(image,))
            )
            assert await harness.reserve(claimed.lease) == Granted()
        else:
            await harness.replays.end_item(claimed.lease, ItemState.DONE)
    before = await rows_that_mention(database, MARKER)
    assert set(before) >= {"replay.turns", "replay.blobs", "replay_results"}

    expected = await harness.store.erase_conversation(harness.tenant.id, doomed, dry_run=True)
    assert await rows_that_mention(database, MARKER) == before
    assert expected.rows["replay.conversations"] == expected.rows["replay.assistants"] == 2
    assert expected.rows["replay_items"] == expected.rows["replay_results"] == 2
    assert (await harness.store.erase_conversation(harness.tenant.id, doomed)).rows == expected.rows

    assert await rows_that_mention(database, MARKER) == {}
    left = await harness.load(made)
    # The last open items are erased, and the reserved cost of their calls is not.
    assert (left.state, left.item_count, left.item_counts[ItemState.DONE]) == (ReplayState.DONE, 4, 2)
    assert (left.reserved_tokens, left.spent_tokens) == (0, 200)
    assert len((await harness.replays.list_results(None, made.id)).items) == 2


async def test_a_process_that_runs_the_item_of_an_erased_source_gets_an_error(harness: ReplayHarness) -> None:
    made = await harness.begin(2)
    claimed = await harness.claim(made)
    replay_conversation = await harness.replay_conversation(claimed.lease)
    await harness.store.erase_conversation(harness.tenant.id, claimed.item.conversation_id)
    with pytest.raises(LeaseLost):
        await harness.replays.renew_lease(claimed.lease, lease_seconds=60)
    with pytest.raises(ConversationNotFound):
        await PostgresStore(harness.replay_store).load_conversation(harness.tenant.id, replay_conversation.id)
    assert (await harness.load(made)).state is ReplayState.RUNNING


async def test_a_replay_that_is_created_while_its_source_is_erased_is_refused(
    harness: ReplayHarness, database: Database
) -> None:
    (source,) = await harness.record()
    async with database.transaction() as eraser:
        await eraser.execute("SELECT FROM conversations FOR UPDATE")
        making = asyncio.create_task(harness.begin(ids=[source]))
        while not await eraser.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            assert not making.done()
        await eraser.execute("DELETE FROM conversations")
    with pytest.raises(ConversationNotFound):
        await making
    assert (await harness.replays.list_replays(None)).items == []


async def test_a_replay_is_erased_with_all_that_it_has_made_in_batches(
    harness: ReplayHarness, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_erasing, "BATCH", 2)
    ids = await harness.record(3)
    before = await everything(database)
    made, other = await harness.begin(ids=ids), await harness.begin(ids=ids[:1])
    last = (await harness.claim(other)).lease
    await harness.replay_conversation(last, "kept")
    leases = [(await harness.claim(made)).lease for _ in range(3)]
    for lease in leases:
        await harness.replay_conversation(lease, MARKER)
    with pytest.raises(ReplayBusy):
        await harness.replays.erase_replay(None, made.id, actor=OPERATOR)
    await harness.replays.pause_replay(None, made.id, actor=OPERATOR)
    with pytest.raises(ReplayBusy):
        await harness.replays.erase_replay(None, made.id, actor=OPERATOR)
    for lease in leases:
        await harness.replays.release_item(lease)

    expected = await harness.replays.erase_replay(harness.tenant.id, made.id, actor=OPERATOR, dry_run=True)
    assert (expected.rows["replays"], expected.rows["replay_items"], expected.rows["replay.turns"]) == (1, 3, 6)
    assert await harness.replays.erase_replay(harness.tenant.id, made.id, actor=OPERATOR) == expected
    with pytest.raises(ReplayNotFound):
        await harness.load(made)
    assert await rows_that_mention(database, MARKER) == {}
    with pytest.raises(LeaseLost):
        await harness.replays.end_item(leases[0], ItemState.DONE)

    await harness.replays.cancel_replay(None, other.id, actor=OPERATOR)
    await harness.replays.release_item(last)
    await harness.replays.erase_replay(None, other.id, actor=OPERATOR)
    after = await everything(database)
    assert {name: count for name, count in after.items() if name != "audit_log"} == before


async def test_an_erasure_of_another_tenant_changes_nothing(harness: ReplayHarness, tenant: Tenant) -> None:
    made = await harness.begin()
    claimed = await harness.claim(made)
    await harness.replay_conversation(claimed.lease)
    with pytest.raises(ConversationNotFound):
        await harness.store.erase_conversation("tenant_nonsense", claimed.item.conversation_id)
    assert (await harness.replays.load_item(tenant.id, made.id, 1)).replay_conversation_id is not None
