"""`strata usage`: tokens and cost of calls, by day, assistant, model or conversation."""

import csv
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from rich.markup import escape
from rich.table import Column, Table

from server.app.database import open_report_database
from server.app.settings import Settings
from server.cli.parameters import TimeParam
from server.cli.run import begin_quietly, run
from server.cli.tenants import load_tenant_id
from server.cli.terminal import one_line, open_console
from server.inspection.usage_report import DEFAULT_PERIOD, MAX_PERIOD, ROW_LIMIT, UsageBy, UsageReport, UsageRow
from server.postgres.inspection.inspector import PostgresInspector

_NUMBERS: Final = ("calls", "fresh", "cached", "written", "output", "reasoning", "cache share", "expected", "USD")


@click.command()
@click.option(
    "--by",
    type=click.Choice([by.value for by in UsageBy]),
    default="day",
    show_default=True,
    help="How to group the rows.",
)
@click.option("--from", "since", type=TimeParam(), help="Start: 2026-11-01, or 7d ago.  [30d]")
@click.option("--to", "until", type=TimeParam(), help="End, exclusive.  [now]")
@click.option("--tenant", help="Only this tenant.  [all]")
@click.option(
    "--limit", type=click.IntRange(1, ROW_LIMIT), default=100, show_default=True, help="Maximum number of rows."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
def usage(
    by: str,
    since: datetime | None,
    until: datetime | None,
    tenant: str | None,
    limit: int,
    *,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Report tokens, cost and cache share.

    Times without an offset, and days, are in UTC. Every attempt counts, and every summary of a compaction. The total
    covers all calls, also if there are more rows than --limit. Reads the database of the settings.

    \b
    Examples:
      strata usage                                   # last 30 days
      strata usage --by assistant --from 7d          # last 7 days, by assistant
      strata usage --by conversation --limit 20      # the 20 largest conversations
      strata usage --from 2026-10-01 --to 2026-11-01 --tenant acme --csv
    """  # noqa: D301  reason: click's mark for lines that stay as they are
    if as_json and as_csv:
        raise click.UsageError("Use --json or --csv, not both.")
    first, end = _read_time(since, until)
    report = run(_report(begin_quietly(), tenant, UsageBy(by), first, end, limit))
    if as_json:
        click.echo(json.dumps(_as_json(report, by, first, end)))
    elif as_csv:
        _print_csv(report)
    else:
        _print(report, by, first, end)


def _read_time(since: datetime | None, until: datetime | None) -> tuple[datetime, datetime]:
    end = until or datetime.now(UTC)
    try:
        first = since or end - DEFAULT_PERIOD
    except OverflowError:
        raise click.UsageError("--to is too early.") from None
    if not timedelta() < end - first <= MAX_PERIOD:
        raise click.UsageError(f"--from must be before --to, at most {MAX_PERIOD.days} days earlier.")
    return first, end


async def _report(
    settings: Settings, tenant: str | None, by: UsageBy, since: datetime, until: datetime, limit: int
) -> UsageReport:
    async with open_report_database(settings) as database:
        tenant_id = await load_tenant_id(database, tenant)
        return await PostgresInspector(database).report_usage(tenant_id, by, since=since, until=until, limit=limit)


def _print(report: UsageReport, by: str, since: datetime, until: datetime) -> None:
    named = by == UsageBy.ASSISTANT
    table = Table(
        # A truncated id could not be used.
        Column(by, footer="total", no_wrap=True),
        *([Column("name")] if named else []),
        *(
            Column(name, justify="right", footer=total)
            for name, total in zip(_NUMBERS, _numbers(report.total), strict=True)
        ),
        show_footer=True,
    )
    for row in report.rows:
        name = [escape(one_line(row.name or ""))] if named else []
        table.add_row(escape(one_line(row.key)), *name, *_numbers(row))
    open_console().print(table)
    click.echo(f"From {_time(since)} to {_time(until)}, UTC. Input tokens are fresh, cached or written to the cache.")
    if not report.is_complete:
        click.echo(f"The first {len(report.rows)} rows are shown. The total covers all.", err=True)
    if report.total.unpriced_count:
        click.echo(f"{report.total.unpriced_count} calls have no known price, so their sums are unknown.", err=True)


def _numbers(row: UsageRow) -> tuple[str, ...]:
    tokens = row.usage
    counts = (
        row.call_count,
        tokens.fresh_input_tokens,
        tokens.cache_read_tokens,
        tokens.cache_write_tokens,
        tokens.output_tokens,
        tokens.reasoning_tokens,
    )
    cost = "unknown" if row.cost_usd is None else f"{row.cost_usd:,.4f}"
    return (*(f"{count:,}" for count in counts), _share(row.cache_share), _share(row.expected_share), cost)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _time(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M")


_CELLS: Final[dict[str, Callable[[UsageRow], object]]] = {
    "key": lambda row: row.key,
    "name": lambda row: row.name,
    "calls": lambda row: row.call_count,
    "fresh_input_tokens": lambda row: row.usage.fresh_input_tokens,
    "cache_read_tokens": lambda row: row.usage.cache_read_tokens,
    "cache_write_tokens": lambda row: row.usage.cache_write_tokens,
    "output_tokens": lambda row: row.usage.output_tokens,
    "reasoning_tokens": lambda row: row.usage.reasoning_tokens,
    "cache_share": lambda row: row.cache_share,
    "expected_cache_tokens": lambda row: row.expected_cache_tokens,
    "cost_usd": lambda row: None if row.cost_usd is None else float(row.cost_usd),
    "unpriced_calls": lambda row: row.unpriced_count,
}
"""The columns of JSON and CSV, in this order."""


def _print_csv(report: UsageReport) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(_CELLS)
    for row in report.rows:
        cells = (read(row) for read in _CELLS.values())
        writer.writerow([_escape_formula(cell) if isinstance(cell, str) else cell for cell in cells])


def _escape_formula(text: str) -> str:
    """Escape a text that a spreadsheet would read as a formula: clients choose the names."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _as_json(report: UsageReport, by: str, since: datetime, until: datetime) -> dict[str, Any]:
    def read(row: UsageRow) -> dict[str, object]:
        return {name: cell(row) for name, cell in _CELLS.items()}

    return {
        "by": by,
        "since": since.isoformat(),
        "until": until.isoformat(),
        "data": [read(row) for row in report.rows],
        "total": read(report.total),
        "complete": report.is_complete,
    }
