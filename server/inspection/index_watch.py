"""The watch over the indexer: how far behind the turns is what operators list and search."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final, TypeAlias

from server.conversation.errors import StrataError

FindProgress: TypeAlias = Callable[[], Awaitable[tuple[datetime, datetime | None]]]
"""The database's time, and up to when turns are counted; None before the first look."""

_PAUSE_SECONDS: Final = 15.0


class IndexWatch:
    """Asks now and then, so that whoever asks for metrics need not."""

    def __init__(self, find_progress: FindProgress, *, pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._find_progress = find_progress
        self._pause_seconds = pause_seconds
        self._lag_seconds = float("nan")

    @property
    def lag_seconds(self) -> float:
        """As it was last seen; NaN where nobody can say."""
        return self._lag_seconds

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause_seconds)

    async def look(self) -> None:
        """One look."""
        try:
            now, indexed_until = await self._find_progress()
        except StrataError:
            # The server's readiness says what is wrong with the database. An old number would say that nothing is.
            self._lag_seconds = float("nan")
            return
        self._lag_seconds = float("nan") if indexed_until is None else max(0.0, (now - indexed_until).total_seconds())
