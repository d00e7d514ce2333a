"""`strata replay list`, `show`, `report`, `pause`, `continue`, `cancel`, `delete`."""

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import click

from server.app.replays import ReplayParts, open_replays
from server.cli.replay_options import read_limits
from server.cli.replay_run import list_worst
from server.cli.replay_screen import failed, show_replays, show_report, show_state
from server.cli.run import begin_quietly, run
from server.conversation.audit import OPERATOR
from server.conversation.page import Page
from server.postgres.access.key_ring import PostgresKeyRing
from server.replay.rerun.export import ExportFormat, export_replay
from server.replay.rerun.json_codec import replay_to_json
from server.replay.rerun.replay import Replay

_TEXT: Final = "text"


@click.command(name="list")
@click.option("--tenant", help="Only replays of this tenant.  [all]")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one replay per line.")
def list_replays(tenant: str | None, limit: int, *, as_json: bool) -> None:
    """List replays, newest first."""

    async def work(parts: ReplayParts) -> Page[Replay]:
        tenant_id = None if tenant is None else (await PostgresKeyRing(parts.database).load_tenant(tenant)).id
        return await parts.replays.list_replays(tenant_id, limit=limit)

    found = _with_parts(work).items
    if as_json:
        for replay in found:
            click.echo(json.dumps(replay_to_json(replay)))
    elif found:
        show_replays(found)
    else:
        click.echo("There are no replays.")


@click.command()
@click.argument("replay_id", metavar="REPLAY")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(replay_id: str, *, as_json: bool) -> None:
    """Show the state, the progress and the spending of a replay."""
    replay = _with_parts(lambda parts: parts.replays.load_replay(None, replay_id))
    if as_json:
        click.echo(json.dumps(replay_to_json(replay)))
    else:
        show_state(replay)


@click.command()
@click.argument("replay_id", metavar="REPLAY")
@click.option(
    "--format",
    "form",
    type=click.Choice([_TEXT, *(form.value for form in ExportFormat)]),
    default=_TEXT,
    show_default=True,
)
def report(replay_id: str, form: str) -> None:
    """Show the report of a replay, or export all results as JSON, CSV or tests for promptfoo.

    The exit code is 1 if an assertion failed, an item failed, or the replay is not done.
    """

    async def work(parts: ReplayParts) -> bool:
        replay = await parts.replays.load_replay(None, replay_id)
        numbers = await parts.replays.report_replay(None, replay_id)
        if form == _TEXT:
            show_report(replay, numbers, await list_worst(parts, replay))
        else:
            await _write(export_replay(parts.replays, replay, ExportFormat(form)))
        return failed(replay, numbers)

    sys.exit(1 if _with_parts(work) else 0)


@click.command()
@click.argument("replay_id", metavar="REPLAY")
def pause(replay_id: str) -> None:
    """Pause a replay. Open calls are finished, and no other call is sent."""
    show_state(_with_parts(lambda parts: parts.replays.pause_replay(None, replay_id, actor=OPERATOR)))


@click.command(name="continue")
@click.argument("replay_id", metavar="REPLAY")
@click.option("--parallelism", type=click.IntRange(1), help="Conversations that run at the same time.")
@click.option("--calls-per-minute", type=click.IntRange(1), help="Over all processes together.")
@click.option("--budget-usd", type=click.FloatRange(0, min_open=True), help="Maximum cost in dollars.")
@click.option("--budget-tokens", type=click.IntRange(1), help="Maximum number of tokens.")
def continue_(replay_id: str, **changes: Any) -> None:
    """Continue a paused replay, or with a larger budget one that its budget stopped.

    Limits without an option do not change.
    """

    async def work(parts: ReplayParts) -> Replay:
        limits = None
        if given.model_fields_set:
            limits = given.merge_into((await parts.replays.load_replay(None, replay_id)).draft.limits)
        return await parts.service.continue_(None, replay_id, actor=OPERATOR, limits=limits)

    given = read_limits(changes)
    show_state(_with_parts(work))


@click.command()
@click.argument("replay_id", metavar="REPLAY")
def cancel(replay_id: str) -> None:
    """Cancel a replay. Its results are kept."""
    show_state(_with_parts(lambda parts: parts.replays.cancel_replay(None, replay_id, actor=OPERATOR)))


@click.command()
@click.argument("replay_id", metavar="REPLAY")
@click.option("--dry-run", is_flag=True, help="Only print what would be erased.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(replay_id: str, *, dry_run: bool, yes: bool) -> None:
    """Erase a replay with its results and its replay conversations. The recorded conversations are not changed."""
    if not dry_run and not yes:
        click.confirm(f"Erase {replay_id}? This cannot be undone.", abort=True)
    erased = _with_parts(lambda parts: parts.replays.erase_replay(None, replay_id, actor=OPERATOR, dry_run=dry_run))
    for table, count in erased.rows.items():
        click.echo(f"{table}: {count:,}")


def _with_parts(work: Callable[[ReplayParts], Awaitable[Any]]) -> Any:
    async def open_and_work() -> Any:
        async with open_replays(begin_quietly(), os.environ) as parts:
            return await work(parts)

    return run(open_and_work())


async def _write(parts: AsyncIterator[bytes]) -> None:
    """Write bytes, so that the line ends of CSV do not change."""
    output = sys.stdout.buffer
    async for part in parts:
        output.write(part)
    output.flush()
