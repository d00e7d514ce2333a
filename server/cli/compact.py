"""`strata compact`: compact conversations, estimate what that would save, and undo compactions."""

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import click
from rich.table import Column, Table

from server.app.services import open_command_services
from server.app.settings import Settings
from server.cli.parameters import Span
from server.cli.run import begin_quietly, run
from server.cli.tenants import load_tenant_id
from server.cli.terminal import open_bar, open_console
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.audit import OPERATOR
from server.conversation.errors import DatabaseUnavailable, StrataError
from server.inspection.actions import Audit, CompactionActions
from server.postgres.compaction.candidates import CompactionFilter, count_candidates, find_owner, list_candidates
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog

_MAX_ROWS: Final = 200
"""Maximum number of rows in the table. The total covers all conversations, and `--json` lists all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompactOptions:
    """The options of the command."""

    conversation_ids: Sequence[str]
    tenant: str | None
    assistant: str | None
    idle: timedelta | None
    dry_run: bool
    force: bool
    undo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A conversation that could not be compacted."""

    conversation_id: str
    error: StrataError


@click.command()
@click.argument("conversation_ids", nargs=-1, metavar="[CONVERSATION]...")
@click.option("--all", "everything", is_flag=True, help="Compact all conversations that match the options below.")
@click.option("--tenant", help="With --all: only this tenant.")
@click.option("--assistant", help="With --all: only this assistant (asst_...).")
@click.option("--older-than", "idle", type=Span(), help="With --all: only if idle for longer (30m, 12h, 7d, 4w).")
@click.option("--force", is_flag=True, help="Move everything that can be moved, regardless of the policy.")
@click.option("--dry-run", is_flag=True, help="Change nothing; print what compaction would save.")
@click.option("--undo", is_flag=True, help="Undo the latest compaction of each conversation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per conversation.")
def compact(  # noqa: PLR0913  reason: one parameter per option
    conversation_ids: tuple[str, ...],
    tenant: str | None,
    assistant: str | None,
    idle: timedelta | None,
    *,
    everything: bool,
    force: bool,
    dry_run: bool,
    undo: bool,
    as_json: bool,
) -> None:
    """Compact conversations by their ids, or all that match with --all.

    Old exchanges move from the buffer to the history at the end of the static layer, if the assistant's policy expects
    that to save money. Servers and workers do this automatically. This command does it now, estimates what it would
    save, or undoes it. It uses the database of the settings; servers can keep running.
    """
    _check(conversation_ids, everything=everything, filtered=bool(tenant or assistant or idle))
    if undo and (everything or dry_run or force):
        raise click.UsageError("--undo needs conversation ids, and excludes --all, --dry-run and --force.")
    options = _CompactOptions(
        conversation_ids=conversation_ids,
        tenant=tenant,
        assistant=assistant,
        idle=idle,
        dry_run=dry_run,
        force=force,
        undo=undo,
    )
    reports, failures = run(_compact(begin_quietly(), options))
    if as_json:
        for report in reports:
            click.echo(json.dumps(_as_json(report)))
    else:
        _print(reports, dry_run=dry_run)
    for failure in failures:
        click.secho(f"{failure.conversation_id}: {failure.error} [{failure.error.code}]", fg="red", err=True)
    if failures:
        sys.exit(1)


def _check(conversation_ids: Sequence[str], *, everything: bool, filtered: bool) -> None:
    if everything == bool(conversation_ids):
        raise click.UsageError("Give either conversation ids or --all.")
    if filtered and not everything:
        raise click.UsageError("--tenant, --assistant and --older-than require --all.")


async def _compact(settings: Settings, options: _CompactOptions) -> tuple[list[CompactionReport], list[_Failure]]:
    reports: list[CompactionReport] = []
    failures: list[_Failure] = []
    async with open_command_services(settings, os.environ) as services:
        database, compactor = services.database, services.compactor
        wanted = await _read_filter(database, options)
        audit_log = PostgresAuditLog(database)
        total = len(options.conversation_ids) or await count_candidates(database, wanted)
        with open_bar() as progress:
            task = progress.add_task("compacting" if not options.undo else "undoing", total=total)
            async for tenant_id, conversation_id in _list_conversations(database, options, wanted):
                try:
                    owner = tenant_id or await find_owner(database, conversation_id)
                    audit = Audit(log=audit_log, tenant_id=owner, actor=OPERATOR)
                    actions = CompactionActions(tenant_id=owner, audit=audit, compactor=compactor)
                    reports.append(await _compact_one(actions, options, conversation_id))
                except StrataError as error:
                    # The error of a single conversation ends the command. With several, the others are still compacted.
                    if total == 1 or isinstance(error, DatabaseUnavailable):
                        raise
                    failures.append(_Failure(conversation_id=conversation_id, error=error))
                progress.advance(task)
    return reports, failures


async def _compact_one(actions: CompactionActions, options: _CompactOptions, conversation_id: str) -> CompactionReport:
    if options.undo:
        return await actions.undo_compaction(conversation_id)
    return await actions.compact(conversation_id, force=options.force, dry_run=options.dry_run)


async def _read_filter(database: Database, options: _CompactOptions) -> CompactionFilter:
    return CompactionFilter(
        tenant_id=await load_tenant_id(database, options.tenant),
        assistant_id=options.assistant,
        idle_since=None if options.idle is None else datetime.now(UTC) - options.idle,
    )


async def _list_conversations(
    database: Database, options: _CompactOptions, wanted: CompactionFilter
) -> AsyncIterator[tuple[str | None, str]]:
    """Yield the ids of tenants and conversations. The tenant of a conversation that was named is None."""
    if not options.conversation_ids:
        async for found in list_candidates(database, wanted):
            yield found
    for conversation_id in options.conversation_ids:
        yield None, conversation_id


def _print(reports: Sequence[CompactionReport], *, dry_run: bool) -> None:
    changed = [report for report in reports if report.outcome is not CompactionOutcome.UNCHANGED]
    shown = changed if len(reports) > 1 else reports
    if shown:
        table = Table(
            Column("conversation", no_wrap=True),
            "outcome",
            "reason",
            "turns",
            *(Column(name, justify="right") for name in ("tokens", "as history", "saves per call", "USD per call")),
        )
        for report in shown[:_MAX_ROWS]:
            table.add_row(*_row(report))
        open_console().print(table)
    saved = sum((report.saved_usd_per_call or Decimal(0) for report in changed), Decimal(0))
    verb = "would change" if dry_run else "changed"
    click.echo(
        f"{len(changed)} of {len(reports)} conversations {verb}. One call to each of them costs {saved:.6f} USD less."
    )


def _row(report: CompactionReport) -> tuple[str, ...]:
    usd = report.saved_usd_per_call
    return (
        report.conversation_id,
        report.outcome.value,
        report.reason,
        "" if report.first_seq is None else f"{report.first_seq}-{report.last_seq}",
        str(report.moved_tokens),
        str(report.segment_tokens),
        f"{report.saved_tokens_per_call:.0f}",
        "" if usd is None else f"{usd:.6f}",
    )


def _as_json(report: CompactionReport) -> dict[str, Any]:
    usd = report.saved_usd_per_call
    return {
        "conversation_id": report.conversation_id,
        "outcome": report.outcome.value,
        "reason": report.reason,
        "dry_run": report.is_dry_run,
        "epoch": report.epoch,
        "first_seq": report.first_seq,
        "last_seq": report.last_seq,
        "moved_tokens": report.moved_tokens,
        "segment_tokens": report.segment_tokens,
        "request_tokens": report.request_tokens,
        "saved_tokens_per_call": round(report.saved_tokens_per_call, 1),
        "saved_usd_per_call": None if usd is None else float(usd),
        "blocked": report.is_blocked,
    }
