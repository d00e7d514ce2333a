"""Values of the database that are polled in the background, so that metrics can be read without a query."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from server.conversation.errors import StrataError
from server.inspection.job_report import JobStatus

_PAUSE_SECONDS: Final = 15.0

Value = TypeVar("Value")


class Watch(Generic[Value]):
    """Polls one value. It is None if the database did not answer the last time: an old value would be wrong."""

    def __init__(
        self,
        load: Callable[[], Awaitable[Value]],
        publish: Callable[[Value | None], None] | None = None,
        *,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        """`publish` is called after each poll."""
        self.value: Value | None = None
        self._load = load
        self._publish = publish
        self._pause_seconds = pause_seconds

    async def run(self) -> None:
        """Poll until cancelled, for the first time after a pause."""
        while True:
            await asyncio.sleep(self._pause_seconds)
            await self.poll()

    async def poll(self) -> None:
        """Load the value once."""
        try:
            self.value = await self._load()
        except StrataError:
            self.value = None
        if self._publish is not None:
            self._publish(self.value)


async def report_all_jobs(
    report_jobs: Callable[[str | None], Awaitable[Sequence[JobStatus]]], names: Sequence[str]
) -> Sequence[JobStatus]:
    """Report the jobs of all tenants, including the names that have none. `report_jobs` is that of an inspector."""
    found = await report_jobs(None)
    known = {status.name for status in found}
    return [*found, *(JobStatus(name=name) for name in names if name not in known)]
