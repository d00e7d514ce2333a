"""Notifications between processes over LISTEN and NOTIFY, on one connection per process outside the pool.

NOTIFY is part of the statement that writes the change: Postgres delivers the notification after the commit, and only
then. The listening connection is kept open for as long as the block lasts: a lost connection is replaced, and a silent
one is found by a probe. Notifications may be missed in between, so every waiter is woken when the connection is back,
and reads the store again. Nothing is queued: a watch is a flag, for any number of notifications before it is read.

LISTEN needs a session of its own. Through a pooler that shares sessions between transactions nothing is received.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from asyncpg import exceptions as pg

from server.conversation.errors import DatabaseUnavailable, StrataError
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.notifications import Notification
from server.postgres.connections import Connection, DatabaseOptions, connect, translated_errors
from server.postgres.engine import LOST

CONVERSATION_CHANNEL: Final = "strata_conversations"
"""Payload: the UUID of a conversation and the letter of a notification."""
KEY_CHANNEL: Final = "strata_keys"
"""Payload: the UUID of an API key that was revoked."""
_LETTERS: Final[Mapping[Notification, str]] = {
    Notification.GROWN: "g",
    Notification.ENDED: "e",
    Notification.CANCELLING: "c",
}
_NOTIFICATIONS: Final = {letter: notification for notification, letter in _LETTERS.items()}
_PROBE: Final = "SELECT current_setting('transaction_read_only') = 'on'"
_CLOSE_SECONDS: Final = 1.0
_log = logging.getLogger("strata.notifications")


def notify_sql(notification: Notification, conversation: str) -> str:
    """Return SQL that notifies other processes; `conversation` is an expression for the UUID.

    It belongs in the list of a SELECT and not in a WITH query: Postgres does not run a SELECT there that nothing reads.
    The comparison with NULL keeps asyncpg from decoding a `void`.
    """
    return f"pg_notify('{CONVERSATION_CHANNEL}', {conversation}::text || '{_LETTERS[notification]}') IS NULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerTimes:
    """Pauses and limits of the listening connection; only tests need other values."""

    first_pause_seconds: float = 0.1
    """Before the first attempt to reconnect; doubled for each further attempt."""
    max_pause_seconds: float = 5.0
    probe_seconds: float = 5.0
    """The interval of the probes."""
    silence_seconds: float = 5.0
    """A connection that does not answer a probe for this long is lost."""


class PostgresNotifications:
    """Implements `server.conversation.notifications.Notifications` inside an `async with` block.

    Entering the block does not wait for the database; until it answers, waits end by their time limits.
    """

    def __init__(self, options: DatabaseOptions, *, times: ListenerTimes | None = None) -> None:
        self._options = options
        self._times = times or ListenerTimes()
        self._watches: defaultdict[str, set[_Watch]] = defaultdict(set)
        self._hooks: dict[str, list[tuple[Callable[[str], None], Callable[[], None]]]] = {
            CONVERSATION_CHANNEL: [(self._notify_watches, self._wake_all)],
            KEY_CHANNEL: [],
        }
        self._connected = asyncio.Event()
        self._loss_logged = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="notifications")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._task is not None:
            # The task ends by the event unless the database does not answer.
            await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
            self._task.cancel()
            # Awaiting the task itself would not distinguish its cancellation from one of this task.
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    @property
    def listening(self) -> bool:
        """Whether notifications are received now, as far as can be determined."""
        return self._connected.is_set()

    async def wait_until_listening(self) -> None:
        """Wait until notifications are received."""
        await self._connected.wait()

    def watch(self, conversation_id: str, *notifications: Notification) -> "_Watch":
        return _Watch(self._watches, str(decode_id(CONVERSATION, conversation_id)), frozenset(notifications))

    def listen(self, channel: str, *, on_payload: Callable[[str], None], on_gap: Callable[[], None]) -> None:
        """Call `on_payload` with each payload of a channel.

        `on_gap` is called whenever notifications may have been missed: when the connection is lost, and when there is
        a new one. Neither may raise.
        """
        self._hooks[channel].append((on_payload, on_gap))

    async def _run(self) -> None:
        """Keep a listening connection open until the block ends."""
        pause = self._times.first_pause_seconds
        while not self._closing.is_set():
            try:
                await self._listen()
            except StrataError as error:
                if not self._loss_logged:
                    # Once, and not for every attempt.
                    self._loss_logged = True
                    _log.warning("notifications.lost", extra={"reason": error.message})
                    pause = self._times.first_pause_seconds
            # Random, so that processes do not reconnect at the same time.
            await _wait(self._closing, pause * random.uniform(0.5, 1.0))  # noqa: S311  reason: nothing to guess
            pause = min(2 * pause, self._times.max_pause_seconds)

    async def _listen(self) -> None:
        """Listen on one connection until the block ends. Raises `DatabaseUnavailable` when the connection is lost."""
        connection = await connect(self._options)
        ended = asyncio.Event()

        def end(_: object) -> None:
            self._connected.clear()
            self._report_gap()
            ended.set()

        connection.add_termination_listener(end)
        closing = asyncio.create_task(self._closing.wait())
        closing.add_done_callback(lambda _: ended.set())
        try:
            with translated_errors():
                for channel in self._hooks:
                    await connection.add_listener(channel, self._receive)
                await self._probe(connection)
                self._connected.set()
                self._loss_logged = False
                _log.info("notifications.connected")
                self._report_gap()
                while not await _wait(ended, self._times.probe_seconds):
                    await self._probe(connection)
            if not self._closing.is_set():
                raise DatabaseUnavailable("The database connection was lost.")
        except (*LOST, pg.PostgresError) as error:
            raise DatabaseUnavailable("The database connection was lost.") from error
        finally:
            closing.cancel()
            with suppress(OSError, pg.PostgresError, pg.InterfaceError, pg.InternalClientError):
                await connection.close(timeout=_CLOSE_SECONDS)

    async def _probe(self, connection: Connection) -> None:
        """Raise `DatabaseUnavailable` if the server does not answer or is not the primary."""
        try:
            async with asyncio.timeout(self._times.silence_seconds):
                read_only: bool = await connection.fetchval(_PROBE)
        except TimeoutError:
            # Without a cancel request: a silent server would not answer that either.
            connection.terminate()
            raise DatabaseUnavailable("The database does not answer in time.") from None
        if read_only:
            raise DatabaseUnavailable("The database has become read-only.")

    def _report_gap(self) -> None:
        for hooks in self._hooks.values():
            for _, on_gap in hooks:
                on_gap()

    def _receive(self, _connection: object, _process_id: int, channel: str, payload: object) -> None:
        for on_payload, _ in self._hooks[channel]:
            on_payload(str(payload))

    def _notify_watches(self, payload: str) -> None:
        notification = _NOTIFICATIONS.get(payload[-1:])
        for watch in self._watches.get(payload[:-1], ()):
            watch.notify(notification)

    def _wake_all(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.wake()


class _Watch:
    """Implements `server.conversation.notifications.Watch`."""

    def __init__(
        self, watches: "defaultdict[str, set[_Watch]]", conversation: str, notifications: frozenset[Notification]
    ) -> None:
        self._watches = watches
        self._conversation = conversation
        self._notifications = notifications
        self._woken = asyncio.Event()
        self._callback: Callable[[], None] | None = None

    def call_when_notified(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __enter__(self) -> Self:
        self._watches[self._conversation].add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watches = self._watches[self._conversation]
        watches.discard(self)
        if not watches:
            del self._watches[self._conversation]

    async def wait(self, limit_seconds: float) -> bool:
        woken = await _wait(self._woken, limit_seconds)
        self._woken.clear()
        return woken

    def notify(self, notification: Notification | None) -> None:
        if notification in self._notifications:
            self.wake()

    def wake(self) -> None:
        self._woken.set()
        if self._callback is not None:
            self._callback()


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set within the given seconds."""
    if not event.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()
