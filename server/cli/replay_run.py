"""`strata replay run`: send stored conversations to a candidate and compare the answers."""

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
_POLL_SECONDS: Final = 1.0
_MAX_IDLE_POLLS: Final = 20
"""After this number of polls without a running item a hint is printed."""
_WORST_SHOWN: Final = 10
_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(name="run")
@click.option("--name", help="Name of the replay.  [From the command line]")
@click.option(
    "--draft",
    "draft_file",
    type=_FILE,
    help="JSON file with the body of POST /admin/api/replays. Options override its members.",
)
@click.option("--tenant", help="Tenant of the conversations. Required unless --conversation is given.")
@click.option(
    "--conversation",
    "conversations",
    multiple=True,
    metavar="CONVERSATION",
    help="Replay this conversation; repeatable.",
)
@click.option("--assistant", help="Only conversations of this assistant (asst_...).")
@click.option("--recorded-provider", help="Only conversations with answers of gemini or anthropic.")
@click.option("--recorded-model", help="Only conversations with answers of this model.")
@click.option("--error-code", help="Only conversations with this error code.")
@click.option("--tool", help="Only conversations with calls of this tool.")
@click.option("--text", help="Only conversations with these words in one turn.")
@click.option(
    "--from",
    "active_after",
    type=TimeParam(),
    help="Only conversations active since this time: 2026-11-01, or 7d for 7 days ago.",
)
@click.option("--to", "active_before", type=TimeParam(), help="Only conversations active before this time.")
@click.option("--sample", type=click.IntRange(1), help="Random sample of this size.")
@click.option("--seed", type=int, help="Seed of the sample. The same seed selects the same sample.  [0]")
@click.option("--provider", help="Provider of the candidate.  [as recorded]")
@click.option("--model", help="Model of the candidate.  [as recorded]")
@click.option("--candidate-assistant", help="Assistant that replaces that of each conversation.")
@click.option("--assistant-version", type=click.IntRange(1), help="Version of the assistant.  [as recorded]")
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Setting of the candidate, such as thinking=low; repeatable.",
)
@click.option(
    "--layer-order",
    type=click.Choice([order.value for order in LayerOrder]),
    help="Layer order of the candidate.  [as recorded]",
)
@click.option(
    "--template",
    "templates",
    multiple=True,
    type=_FILE,
    help="Template file that replaces the one with the same name; repeatable.",
)
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in ReplayMode]),
    help="History of the candidate: recorded answers, or its own.  [teacher_forced]",
)
@click.option(
    "--on-missing",
    type=click.Choice([policy.value for policy in OnMissingResult]),
    help="Result of a tool call that was not recorded.  [stop]",
)
@click.option("--repetitions", type=int, help="Repetitions of each conversation.  [1]")
@click.option("--parallelism", type=int, help="Conversations that run at the same time.  [4]")
@click.option("--calls-per-minute", type=int, help="Maximum number of calls per minute, over all processes together.")
@click.option("--budget-usd", type=float, help="Maximum cost in dollars.")
@click.option("--budget-tokens", type=int, help="Maximum number of tokens.")
@click.option("--assert", "assertions", multiple=True, metavar="EXPR", help="Assertion about each answer; repeatable.")
@click.option(
    "--assert-schema",
    "assertion_schemas",
    multiple=True,
    type=_FILE,
    help="JSON schema for the text of each answer; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Only print the estimated calls, tokens and cost.")
@click.option("--detach", is_flag=True, help="Print the id and exit. Workers run the replay.")
@click.option("--here", is_flag=True, help="Also run items in this process, which needs the provider keys.")
def run_replay(**options: Any) -> None:
    """Send stored conversations to a candidate and compare the answers with the recorded ones.

    Values without an option are as recorded. The replay is run by workers: servers, unless STRATA_WORKER_INSIDE is
    false, and `strata worker`. With --here this process runs items too. The command waits until the replay has ended
    and prints the report. After Ctrl-C the replay continues. The exit code is 1 if an assertion failed, an item failed,
    or the replay did not finish.

    \b
    Examples:
      strata replay run --tenant acme --from 7d --sample 200 --model gemini-3-flash-preview --dry-run
      strata replay run --tenant acme --sample 50 --setting thinking=low --budget-usd 2 --assert "similarity > 0.6"
      strata replay run --conversation conv_... --mode free_running --on-missing nearest --repetitions 5
    """  # noqa: D301  reason: click's mark for lines that stay as they are
    if options["here"] and options["detach"]:
        raise click.UsageError("Use --here or --detach, not both.")
    body = read_body(options)
    draft = _read_draft(body)
    made: list[Replay] = []
    try:
        outcome = run(_run(begin_quietly(), draft, {**options, "dry_run": body.dry_run}, made))
    except KeyboardInterrupt:
        if made and not options["here"]:
            click.secho(f"{made[0].id} continues. `strata replay cancel {made[0].id}` ends it.", fg="yellow", err=True)
        elif made:
            text = f"{made[0].id} waits for a worker. `strata replay cancel {made[0].id}` ends it."
            click.secho(text, fg="yellow", err=True)
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
        ended = await _wait_until_ended(parts, replay, here=options["here"])
        return ended, await parts.replays.report_replay(None, replay.id), await list_worst(parts, replay)


async def _find_tenant(parts: ReplayParts, draft: ReplayDraft, tenant: str | None) -> str:
    if tenant is not None:
        return (await PostgresKeyRing(parts.database).load_tenant(tenant)).id
    ids = draft.selection.conversation_ids
    if not ids:
        raise click.UsageError("Either --tenant or --conversation is required.")
    return await find_owner(parts.database, ids[0])


async def _wait_until_ended(parts: ReplayParts, replay: Replay, *, here: bool) -> Replay:
    """Wait until the replay has ended, or is paused and no item of it runs, and return it."""
    watch = asyncio.create_task(_watch(parts, replay))
    slots = [asyncio.create_task(_work(parts, replay)) for _ in range(replay.draft.limits.parallelism if here else 0)]
    try:
        done, _ = await asyncio.wait({watch, *slots}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {watch}:
            task.result()  # a slot ends only with an error, and no other slot replaces it
        return await watch
    finally:
        for task in (watch, *slots):
            task.cancel()
        await asyncio.gather(watch, *slots, return_exceptions=True)


async def _work(parts: ReplayParts, replay: Replay) -> None:
    """Run items until cancelled, including those that other processes release."""
    while True:
        await parts.items.run_all(replay.id)
        await asyncio.sleep(_POLL_SECONDS)


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
            if idle == _MAX_IDLE_POLLS:
                click.secho("No worker runs the replay. Start `strata worker`, or use --here.", fg="yellow", err=True)
            await asyncio.sleep(_POLL_SECONDS)


async def list_worst(parts: ReplayParts, replay: Replay) -> list[StoredResult]:
    """List the results that differ most."""
    page = await parts.replays.list_results(
        None, replay.id, wanted=ResultFilter(order=ResultOrder.WORST), limit=_WORST_SHOWN
    )
    return [stored for stored in page.items if stored.result.outcome in {Outcome.DIFFERENT, Outcome.FAILED}]
