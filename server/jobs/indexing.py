"""Keep the counts and texts that operators list and search up to date.

They are written by jobs and not by the turns themselves: every few seconds for new turns, and daily for all.
"""

import logging
from typing import Final

from server.jobs.job import Job
from server.postgres.engine import Database
from server.postgres.inspection.search_index import index_all, index_new

_EVERY_TEN_SECONDS: Final = "* * * * * */10"
_DAILY: Final = "29 4 * * *"
_log = logging.getLogger("strata.jobs")


def index_job(database: Database) -> Job:
    """Build the job that indexes what was added since its last run."""

    async def run(_payload: bytes) -> None:
        report = await index_new(database)
        if report.conversation_count:
            _log_report("index.counted", report.conversation_count, report.turn_count)

    return Job(name="index", run=run, cron=_EVERY_TEN_SECONDS)


def index_walk_job(database: Database) -> Job:
    """Build the job that indexes every conversation, for rows that were written with a wrong or an old date."""

    async def run(_payload: bytes) -> None:
        report = await index_all(database)
        _log_report("index.walked", report.conversation_count, report.turn_count)

    return Job(name="index_walk", run=run, cron=_DAILY)


def _log_report(event: str, conversation_count: int, turn_count: int) -> None:
    _log.info(event, extra={"conversation_count": conversation_count, "turn_count": turn_count})
