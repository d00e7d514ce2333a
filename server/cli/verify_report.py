"""What `strata replay verify` says in the end, to people and to programs."""

import json
from pathlib import Path

import click
from rich.table import Column, Table
from rich.text import Text

from server import __version__
from server.cli.terminal import open_console
from server.cli.verify_state import CannotWrite, VerifyState
from server.replay.verify.verification import Counts, Mismatch, verified_to_json


def show_report(state: VerifyState) -> None:
    """Counts and mismatches on standard output."""
    counts, mismatches = state.verified.counts, state.verified.mismatches
    console = open_console()
    table = Table(Column("", no_wrap=True), Column("calls", justify="right", no_wrap=True), box=None, pad_edge=False)
    for name, count in _lines(counts):
        table.add_row(name, f"{count:,}")
    console.print(table)
    for mismatch in mismatches:
        console.print(_describe(mismatch), soft_wrap=True)
    if counts.mismatch_count > len(mismatches):
        click.echo(f"… and {counts.mismatch_count - len(mismatches):,} more: see --limit-mismatches.")
    for provider, count in sorted(counts.unknown_providers.items()):
        click.secho(f"{count:,} calls went to {provider!r}, which this release does not know.", fg="yellow")
    if not counts.call_count and not counts.mismatch_count:
        click.secho("No stored call fits the choice: there was nothing to compare.", fg="yellow")
        return
    speed = counts.call_count / state.seconds if state.seconds else 0.0
    plural = "" if counts.mismatch_count == 1 else "es"
    verdict = f"{counts.mismatch_count:,} mismatch{plural}" if counts.mismatch_count else "No mismatch"
    click.secho(
        f"{verdict} in {counts.call_count:,} calls of {counts.conversation_count:,} conversations: "
        f"{state.seconds:.1f} s, {speed:,.0f} calls a second.",
        fg="red" if counts.mismatch_count else "green",
    )


def write_report(file: Path, state: VerifyState) -> None:
    """The same as JSON."""
    choice = state.choice
    report = {
        "release": __version__,
        "selection": {
            "tenant_id": choice.tenant_id,
            "assistant_id": choice.assistant_id,
            "provider": choice.calls.provider,
            "model": choice.calls.model,
            "started_after": choice.calls.started_after,
            "started_before": choice.calls.started_before,
            "conversation_ids": state.named,
        },
        "requests": state.requests,
        "answers": state.answers,
        "seconds": round(state.seconds, 3),
        **verified_to_json(state.verified),
    }
    try:
        file.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise CannotWrite(file, error) from error


def _lines(counts: Counts) -> list[tuple[str, int]]:
    """The first three always; what is unusual only where there is any."""
    usual = [
        ("looked at", counts.call_count),
        ("answers compared", counts.answer_count),
        ("requests compared", counts.request_count),
    ]
    unusual = [
        ("without raw bytes, which retention has removed", counts.without_bytes_count),
        ("not ended: no answer to compare", counts.running_count),
        ("of unknown providers", counts.unknown_count),
    ]
    return [*usual, *((name, count) for name, count in unusual if count)]


def _describe(mismatch: Mismatch) -> Text:
    """Where it is, what is wrong, and both sides under each other. What a model said is shown as JSON, in ASCII."""
    text = Text()
    text.append(mismatch.conversation_id, style="bold")
    if mismatch.turn_seq is not None:
        what = f" turn {mismatch.turn_seq}" if mismatch.turn_seq > 0 else f" epoch {-mismatch.turn_seq}, no turn's"
        text.append(f"{what} attempt {mismatch.attempt}")
    text.append(f"  {mismatch.subject}", style="red")
    text.append(f"  {mismatch.position}\n  {mismatch.note}")
    for name, value in (("stored", mismatch.stored), ("found ", mismatch.found)):
        if value is not None:
            text.append(f"\n  {name} {value}")
    return text
