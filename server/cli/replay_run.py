"""`strata replay run`: what a candidate would have said."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Final

import click

from server.app.replays import ReplayParts, open_replays
from server.app.settings import Settings
from server.cli.parameters import TimeParam
from server.cli.replay_options import read_body
from server.cli.replay_screen import failed, show_estimate, show_report
from server.cli.run import begin_quietly, run
from server.cli.terminal import open_bar
from server.conversation.audit import OPERATOR
from server.conversation.errors import ValidationFailed
from server.conversation.payload import LayerOrder
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.compaction.candidates import find_owner
from server.replay.rerun.replay import (
    ItemState,
    OnMissingResult,
    Replay,
    ReplayDraft,
    ReplayMode,
)
from server.replay.rerun.report import ReplayReport
from server.replay.rerun.result import Outcome, ResultFilter, ResultOrder, StoredResult
from server.web.api.replay_bodies import ReplayBody

_INTERRUPTED: Final = 130
_LOOK_SECONDS: Final = 1.0
_PATIENCE: Final = 20
"""Looks without anybody at work, after which it is said."""
_WORST_SHOWN: Final = 10
_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(name="run")
@click.option("--name", help="What it is called.")
@click.option("--draft", "draft_file", type=_FILE, help="A JSON file as POST /admin/api/replays takes it.")
@click.option("--tenant", help="Whose conversations. Needed unless conversations are named.")
@click.option("--conversation", "conversations", multiple=True, metavar="CONVERSATION", help="This one; repeatable.")
@click.option("--assistant", help="Only this assistant's (asst_...).")
@click.option("--recorded-provider", help="Only those that gemini or anthropic answered.")
@click.option("--recorded-model", help="Only those that this model answered.")
@click.option("--error-code", help="Only those with this error.")
@click.option("--tool", help="Only those that called this tool.")
@click.option("--text", help="Only those with these words in one turn.")
@click.option("--from", "active_after", type=TimeParam(), help="Only those active since: 2026-11-01, or 7d ago.")
@click.option("--to", "active_before", type=TimeParam(), help="Only those active before.")
@click.option("--sample", type=click.IntRange(1), help="So many of these, drawn at random.")
@click.option("--seed", type=int, help="The same one draws the same sample.")
@click.option("--provider", help="The candidate's.")
@click.option("--model", help="The candidate's.")
@click.option("--candidate-assistant", help="Another assistant in place of each conversation's own.")
@click.option("--assistant-version", type=click.IntRange(1), help="Another version of it.")
@click.option("--setting", "settings", multiple=True, metavar="NAME=VALUE", help="Such as thinking=low; repeatable.")
@click.option("--layer-order", type=click.Choice([order.value for order in LayerOrder]))
@click.option("--template", "templates", multiple=True, type=_FILE, help="In place of the one of that name.")
@click.option("--mode", type=click.Choice([mode.value for mode in ReplayMode]), help="  [teacher_forced]")
@click.option(
    "--on-missing",
    type=click.Choice([policy.value for policy in OnMissingResult]),
    help="For a tool call that nobody has made before.  [stop]",
)
@click.option("--repetitions", type=int, help="Of each conversation.  [1]")
@click.option("--parallelism", type=int, help="Conversations at a time.  [4]")
@click.option("--calls-per-minute", type=int, help="Over all processes together.")
@click.option("--budget-usd", type=float, help="Never more dollars than this.")
@click.option("--budget-tokens", type=int, help="Never more tokens than this.")
@click.option("--assert", "assertions", multiple=True, metavar="EXPR", help="Has to hold for each answer; repeatable.")
@click.option("--assert-schema", "assertion_schemas", multiple=True, type=_FILE, help="A schema for each text.")
@click.option("--dry-run", is_flag=True, help="Only tell calls, tokens and cost.")
@click.option("--detach", is_flag=True, help="Print the id and leave it to the workers.")
@click.option("--here", is_flag=True, help="Run it in this process too. Takes the providers' keys.")
def run_replay(**options: Any) -> None:
    """Send stored conversations through a candidate and compare.

    What no option says is as it was recorded. Workers run it: a server is one, unless STRATA_WORKER_INSIDE is false,
    and `strata worker` is; --here does without them. The command waits and shows what came out; Ctrl-C leaves the
    replay running. The exit code is 1 where an assertion failed, an item failed, or it did not come to its end.

    \b
    Examples:
      strata replay run --tenant acme --from 7d --sample 200 --model gemini-3-flash-preview --dry-run
      strata replay run --tenant acme --sample 50 --setting thinking=low --budget-usd 2 --assert "similarity > 0.6"
      strata replay run --conversation conv_... --mode free_running --on-missing nearest --repetitions 5
    """  # noqa: D301  reason: click's mark for lines that stay as they are
    if options["here"] and options["detach"]:
        raise click.UsageError("--here or --detach, not both.")
    body = read_body(options)
    draft = _read_draft(body)
    made: list[Replay] = []
    try:
        outcome = run(_run(begin_quietly(), draft, {**options, "dry_run": body.dry_run}, made))
    except KeyboardInterrupt:
        if made and not options["here"]:
            click.secho(f"{made[0].id} goes on. `strata replay cancel {made[0].id}` ends it.", fg="yellow", err=True)
        elif made:
            told = f"{made[0].id} waits for a worker. `strata replay cancel {made[0].id}` ends it."
            click.secho(told, fg="yellow", err=True)
        sys.exit(_INTERRUPTED)
    if outcome is not None:
        show_report(*outcome)
        sys.exit(1 if failed(outcome[0], outcome[1]) else 0)


def _read_draft(body: ReplayBody) -> ReplayDraft:
    try:
        return body.to_draft()
    except ValidationFailed as error:
        raise click.UsageError(error.message) from error


async def _run(
    settings: Settings, draft: ReplayDraft, options: dict[str, Any], made: list[Replay]
) -> tuple[Replay, ReplayReport, list[StoredResult]] | None:
    async with open_replays(settings, os.environ) as parts:
        tenant_id = await _find_tenant(parts, draft, options["tenant"])
        if options["dry_run"]:
            show_estimate((await parts.service.plan(tenant_id, draft)).estimate)
            return None
        replay = await parts.service.create(tenant_id, draft, actor=OPERATOR)
        made.append(replay)
        if options["detach"]:
            click.echo(replay.id)
            return None
        click.echo(f"{replay.id}: {replay.item_count:,} items.", err=True)
        ended = await _attend(parts, replay, here=options["here"])
        return ended, await parts.replays.report_replay(None, replay.id), await list_worst(parts, replay)


async def _find_tenant(parts: ReplayParts, draft: ReplayDraft, tenant: str | None) -> str:
    if tenant is not None:
        return (await PostgresKeyRing(parts.database).load_tenant(tenant)).id
    ids = draft.selection.conversation_ids
    if not ids:
        raise click.UsageError("Say --tenant, or name conversations.")
    return await find_owner(parts.database, ids[0])


async def _attend(parts: ReplayParts, replay: Replay, *, here: bool) -> Replay:
    """The replay when it is over, or paused by somebody else and nothing runs any more."""
    watch = asyncio.create_task(_watch(parts, replay))
    slots = [asyncio.create_task(_work(parts, replay)) for _ in range(replay.draft.limits.parallelism if here else 0)]
    try:
        done, _ = await asyncio.wait({watch, *slots}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {watch}:
            task.result()  # a slot ends only with an error, and nobody would go on in its place
        return await watch
    finally:
        for task in (watch, *slots):
            task.cancel()
        await asyncio.gather(watch, *slots, return_exceptions=True)


async def _work(parts: ReplayParts, replay: Replay) -> None:
    """Again and again: what others gave back is taken here."""
    while True:
        await parts.items.run_all(replay.id)
        await asyncio.sleep(_LOOK_SECONDS)


async def _watch(parts: ReplayParts, replay: Replay) -> Replay:
    idle = 0
    with open_bar() as progress:
        task = progress.add_task("replaying", total=replay.item_count)
        while True:
            now = await parts.replays.load_replay(None, replay.id)
            progress.update(task, completed=now.ended_count)
            if not now.is_active:
                return now
            idle = 0 if now.item_counts[ItemState.RUNNING] else idle + 1
            if idle == _PATIENCE:
                click.secho("No worker takes anything: start `strata worker`, or use --here.", fg="yellow", err=True)
            await asyncio.sleep(_LOOK_SECONDS)


async def list_worst(parts: ReplayParts, replay: Replay) -> list[StoredResult]:
    """What differs most, as far as it differs at all."""
    page = await parts.replays.list_results(
        None, replay.id, wanted=ResultFilter(order=ResultOrder.WORST), limit=_WORST_SHOWN
    )
    return [stored for stored in page.items if stored.result.outcome in {Outcome.DIFFERENT, Outcome.FAILED}]
