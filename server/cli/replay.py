"""`strata replay`: the group of commands, and `strata replay verify`."""

import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from server.app.database import open_report_database
from server.app.settings import Settings
from server.cli.parameters import TimeParam
from server.cli.replay_run import run_replay
from server.cli.replay_runs import cancel, continue_, delete, list_replays, pause, report, show
from server.cli.run import begin_quietly, run
from server.cli.terminal import report_progress
from server.cli.verify_report import show_report, write_report
from server.cli.verify_run import RunOptions, draw_sample, measure_run, run_verification
from server.cli.verify_state import CannotWrite, VerifyState, load_state
from server.conversation.errors import ConversationNotFound
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.replay.conversation_choice import ConversationChoice, find_last_id, find_mark, find_named
from server.replay.verify.recorded_calls import CallFilter

_STATE_NAME: Final = "replay-verify.json"
_INTERRUPTED: Final = 130
_RESUME_OPTIONS: Final = frozenset({"workers", "limit_mismatches", "json_file", "resume", "state_file"})
"""Options that can be combined with --resume. The others are those of the stopped run."""


@click.group()
def replay() -> None:
    """Verify stored conversations, or send them to another model or prompt.

    `verify` checks offline that this release reads every stored answer and rebuilds every request. `run` compares the
    answers of a candidate with the recorded ones. Both use the database of the settings, while servers run.
    """


replay.add_command(run_replay)
for _command in (list_replays, show, report, pause, continue_, cancel, delete):
    replay.add_command(_command)


@replay.command()
@click.option(
    "--conversation",
    "conversations",
    multiple=True,
    metavar="CONVERSATION",
    help="Verify this conversation; repeatable.",
)
@click.option("--tenant", help="Only conversations of this tenant.  [all]")
@click.option("--assistant", help="Only conversations of this assistant (asst_...).")
@click.option("--provider", help="Only calls to gemini or anthropic.")
@click.option("--model", help="Only calls to this model.")
@click.option(
    "--from", "started_after", type=TimeParam(), help="Only calls since this time: 2026-11-01, or 7d for 7 days ago."
)
@click.option("--to", "started_before", type=TimeParam(), help="Only calls before this time.")
@click.option("--sample", type=click.IntRange(1), help="Random sample of this number of conversations.")
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Seed of the sample. The same seed selects the same sample."
)
@click.option("--no-requests", is_flag=True, help="Do not rebuild requests.")
@click.option("--no-answers", is_flag=True, help="Do not parse raw bytes.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Number of processes.  [one per core]")
@click.option(
    "--limit-mismatches",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Maximum number of reported mismatches. All are counted.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a JSON report to this file.",
)
@click.option("--resume", is_flag=True, help="Continue the run that was stopped.")
@click.option(
    "--state",
    "state_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the progress of the run.  [replay-verify.json in the data directory]",
)
@click.pass_context
def verify(ctx: click.Context, /, **options: Any) -> None:
    """Parse every stored answer again from its raw bytes, rebuild every request, and compare both with the store.

    No provider is called, and nothing is written to the database, so a standby or a restored backup is sufficient. The
    exit code is 1 if there is a mismatch. Each mismatch is reported with its first difference.

    --resume continues a run that was stopped, by Ctrl-C or otherwise. Its counts cover the whole run. A run covers the
    conversations that existed when it began.

    \b
    Examples:
      strata replay verify
      strata replay verify --tenant acme --from 7d --json report.json
      strata replay verify --sample 500 --seed 7
      strata replay verify --resume
    """  # noqa: D301  reason: click's mark for lines that stay as they are
    if options["resume"]:
        given = [name for name in options if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
        if not _RESUME_OPTIONS.issuperset(given):
            raise click.UsageError(
                "--resume continues with the options of the stopped run and cannot be combined with other selections."
            )
    if options["conversations"] and options["sample"]:
        raise click.UsageError("Use --conversation or --sample, not both.")
    if options["no_requests"] and options["no_answers"]:
        raise click.UsageError("--no-requests and --no-answers leave nothing to compare.")
    settings = begin_quietly()
    file: Path = options["state_file"] or settings.data_dir / _STATE_NAME
    if file.exists() and not options["resume"]:
        click.secho(f"The stopped run of {file} is discarded, and the file is overwritten.", fg="yellow", err=True)
    try:
        state = run(_verify(settings, file, options))
    except KeyboardInterrupt:
        click.secho(f"Stopped. --resume continues the run. Its progress is stored in {file}.", fg="yellow", err=True)
        sys.exit(_INTERRUPTED)
    if options["json_file"] is not None:
        write_report(options["json_file"], state)
    show_report(state)
    file.unlink(missing_ok=True)
    sys.exit(1 if state.verified.counts.mismatch_count else 0)


async def _verify(settings: Settings, file: Path, options: dict[str, Any]) -> VerifyState:
    async with open_report_database(settings) as database:
        state = await _resume(database, file) if options["resume"] else await _begin(database, options)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if options["json_file"] is not None:
                # A report that cannot be written must fail now, not after hours of work.
                options["json_file"].touch()
        except OSError as error:
            raise CannotWrite(Path(error.filename), error) from error
        total = await measure_run(database, state)
        with report_progress("turns verified", total=total, completed=state.turns_passed) as advance:
            run_options = RunOptions(
                workers=options["workers"] or _count_cores(),
                mismatch_limit=options["limit_mismatches"],
                file=file,
                on_turns=advance,
            )
            return await run_verification(database, settings, state, run_options)


async def _resume(database: Database, file: Path) -> VerifyState:
    """Load the stopped run. Raises `UsageError` if it belongs to another database."""
    state = load_state(file)
    if state.database_mark != await find_mark(database):
        raise click.UsageError(f"{file} belongs to a run on another database.")
    return state


async def _begin(database: Database, options: dict[str, Any]) -> VerifyState:
    """Build the state of a new run."""
    tenant = options["tenant"]
    after: datetime | None = options["started_after"]
    before: datetime | None = options["started_before"]
    choice = ConversationChoice(
        tenant_id=None if tenant is None else (await PostgresKeyRing(database).load_tenant(tenant)).id,
        assistant_id=options["assistant"],
        calls=CallFilter(
            provider=options["provider"], model=options["model"], started_after=after, started_before=before
        ),
        last_id=await find_last_id(database),
    )
    state = VerifyState(
        database_mark=await find_mark(database),
        choice=choice,
        requests=not options["no_requests"],
        answers=not options["no_answers"],
    )
    if options["conversations"]:
        return replace(state, named=await _name(database, choice, options["conversations"]))
    if options["sample"]:
        return replace(state, named=await draw_sample(database, state, options["sample"], options["seed"]))
    return state


async def _name(database: Database, choice: ConversationChoice, named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named conversations. Raises `ConversationNotFound` if one of them does not exist."""
    found = [chosen.id for chosen in await find_named(database, named, tenant_id=choice.tenant_id)]
    missing = sorted(set(named) - set(found))
    if missing:
        raise ConversationNotFound(f"There is no conversation {missing[0]}.")
    return tuple(found)


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
