"""Indexing: what operators list and search is counted behind the turns, every few seconds, and walked through daily."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from server.jobs.job import Job

Index: TypeAlias = Callable[[], Awaitable[tuple[int, int]]]
"""Counts what is new. How many conversations and turns."""

NAME: Final = "index"
WALK_NAME: Final = "index_walk"
_EVERY_FEW_SECONDS: Final = "* * * * * */10"
_DAILY: Final = "29 4 * * *"
_log = logging.getLogger("strata.jobs")


def index_job(index: Index) -> Job:
    """Counts what came since the last time."""
    return _build(NAME, index, _EVERY_FEW_SECONDS, "index.counted")


def index_walk_job(walk: Index) -> Job:
    """Looks at every conversation, for what came with an old date or under a clock that was wrong."""
    return _build(WALK_NAME, walk, _DAILY, "index.walked")


def _build(name: str, index: Index, cron: str, event: str) -> Job:
    async def run(_payload: bytes) -> None:
        conversation_count, turn_count = await index()
        if conversation_count or name == WALK_NAME:
            _log.info(event, extra={"conversation_count": conversation_count, "turn_count": turn_count})

    return Job(name=name, run=run, cron=cron)
