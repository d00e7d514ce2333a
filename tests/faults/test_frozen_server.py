"""A server that freezes between two statements does not block the others.

The frozen one is connected to Postgres through a proxy that passes nothing on while its statement waits for a row:
Postgres executes the statement, and the server does nothing more, as after SIGSTOP.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from server.conversation.api_key import Tenant
from server.conversation.conversation import Conversation
from server.conversation.errors import ConversationNotFound, DatabaseUnavailable, QueueFull
from server.conversation.identifiers import CONVERSATION, decode_id
from server.postgres.connections import DatabaseOptions, connect
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.support.builders import accept, user_input
from tests.support.turn_service_driver import open_conversation
from tests.support.wire_proxy import WireProxy, open_proxy

WAIT_SECONDS = 20.0
SOON = 0.3
"""The time after which Postgres ends an idle transaction, in these tests."""


@asynccontextmanager
async def holding(database: Database, conversation_id: str) -> AsyncIterator[None]:
    """The row of the conversation is locked."""
    async with database.transaction() as connection:
        await connection.execute(
            "SELECT 1 FROM conversations WHERE id = $1 FOR UPDATE", decode_id(CONVERSATION, conversation_id)
        )
        yield


async def until_waiting(database: Database, count: int = 1) -> None:
    """Wait until exactly this many statements wait for a lock."""
    async with asyncio.timeout(WAIT_SECONDS), database.connection() as connection:
        while count != await connection.fetchval(  # noqa: ASYNC110  reason: there is no event to wait for
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        ):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def frozen_in(
    database: Database,
    proxy: WireProxy,
    conversation: Conversation,
    act: Callable[[PostgresStore], Awaitable[object]],
    *,
    idle_seconds: float = SOON,
) -> AsyncIterator[None]:
    """A server froze when its first statement that needs the row of the conversation had locked it."""
    frozen = Database(replace(database.options, url=proxy.url(), pool_size=1, idle_transaction_seconds=idle_seconds))
    acting = asyncio.ensure_future(act(PostgresStore(frozen)))
    try:
        async with holding(database, conversation.id):
            await asyncio.sleep(0)
            await until_waiting(database)
            proxy.swallow()
        # Now the frozen one has locked the row.
        await until_waiting(database, 0)
        yield
    finally:
        proxy.flow()
        await asyncio.wait({acting})
        acting.exception()
        await frozen.close()


ACTS: dict[str, Callable[[str, str], Callable[[PostgresStore], Awaitable[object]]]] = {
    "entering the queue": lambda tenant, conversation: (
        lambda store: store.enter_queue(tenant, conversation, limit=5, seconds=1)
    ),
    "erasing": lambda tenant, conversation: lambda store: store.erase_conversation(tenant, conversation, dry_run=True),
    "accepting": lambda tenant, conversation: lambda store: accept(store, tenant, user_input(conversation)),
}


@pytest.mark.parametrize("name", ACTS)
async def test_others_continue_while_a_server_is_frozen_in(
    database: Database, store: PostgresStore, tenant: Tenant, name: str
) -> None:
    conversation = await open_conversation(store, tenant.id, "gemini")
    async with (
        open_proxy(database.options.url) as proxy,
        frozen_in(database, proxy, conversation, ACTS[name](tenant.id, conversation.id)),
        asyncio.timeout(WAIT_SECONDS),
    ):
        await store.enter_queue(tenant.id, conversation.id, limit=5, seconds=60)
        async with holding(database, conversation.id):
            pass


async def test_entering_the_queue_leaves_no_transaction_open(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    """Others need not wait until Postgres ends it."""
    conversation = await open_conversation(store, tenant.id, "gemini")
    act = ACTS["entering the queue"](tenant.id, conversation.id)
    never = 0
    async with (
        open_proxy(database.options.url) as proxy,
        frozen_in(database, proxy, conversation, act, idle_seconds=never),
        asyncio.timeout(WAIT_SECONDS),
        holding(database, conversation.id),
    ):
        pass


async def test_a_frozen_fork_does_not_prevent_its_source_from_being_erased(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await open_conversation(store, tenant.id, "gemini")
    accepted: Any = await accept(store, tenant.id, user_input(conversation.id))
    assert accepted.seq == 1
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE conversations SET lease_token = NULL, lease_owner = NULL, lease_expires_at = NULL,"
            " lease_turn_seq = NULL"
        )

    async def fork(frozen: PostgresStore) -> object:
        return await frozen.fork_conversation(tenant.id, conversation.id, 1)

    async with (
        open_proxy(database.options.url) as proxy,
        frozen_in(database, proxy, conversation, fork),
        asyncio.timeout(WAIT_SECONDS),
    ):
        assert (await store.erase_conversation(tenant.id, conversation.id)).rows


class TestManyWhoEnterAtOnce:
    async def test_get_tickets_up_to_the_limit_and_no_more(
        self, database: Database, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await open_conversation(store, tenant.id, "gemini")

        async def enter() -> int | None:
            try:
                return await store.enter_queue(tenant.id, conversation.id, limit=3, seconds=60)
            except QueueFull:
                return None

        async with asyncio.TaskGroup() as group, holding(database, conversation.id):
            # All of them find an empty queue and wait for the same row.
            entering = [group.create_task(enter()) for _ in range(10)]
            await until_waiting(database, 10)
        tickets = sorted(ticket for task in entering if (ticket := task.result()) is not None)
        assert len(tickets) == 3
        async with database.connection() as connection:
            kept = await connection.fetch("SELECT ticket FROM waiting_turns ORDER BY ticket")
        assert [row["ticket"] for row in kept] == tickets

    async def test_find_nothing_when_the_conversation_is_erased_meanwhile(
        self, database: Database, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await open_conversation(store, tenant.id, "gemini")
        async with asyncio.TaskGroup() as group, database.transaction() as connection:
            await connection.execute("DELETE FROM conversations")
            entering = group.create_task(self._enter(store, tenant.id, conversation.id))
            await until_waiting(database)
        assert isinstance(entering.result(), ConversationNotFound)
        async with database.connection() as connection:
            assert not await connection.fetch("SELECT FROM waiting_turns")

    async def _enter(self, store: PostgresStore, tenant_id: str, conversation_id: str) -> Exception | int:
        try:
            return await store.enter_queue(tenant_id, conversation_id, limit=3, seconds=60)
        except ConversationNotFound as error:
            return error


class TestEveryConnection:
    async def test_has_limits_for_locks_and_idle_transactions(self, database: Database) -> None:
        connection = await connect(database.options)
        try:
            rows = await connection.fetch(
                "SELECT name, setting FROM pg_settings WHERE name IN ('lock_timeout',"
                " 'idle_in_transaction_session_timeout', 'statement_timeout')"
            )
            assert all(int(row["setting"]) > 0 for row in rows)
            assert len(rows) == 3
        finally:
            await connection.close()

    async def test_over_tcp_is_kept_alive_by_both_sides(self, database: Database) -> None:
        async with open_proxy(database.options.url) as proxy:
            connection = await connect(replace(database.options, url=proxy.url()))
            try:
                peer = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]  # noqa: SLF001  reason: asyncpg has no other way
                assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            finally:
                await connection.close()

    async def test_that_waits_too_long_for_a_row_reports_the_database_as_unavailable(
        self, database: Database, tenant: Tenant, store: PostgresStore
    ) -> None:
        conversation = await open_conversation(store, tenant.id, "gemini")
        hasty = Database(_hasty(database.options))
        try:
            async with holding(database, conversation.id):
                with pytest.raises(DatabaseUnavailable, match="locked"):
                    await PostgresStore(hasty).enter_queue(tenant.id, conversation.id, limit=5, seconds=60)
        finally:
            await hasty.close()


def _hasty(options: DatabaseOptions) -> DatabaseOptions:
    return replace(options, lock_seconds=0.05)
