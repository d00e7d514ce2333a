"""News from other processes over LISTEN, on one connection per process beside the pool.

The connection is kept for as long as the block lasts, whatever the database does: one that was lost is made again, and
one that has fallen silent is noticed by a probe. While it was away news may have been missed, so everybody who waits is
woken when it is back and looks for himself. Nothing is queued: a watch is a flag, however much happens before anybody
waits.

It needs a session of its own: behind a pooler that shares sessions between transactions nothing would be heard.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable
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
from server.postgres.turns.channels import CHANNELS, CONVERSATION_CHANNEL, NEWS_BY_LETTER

_PROBE: Final = "SELECT current_setting('transaction_read_only') = 'on'"
_CLOSE_SECONDS: Final = 1.0
_log = logging.getLogger("strata.notifications")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerTimes:
    """Times. The defaults suit everybody but tests."""

    first_pause_seconds: float = 0.1
    """Before the first attempt to come back; each one after it waits twice as long."""
    longest_pause_seconds: float = 5.0
    probe_seconds: float = 5.0
    """How often the connection is tried."""
    silence_seconds: float = 5.0
    """One that gives no answer for so long is lost."""


class PostgresNotifications:
    """Implements `server.conversation.notifications.Notifications` between entering and leaving the block.

    Entering does not wait for the database: until it answers, waits end with their time.
    """

    def __init__(self, options: DatabaseOptions, *, pace: ListenerTimes | None = None) -> None:
        self._options = options
        self._pace = pace or ListenerTimes()
        self._watches: defaultdict[str, set[_Watch]] = defaultdict(set)
        self._hooks: dict[str, list[tuple[Callable[[str], None], Callable[[], None]]]] = {name: [] for name in CHANNELS}
        self._hooks[CONVERSATION_CHANNEL].append((self._pass_on, self._wake_all))
        self._heard = asyncio.Event()
        self._loss_told = False
        self._ending = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listening = asyncio.create_task(self._listen(), name="notifications")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._listening is not None:
            # Nearly always it sees the event; a database that does not answer is not waited for.
            await asyncio.wait({self._listening}, timeout=_CLOSE_SECONDS)
            self._listening.cancel()
            # Not by awaiting the task: its cancellation could not be told from one of this task.
            await asyncio.wait({self._listening})
            if not self._listening.cancelled():
                self._listening.result()

    @property
    def listening(self) -> bool:
        """Whether what is announced now will be heard, as far as can be known."""
        return self._heard.is_set()

    async def until_hearing(self) -> None:
        """Returns once the database answers."""
        await self._heard.wait()

    def watch(self, conversation_id: str, *news: Notification) -> "_Watch":
        return _Watch(self._watches, str(decode_id(CONVERSATION, conversation_id)), frozenset(news))

    def listen(self, channel: str, *, heard: Callable[[str], None], missed: Callable[[], None]) -> None:
        """`heard` is called with what is said on the channel, `missed` whenever something may not have been heard:
        when the connection is lost, and when there is a new one. Neither may raise.
        """
        self._hooks[channel].append((heard, missed))

    async def _listen(self) -> None:
        """Until the block ends, over any number of connections."""
        pause = self._pace.first_pause_seconds
        while not self._ending.is_set():
            try:
                await self._hear()
            except StrataError as error:
                if not self._loss_told:
                    # Once, however many attempts follow.
                    self._loss_told = True
                    _log.warning("notifications.lost", extra={"reason": error.message})
                    pause = self._pace.first_pause_seconds
            # Not all processes at the same moment.
            await _comes(self._ending, pause * random.uniform(0.5, 1.0))  # noqa: S311  reason: nothing to guess
            pause = min(2 * pause, self._pace.longest_pause_seconds)

    async def _hear(self) -> None:
        """One connection, until the block ends. Raises `DatabaseUnavailable` when it is lost."""
        connection = await connect(self._options)
        ended = asyncio.Event()

        def end(_: object) -> None:
            self._lose()
            ended.set()

        connection.add_termination_listener(end)
        ending = asyncio.create_task(self._ending.wait())
        ending.add_done_callback(lambda _: ended.set())
        try:
            with translated_errors():
                for channel in CHANNELS:
                    await connection.add_listener(channel, self._take)
                await self._ask(connection)
                self._begin_hearing()
                while not await _comes(ended, self._pace.probe_seconds):
                    await self._ask(connection)
            if not self._ending.is_set():
                raise DatabaseUnavailable("The database connection was lost.")
        except (*LOST, pg.PostgresError) as error:
            raise DatabaseUnavailable("The database connection was lost.") from error
        finally:
            ending.cancel()
            await _part(connection)

    async def _ask(self, connection: Connection) -> None:
        """Raises `DatabaseUnavailable` unless it answers, and is where others write."""
        try:
            async with asyncio.timeout(self._pace.silence_seconds):
                read_only: bool = await connection.fetchval(_PROBE)
        except TimeoutError:
            # At once: a silent server would not answer a request to cancel either.
            connection.terminate()
            raise DatabaseUnavailable("The database does not answer in time.") from None
        if read_only:
            raise DatabaseUnavailable("The database has become read-only.")

    def _begin_hearing(self) -> None:
        self._heard.set()
        self._loss_told = False
        _log.info("notifications.heard")
        self._tell_missed()

    def _lose(self) -> None:
        self._heard.clear()
        self._tell_missed()

    def _tell_missed(self) -> None:
        for hooks in self._hooks.values():
            for _, missed in hooks:
                missed()

    def _take(self, _connection: object, _process_id: int, channel: str, said: object) -> None:
        for heard, _ in self._hooks[channel]:
            heard(str(said))

    def _pass_on(self, said: str) -> None:
        news = NEWS_BY_LETTER.get(said[-1:])
        for watch in self._watches.get(said[:-1], ()):
            watch.notice(news)

    def _wake_all(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.wake()


class _Watch:
    """Implements `server.conversation.notifications.Watch`."""

    def __init__(
        self, watches: "defaultdict[str, set[_Watch]]", conversation: str, news: frozenset[Notification]
    ) -> None:
        self._watches = watches
        self._conversation = conversation
        self._news = news
        self._woken = asyncio.Event()

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
        woken = await _comes(self._woken, limit_seconds)
        self._woken.clear()
        return woken

    def notice(self, news: Notification | None) -> None:
        """Something happened to the conversation."""
        if news in self._news:
            self._woken.set()

    def wake(self) -> None:
        """Something may have happened."""
        self._woken.set()


async def _comes(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event comes within so many seconds."""
    if not event.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


async def _part(connection: Connection) -> None:
    """Ends a connection in whatever state it is."""
    with suppress(OSError, pg.PostgresError, pg.InterfaceError, pg.InternalClientError):
        await connection.close(timeout=_CLOSE_SECONDS)
