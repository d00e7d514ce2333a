"""Lengths of conversations: counted as they grow, and averaged over those that are at rest."""

from datetime import timedelta

import asyncpg
import pytest

from server.conversation.api_key import Tenant
from server.conversation.conversation import Conversation
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.store import Duplicate
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.compaction.lengths import PostgresConversationLengths
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import migrate_down_one, migrate_up
from server.postgres.store import PostgresStore
from tests.support.builders import (
    accept,
    answer,
    create_assistant,
    create_conversation,
    take_exchange,
    tool_response,
    user_input,
)
from tests.support.database_source import with_database
from tests.support.old_conversations import add_resting


async def count_of(store: PostgresStore, tenant: Tenant, conversation: Conversation) -> int:
    """The number of exchanges in the sources of a payload and of a compaction."""
    source = await store.load_payload_source(tenant.id, conversation.id)
    history = await store.load_history(tenant.id, conversation.id)
    assert history.source.exchange_count == source.exchange_count
    return source.exchange_count


async def kept_count(database: Database, conversation: Conversation) -> int | None:
    async with database.connection() as connection:
        found: int | None = await connection.fetchval(
            "SELECT exchange_count FROM conversations WHERE id = $1", decode_id(CONVERSATION, conversation.id)
        )
    return found


class TestCounting:
    async def test_user_tasks_count_and_the_results_of_tools_do_not(
        self, store: PostgresStore, tenant: Tenant, database: Database
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        assert await count_of(store, tenant, conversation) == 0
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        assert await count_of(store, tenant, conversation) == 1
        await store.finish_turn(accepted.lease, answer(calls=["a"], pending_call_ids=("a",)))
        accepted = await accept(store, tenant.id, tool_response(conversation.id, ["a"]))
        await store.finish_turn(accepted.lease, answer())
        assert await count_of(store, tenant, conversation) == 1
        await take_exchange(store, tenant.id, conversation.id)
        assert await count_of(store, tenant, conversation) == 2
        assert await kept_count(database, conversation) == 2

    async def test_a_repeated_request_counts_once(self, store: PostgresStore, tenant: Tenant) -> None:
        conversation = await create_conversation(store, tenant.id)
        turn = user_input(conversation.id, idempotency_key="key")
        accepted = await accept(store, tenant.id, turn)
        await store.finish_turn(accepted.lease, answer())
        assert isinstance(await store.accept_turn(tenant.id, turn), Duplicate)
        assert await count_of(store, tenant, conversation) == 1

    async def test_an_uncounted_conversation_is_counted_by_its_next_turn(
        self, store: PostgresStore, tenant: Tenant, database: Database
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        for _ in range(3):
            await take_exchange(store, tenant.id, conversation.id)
        async with database.connection() as connection:
            await connection.execute("UPDATE conversations SET exchange_count = NULL")
        assert await count_of(store, tenant, conversation) == 3
        assert await kept_count(database, conversation) is None
        await take_exchange(store, tenant.id, conversation.id)
        assert await kept_count(database, conversation) == 4

    @pytest.mark.parametrize(("at_seq", "count"), [(1, 1), (2, 1), (4, 2)])
    async def test_a_fork_has_the_exchanges_up_to_its_position(
        self, store: PostgresStore, tenant: Tenant, database: Database, at_seq: int, count: int
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        for _ in range(3):
            await take_exchange(store, tenant.id, conversation.id)
        fork = await store.fork_conversation(tenant.id, conversation.id, at_seq)
        assert await kept_count(database, fork) == count
        assert await count_of(store, tenant, fork) == count

    async def test_the_migration_counts_existing_turns(self, server_url: str, worker_id: str) -> None:
        name = f"strata_lengths_{worker_id}"
        connection = await asyncpg.connect(server_url)
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
        options = DatabaseOptions(url=with_database(server_url, name))
        await migrate_up(options)
        database = Database(options)
        try:
            tenant, conversation = await _store_earlier_conversation(database)
            while await _has_counter(database):
                await migrate_down_one(options)
            await migrate_up(options)
            await database.close()
            database = Database(options)
            assert await kept_count(database, conversation) == 2
            assert await count_of(PostgresStore(database), tenant, conversation) == 2
        finally:
            await database.close()
            await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            await connection.close()


async def _store_earlier_conversation(database: Database) -> tuple[Tenant, Conversation]:
    store = PostgresStore(database)
    tenant = await PostgresKeyRing(database).create_tenant("acme")
    conversation = await create_conversation(store, tenant.id)
    for _ in range(2):
        await take_exchange(store, tenant.id, conversation.id)
    return tenant, conversation


async def _has_counter(database: Database) -> bool:
    async with database.connection() as connection:
        found = await connection.fetchval(
            "SELECT 1 FROM pg_attribute WHERE attrelid = 'conversations'::regclass AND attname = 'exchange_count'"
        )
    return found is not None


class TestTypicalLength:
    @pytest.fixture
    def lengths(self, database: Database) -> PostgresConversationLengths:
        return PostgresConversationLengths(database)

    async def test_it_is_the_mean_of_conversations_at_rest(
        self, store: PostgresStore, tenant: Tenant, database: Database, lengths: PostgresConversationLengths
    ) -> None:
        assistant, other = [await create_assistant(store, tenant.id) for _ in range(2)]
        await add_resting(database, tenant.id, assistant.id, [10, 20] * 6)
        await add_resting(database, tenant.id, other.id, [900] * 12)
        # One is still active, one was never begun, one has not been counted.
        await add_resting(database, tenant.id, assistant.id, [900], rests=timedelta(hours=23))
        await add_resting(database, tenant.id, assistant.id, [0, None])
        assert await lengths.load_typical_length(tenant.id, assistant.id) == 15

    async def test_too_few_conversations_have_no_mean(
        self, store: PostgresStore, tenant: Tenant, database: Database, lengths: PostgresConversationLengths
    ) -> None:
        assistant = await create_assistant(store, tenant.id)
        assert await lengths.load_typical_length(tenant.id, assistant.id) is None
        await add_resting(database, tenant.id, assistant.id, [10] * 9)
        assert await lengths.load_typical_length(tenant.id, assistant.id) is None
        await add_resting(database, tenant.id, assistant.id, [10])
        assert await lengths.load_typical_length(tenant.id, assistant.id) == 10

    async def test_conversations_of_today_do_not_hide_older_ones(
        self, store: PostgresStore, tenant: Tenant, database: Database, lengths: PostgresConversationLengths
    ) -> None:
        assistant = await create_assistant(store, tenant.id)
        await add_resting(database, tenant.id, assistant.id, [30] * 10)
        an_hour = timedelta(hours=1)
        await add_resting(database, tenant.id, assistant.id, [1] * 400, created=an_hour, rests=an_hour)
        assert await lengths.load_typical_length(tenant.id, assistant.id) == 30

    async def test_the_newest_conversations_count(
        self, store: PostgresStore, tenant: Tenant, database: Database, lengths: PostgresConversationLengths
    ) -> None:
        assistant = await create_assistant(store, tenant.id)
        await add_resting(database, tenant.id, assistant.id, [30] * 300)
        await add_resting(database, tenant.id, assistant.id, [1] * 50, created=timedelta(days=9))
        assert await lengths.load_typical_length(tenant.id, assistant.id) == 30

    async def test_conversations_of_another_tenant_do_not_count(
        self, store: PostgresStore, tenant: Tenant, database: Database, lengths: PostgresConversationLengths
    ) -> None:
        assistant = await create_assistant(store, tenant.id)
        await add_resting(database, tenant.id, assistant.id, [10] * 10)
        assert await lengths.load_typical_length("tenant_01jd0z8s3bf6h9kq2m4n6p8r0t", assistant.id) is None
