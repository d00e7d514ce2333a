"""What replays have made of a conversation goes with it, and a replay goes with all that it has made."""

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
from tests.support.replay_builders import ReplayRig

MARKER = "erase-me-completely"


async def everything(database: Database) -> dict[str, int]:
    """How many rows every table has."""
    async with database.connection() as connection:
        counts = {name: await connection.fetchval(f"SELECT count(*) FROM {name}") for name in await catalogue(database)}  # noqa: S608  reason: names of the catalogue
    return {name: count for name, count in counts.items() if count}


async def test_erasing_a_source_erases_its_items_results_and_shadows(rig: ReplayRig, database: Database) -> None:
    doomed, kept = await rig.record(2)
    made = await rig.begin(ids=[doomed, kept], repetitions=2)
    image = picture(MARKER.encode())
    for _ in range(4):
        claimed = await rig.claim(made)
        is_doomed = claimed.item.conversation_id == doomed
        shadow = await rig.shadow(claimed.lease, MARKER if is_doomed else "kept")
        if is_doomed:
            await PostgresStore(rig.replay_store).accept_turn(
                rig.tenant.id, user_input(shadow.id, MARKER, blobs=(image,))
            )
            assert await rig.reserve(claimed.lease) == Granted()
        else:
            await rig.replays.end_item(claimed.lease, ItemState.DONE)
    before = await rows_that_mention(database, MARKER)
    assert set(before) >= {"replay.turns", "replay.blobs", "replay_results"}

    expected = await rig.store.erase_conversation(rig.tenant.id, doomed, dry_run=True)
    assert await rows_that_mention(database, MARKER) == before
    assert expected.rows["replay.conversations"] == expected.rows["replay.assistants"] == 2
    assert expected.rows["replay_items"] == expected.rows["replay_results"] == 2
    assert (await rig.store.erase_conversation(rig.tenant.id, doomed)).rows == expected.rows

    assert await rows_that_mention(database, MARKER) == {}
    left = await rig.load(made)
    # The last items that were open have gone, and what their calls may have cost has not.
    assert (left.state, left.item_count, left.item_counts[ItemState.DONE]) == (ReplayState.DONE, 4, 2)
    assert (left.reserved_tokens, left.spent_tokens) == (0, 200)
    assert len((await rig.replays.list_results(None, made.id)).items) == 2


async def test_whoever_runs_the_item_of_an_erased_source_is_told(rig: ReplayRig) -> None:
    made = await rig.begin(2)
    claimed = await rig.claim(made)
    shadow = await rig.shadow(claimed.lease)
    await rig.store.erase_conversation(rig.tenant.id, claimed.item.conversation_id)
    with pytest.raises(LeaseLost):
        await rig.replays.renew_lease(claimed.lease, lease_seconds=60)
    with pytest.raises(ConversationNotFound):
        await PostgresStore(rig.replay_store).load_conversation(rig.tenant.id, shadow.id)
    assert (await rig.load(made)).state is ReplayState.RUNNING


async def test_a_replay_that_is_made_while_its_source_is_erased_is_refused(rig: ReplayRig, database: Database) -> None:
    (source,) = await rig.record()
    async with database.transaction() as eraser:
        await eraser.execute("SELECT FROM conversations FOR UPDATE")
        making = asyncio.create_task(rig.begin(ids=[source]))
        while not await eraser.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            assert not making.done()
        await eraser.execute("DELETE FROM conversations")
    with pytest.raises(ConversationNotFound):
        await making
    assert (await rig.replays.list_replays(None)).items == []


async def test_a_replay_goes_with_all_that_it_has_made_some_at_a_time(
    rig: ReplayRig, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_erasing, "BATCH", 2)
    ids = await rig.record(3)
    before = await everything(database)
    made, other = await rig.begin(ids=ids), await rig.begin(ids=ids[:1])
    last = (await rig.claim(other)).lease
    await rig.shadow(last, "kept")
    leases = [(await rig.claim(made)).lease for _ in range(3)]
    for lease in leases:
        await rig.shadow(lease, MARKER)
    with pytest.raises(ReplayBusy):
        await rig.replays.erase_replay(None, made.id, actor=OPERATOR)
    await rig.replays.pause_replay(None, made.id, actor=OPERATOR)
    with pytest.raises(ReplayBusy):
        await rig.replays.erase_replay(None, made.id, actor=OPERATOR)
    for lease in leases:
        await rig.replays.release_item(lease)

    expected = await rig.replays.erase_replay(rig.tenant.id, made.id, actor=OPERATOR, dry_run=True)
    assert (expected.rows["replays"], expected.rows["replay_items"], expected.rows["replay.turns"]) == (1, 3, 6)
    assert await rig.replays.erase_replay(rig.tenant.id, made.id, actor=OPERATOR) == expected
    with pytest.raises(ReplayNotFound):
        await rig.load(made)
    assert await rows_that_mention(database, MARKER) == {}
    with pytest.raises(LeaseLost):
        await rig.replays.end_item(leases[0], ItemState.DONE)

    await rig.replays.cancel_replay(None, other.id, actor=OPERATOR)
    await rig.replays.release_item(last)
    await rig.replays.erase_replay(None, other.id, actor=OPERATOR)
    after = await everything(database)
    assert {name: count for name, count in after.items() if name != "audit_log"} == before


async def test_another_tenants_erasure_touches_nothing(rig: ReplayRig, tenant: Tenant) -> None:
    made = await rig.begin()
    claimed = await rig.claim(made)
    await rig.shadow(claimed.lease)
    with pytest.raises(ConversationNotFound):
        await rig.store.erase_conversation("tenant_nonsense", claimed.item.conversation_id)
    assert (await rig.replays.load_item(tenant.id, made.id, 1)).replay_conversation_id is not None
