"""Notifications between processes over real LISTEN and NOTIFY, also when the connection is lost."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from uuid import uuid4

import pytest

from server.app.providers import FOLDS
from server.conversation.api_key import Tenant
from server.conversation.call import Chunk
from server.conversation.conversation import Lease
from server.conversation.errors import LeaseLost
from server.conversation.event import TextDelta
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, new_id
from server.conversation.notifications import Notification, Notifications
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.notifications import CONVERSATION_CHANNEL, ListenerTimes, PostgresNotifications
from server.postgres.store import PostgresStore
from server.turns import stored
from server.turns.stored import StoredHandle, TurnLibrary
from tests.support.builders import LEASE_SECONDS, accept, answer, call_start, create_conversation, token, user_input
from tests.support.wire_proxy import WireProxy, open_proxy

QUICK = ListenerTimes(first_pause_seconds=0.01, max_pause_seconds=0.05, probe_seconds=0.05, silence_seconds=2)
LONG = 20.0
"""Seconds to wait for something that must happen; only a failure takes them."""


@asynccontextmanager
async def open_listener(options: DatabaseOptions, times: ListenerTimes = QUICK) -> AsyncIterator[PostgresNotifications]:
    """Records what a process is notified of, from the moment it listens."""
    async with PostgresNotifications(options, times=times) as listener:
        async with asyncio.timeout(LONG):
            await listener.wait_until_listening()
        yield listener


@pytest.fixture
async def listener(database: Database) -> AsyncIterator[PostgresNotifications]:
    async with open_listener(database.options) as opened:
        yield opened


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[WireProxy]:
    async with open_proxy(database.options.url) as opened:
        yield opened


@pytest.fixture
def far_options(database: Database, proxy: WireProxy) -> DatabaseOptions:
    return replace(database.options, url=proxy.url())


def losses_of(listener: PostgresNotifications) -> asyncio.Event:
    """Set when a notification may have been missed."""
    missed = asyncio.Event()
    listener.listen(CONVERSATION_CHANNEL, on_payload=lambda _: None, on_gap=missed.set)
    return missed


async def announce(database: Database, payload: str) -> None:
    async with database.connection() as connection:
        await connection.execute("SELECT pg_notify($1, $2)", CONVERSATION_CHANNEL, payload)


def gemini_frame(text: str) -> bytes:
    chunk = {"candidates": [{"content": {"parts": [{"text": text}], "role": "model"}, "index": 0}]}
    return b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n"


async def count_sessions(database: Database, application_name: str) -> int:
    async with database.connection() as connection:
        count: int = await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", application_name
        )
    return count


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition."""
    async with asyncio.timeout(LONG):
        while not await condition():  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.01)


async def is_without_session(database: Database, application_name: str) -> bool:
    return await count_sessions(database, application_name) == 0


async def has_records(caplog: pytest.LogCaptureFixture) -> bool:
    return bool(caplog.records)


def test_they_implement_the_port(database: Database) -> None:
    notifications: Notifications = PostgresNotifications(database.options)
    assert isinstance(notifications, PostgresNotifications)


class TestTheStoreAnnounces:
    async def test_what_others_may_wait_for(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        with (
            listener.watch(conversation.id, Notification.GROWN) as grown,
            listener.watch(conversation.id, Notification.CANCELLING) as cancelling,
            listener.watch(conversation.id, Notification.ENDED) as ended,
            listener.watch(conversation.id, *Notification) as anything,
        ):
            chunk = Chunk(attempt=1, offset=0, data=b"abc")
            await store.request_growth_notifications(tenant.id, conversation.id, 2, seconds=LEASE_SECONDS)
            await store.append_chunks(accepted.lease, [chunk], lease_seconds=LEASE_SECONDS)
            assert await grown.wait(LONG)
            await store.request_cancel(tenant.id, conversation.id)
            assert await cancelling.wait(LONG)
            assert not await ended.wait(0)
            await store.finish_turn(accepted.lease, answer())
            assert await ended.wait(LONG)
            assert await anything.wait(0)
            # Each was sent once.
            assert not any([await watch.wait(0) for watch in (grown, cancelling, ended, anything)])

    async def test_a_turn_that_ended_without_a_call(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        with listener.watch(conversation.id, Notification.ENDED) as ended:
            await store.finish_turn(accepted.lease, answer(start=None, end=None))
            assert await ended.wait(LONG)

    async def test_that_a_waiting_request_gave_up(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        ticket = await store.enter_queue(tenant.id, conversation.id, limit=5, seconds=LEASE_SECONDS)
        with listener.watch(conversation.id, Notification.ENDED) as ended:
            await store.leave_queue(conversation.id, ticket)
            assert await ended.wait(LONG)

    async def test_nothing_if_nothing_was_written(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        chunk = Chunk(attempt=1, offset=0, data=b"abc")
        await store.request_growth_notifications(tenant.id, conversation.id, 2, seconds=LEASE_SECONDS)
        await store.append_chunks(accepted.lease, [chunk], lease_seconds=LEASE_SECONDS)
        stranger = replace(accepted.lease, token=token())
        with (
            listener.watch(conversation.id, Notification.GROWN, Notification.ENDED) as watch,
            listener.watch(conversation.id, Notification.CANCELLING) as cancelling,
        ):
            await store.request_cancel(tenant.id, conversation.id)
            assert await cancelling.wait(LONG)
            await watch.wait(0)
            # A heartbeat, a repetition, and a request without the right to it.
            await store.append_chunks(accepted.lease, [], lease_seconds=LEASE_SECONDS)
            await store.append_chunks(accepted.lease, [chunk], lease_seconds=LEASE_SECONDS)
            for attempt in (
                store.append_chunks(stranger, [chunk], lease_seconds=LEASE_SECONDS),
                store.finish_turn(stranger, answer()),
            ):
                with pytest.raises(LeaseLost):
                    await attempt
            await store.leave_queue(conversation.id, 77)
            # Notifications come in the order of the changes: when this one is here, the others would be.
            await store.request_cancel(tenant.id, conversation.id)
            assert await cancelling.wait(LONG)
            assert not await watch.wait(0)


class TestGrowth:
    """Growth is announced only to readers in other processes that have requested it."""

    async def _announced(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant, lease: Lease, offset: int
    ) -> bool:
        """Return whether appending a chunk is announced."""
        with (
            listener.watch(lease.conversation_id, Notification.GROWN) as grown,
            listener.watch(lease.conversation_id, Notification.CANCELLING) as cancelling,
        ):
            await store.append_chunks(lease, [Chunk(attempt=1, offset=offset, data=b"a")], lease_seconds=LEASE_SECONDS)
            # Announcements arrive in the order of the commits.
            await store.request_cancel(tenant.id, lease.conversation_id)
            assert await cancelling.wait(LONG)
            return await grown.wait(0)

    async def test_is_announced_only_while_it_is_requested(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        lease = (await accept(store, tenant.id, user_input(conversation.id))).lease
        assert not await self._announced(listener, store, tenant, lease, 0)
        await store.request_growth_notifications(tenant.id, conversation.id, 2, seconds=-1)
        assert not await self._announced(listener, store, tenant, lease, 1)
        await store.request_growth_notifications(tenant.id, conversation.id, 2, seconds=60)
        assert await self._announced(listener, store, tenant, lease, 2)
        # A shorter request does not end a longer one.
        await store.request_growth_notifications(tenant.id, conversation.id, 2, seconds=-1)
        assert await self._announced(listener, store, tenant, lease, 3)

    async def test_can_be_requested_only_for_a_running_turn_of_the_tenant(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        lease = (await accept(store, tenant.id, user_input(conversation.id))).lease
        for tenant_id, seq in ((new_id(TENANT), 2), (tenant.id, 1), (tenant.id, 4)):
            await store.request_growth_notifications(tenant_id, conversation.id, seq, seconds=60)
        await store.request_growth_notifications(tenant.id, "not an id", 2, seconds=60)
        assert not await self._announced(listener, store, tenant, lease, 0)

    async def test_that_commits_while_it_is_requested_is_read_afterwards(
        self, database: Database, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        lease = (await accept(store, tenant.id, user_input(conversation.id))).lease
        chunk = Chunk(attempt=1, offset=0, data=b"abc")
        async with database.connection() as connection:
            changes = connection.transaction()
            await changes.start()
            await connection.execute(
                "UPDATE conversations SET lease_expires_at = lease_expires_at WHERE lease_token = $1", lease.token
            )
            await connection.execute(
                "INSERT INTO call_chunks SELECT id, 2, 1, 0, 'abc' FROM conversations WHERE lease_token = $1",
                lease.token,
            )
            requesting = asyncio.create_task(
                store.request_growth_notifications(tenant.id, conversation.id, 2, seconds=60)
            )
            done, _ = await asyncio.wait({requesting}, timeout=0.2)
            assert not done
            assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == []
            await changes.commit()
        await requesting
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == [chunk]

    async def test_wakes_a_reader_of_another_process_at_once(
        self,
        listener: PostgresNotifications,
        store: PostgresStore,
        tenant: Tenant,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # The reader does not poll: only a notification wakes it.
        monkeypatch.setattr(stored, "_LOOK_SECONDS", 3600.0)
        conversation = await create_conversation(store, tenant.id)
        lease = (await accept(store, tenant.id, user_input(conversation.id))).lease
        await store.begin_call(lease, call_start(provider="gemini"))
        library = TurnLibrary(store=store, notifications=listener, folds=FOLDS)
        reader = StoredHandle(library=library, tenant_id=tenant.id, conversation_id=conversation.id, seq=2).read()
        [(number, _)] = await reader.next(LONG) or ()
        assert number == 1
        offset = 0
        for word in ("One", "Two", "Three"):
            waiting = asyncio.create_task(reader.next(LONG))
            if offset == 0:
                # Until the reader has looked, so that it has to be woken.
                await eventually(partial(self._is_requested, store, conversation.id))
            data = gemini_frame(word)
            await store.append_chunks(lease, [Chunk(attempt=1, offset=offset, data=data)], lease_seconds=LEASE_SECONDS)
            offset += len(data)
            events = await waiting or ()
            assert [event.text for _, event in events if isinstance(event, TextDelta)] == [word]
        reader.close()

    async def _is_requested(self, store: PostgresStore, conversation_id: str) -> bool:
        async with store._database.connection() as connection:  # noqa: SLF001  reason: no method returns the column
            found: bool = await connection.fetchval(
                "SELECT listened_until > now() FROM conversations WHERE id = $1",
                decode_id(CONVERSATION, conversation_id),
            )
        return found


class TestAWatch:
    async def test_is_of_one_conversation(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        one, other = [await create_conversation(store, tenant.id) for _ in range(2)]
        leases = [(await accept(store, tenant.id, user_input(conversation.id))).lease for conversation in (one, other)]
        with listener.watch(one.id, Notification.ENDED) as mine, listener.watch(other.id, Notification.ENDED) as theirs:
            await store.finish_turn(leases[1], answer())
            assert await theirs.wait(LONG)
            assert not await mine.wait(0)

    async def test_keeps_what_came_before_it_was_awaited(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        with (
            listener.watch(conversation.id, Notification.ENDED) as early,
            listener.watch(conversation.id, Notification.ENDED) as barrier,
        ):
            await store.finish_turn(accepted.lease, answer())
            assert await barrier.wait(LONG)
            with listener.watch(conversation.id, Notification.ENDED) as late:
                assert not await late.wait(0)
            assert await early.wait(0)

    async def test_of_many_on_one_conversation_each_is_notified(
        self, listener: PostgresNotifications, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))

        async def wait() -> bool:
            with listener.watch(conversation.id, Notification.ENDED) as watch:
                return await watch.wait(LONG)

        waiting = [asyncio.create_task(wait()) for _ in range(20)]
        await asyncio.sleep(0)
        await store.finish_turn(accepted.lease, answer())
        assert all(await asyncio.gather(*waiting))

    async def test_that_has_ended_leaves_nothing_behind(self, listener: PostgresNotifications) -> None:
        conversation_id = new_id(CONVERSATION)
        with listener.watch(conversation_id, Notification.ENDED), listener.watch(conversation_id, Notification.ENDED):
            pass
        with listener.watch("not an id", Notification.ENDED) as watch:
            assert not await watch.wait(0)
        assert not listener._watches  # noqa: SLF001  reason: the registrations are not visible from outside

    async def test_ignores_foreign_notifications(
        self, listener: PostgresNotifications, database: Database, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        with listener.watch(conversation.id, *Notification) as watch:
            for payload in ("", "x", str(uuid4()), "é" * 1000, "None" + "e"):
                await announce(database, payload)
            await store.finish_turn(accepted.lease, answer())
            assert await watch.wait(LONG)
        assert listener.listening

    async def test_in_every_process_gets_the_same(
        self, listener: PostgresNotifications, database: Database, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        async with open_listener(database.options) as others:
            with (
                listener.watch(conversation.id, Notification.ENDED) as mine,
                others.watch(conversation.id, Notification.ENDED) as theirs,
            ):
                await store.finish_turn(accepted.lease, answer())
                assert await mine.wait(LONG)
                assert await theirs.wait(LONG)


class TestTheConnection:
    async def test_that_was_closed_is_reopened_and_every_watch_is_woken(
        self, database: Database, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        options = replace(database.options, application_name=f"listener {uuid4()}")
        async with open_listener(options) as listener:
            with (
                listener.watch(conversation.id, Notification.ENDED) as watch,
                listener.watch(new_id(CONVERSATION)) as nothing,
            ):
                async with database.connection() as connection:
                    await connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1",
                        options.application_name,
                    )
                assert await watch.wait(LONG)
                assert await nothing.wait(LONG)
                async with asyncio.timeout(LONG):
                    await listener.wait_until_listening()
                assert await count_sessions(database, options.application_name) == 1
                await watch.wait(0)
                await store.finish_turn(accepted.lease, answer())
                assert await watch.wait(LONG)

    async def test_that_is_refused_for_a_while_wakes_every_watch_when_it_is_back(
        self, far_options: DatabaseOptions, proxy: WireProxy, store: PostgresStore, tenant: Tenant
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        async with open_listener(far_options) as listener:
            missed = losses_of(listener)
            await proxy.lose_database()
            await asyncio.wait_for(missed.wait(), LONG)
            assert not listener.listening
            with listener.watch(conversation.id, Notification.ENDED) as watch:
                await store.finish_turn(accepted.lease, answer())
                assert not await watch.wait(0.2)
                await proxy.accept()
                assert await watch.wait(LONG)
            assert listener.listening

    async def test_that_became_silent_is_detected(self, far_options: DatabaseOptions, proxy: WireProxy) -> None:
        async with open_listener(far_options) as listener:
            missed = losses_of(listener)
            proxy.swallow()
            await asyncio.wait_for(missed.wait(), LONG)
            assert not listener.listening
            proxy.flow()
            async with asyncio.timeout(LONG):
                await listener.wait_until_listening()

    async def test_need_not_be_available_at_the_start(self, far_options: DatabaseOptions, proxy: WireProxy) -> None:
        await proxy.refuse()
        async with PostgresNotifications(far_options, times=QUICK) as listener:
            with listener.watch(new_id(CONVERSATION), Notification.ENDED) as watch:
                assert not await watch.wait(0.05)
                await proxy.accept()
                assert await watch.wait(LONG)
            assert listener.listening

    async def test_is_one_and_ends_with_the_block(self, database: Database) -> None:
        options = replace(database.options, application_name=f"listener {uuid4()}")
        async with open_listener(options) as listener:
            assert await count_sessions(database, options.application_name) == 1
        assert not listener.listening
        await eventually(partial(is_without_session, database, options.application_name))

    async def test_that_is_silent_does_not_delay_the_end(self, far_options: DatabaseOptions, proxy: WireProxy) -> None:
        async with asyncio.timeout(LONG):
            async with open_listener(far_options, replace(QUICK, silence_seconds=3600)):
                proxy.swallow()

    async def test_to_a_read_only_database_is_not_used(
        self, database: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        url = database.options.url
        joined = "&" if "?" in url else "?"
        options = replace(database.options, url=f"{url}{joined}default_transaction_read_only=on")
        with caplog.at_level(logging.WARNING, "strata.notifications"):
            async with PostgresNotifications(options, times=QUICK) as listener:
                await eventually(partial(has_records, caplog))
                assert not listener.listening
        [record] = caplog.records
        assert (record.message, vars(record)["reason"]) == ("notifications.lost", "The database has become read-only.")
