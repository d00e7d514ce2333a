"""`strata jobs`: the state of the job queue, and recent failures."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.markup import escape
from rich.table import Column, Table

from server.app.database import open_database
from server.app.settings import Settings
from server.cli.run import begin_quietly, run
from server.cli.tenants import load_tenant_id
from server.cli.terminal import one_line, open_console
from server.inspection.jobs import FAILURE_HOURS, JobStatus
from server.postgres.inspection.inspector import PostgresInspector

_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR


@click.command()
@click.option("--tenant", help="Only jobs of this tenant.  [all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per job name.")
def jobs(tenant: str | None, *, as_json: bool) -> None:
    """Show how many jobs are waiting, running, scheduled for later, and failed recently.

    If jobs wait for a long time, no worker is running, or too few are. A server runs jobs itself unless
    STRATA_WORKER_INSIDE is false; `strata worker` runs only jobs. The command reads the database of the settings.
    """
    statuses = run(_report(begin_quietly(), tenant))
    if as_json:
        for status in statuses:
            click.echo(json.dumps(_as_json(status)))
    elif statuses:
        _print(statuses)
    else:
        click.echo("The queue is empty, and no job failed recently.")


async def _report(settings: Settings, tenant: str | None) -> Sequence[JobStatus]:
    async with open_database(settings) as database:
        tenant_id = await load_tenant_id(database, tenant)
        return await PostgresInspector(database).report_jobs(tenant_id)


def _print(statuses: Sequence[JobStatus]) -> None:
    now = datetime.now(UTC)
    table = Table(
        Column("job", no_wrap=True),
        *(Column(name, justify="right") for name in ("waiting", "oldest", "running", "later", "postponed", "failed")),
        "last error",
    )
    for status in statuses:
        table.add_row(
            escape(one_line(status.name)),
            f"{status.waiting_count:,}",
            _age(status.oldest_waiting_at, now),
            f"{status.running_count:,}",
            f"{status.later_count:,}",
            f"{status.postponed_count:,}",
            f"{status.failed_count:,}",
            _error(status, now),
        )
    open_console().print(table)
    click.echo(f"Failures are those of the last {FAILURE_HOURS} hours. The log of the worker has the details.")


def _error(status: JobStatus, now: datetime) -> str:
    if status.last_error is None:
        return ""
    return f"{escape(one_line(status.last_error))}, {_age(status.last_error_at, now)} ago"


def _age(since: datetime | None, now: datetime) -> str:
    """Render an age as a whole number of days, hours, minutes or seconds."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "m")):
        if seconds >= unit:
            return f"{seconds // unit}{name}"
    return f"{seconds}s"


def _as_json(status: JobStatus) -> dict[str, Any]:
    return {
        "name": status.name,
        "waiting": status.waiting_count,
        "running": status.running_count,
        "later": status.later_count,
        "postponed": status.postponed_count,
        "failed": status.failed_count,
        "oldest_waiting_at": _time(status.oldest_waiting_at),
        "last_error": status.last_error,
        "last_error_at": _time(status.last_error_at),
    }


def _time(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat()
