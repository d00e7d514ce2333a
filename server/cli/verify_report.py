"""The report of `strata replay verify`, in the terminal and as JSON."""

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
    """Print counts and mismatches."""
    counts, mismatches = state.verified.counts, state.verified.mismatches
    console = open_console()
    table = Table(Column("", no_wrap=True), Column("calls", justify="right", no_wrap=True), box=None, pad_edge=False)
    for name, count in _lines(counts):
        table.add_row(name, f"{count:,}")
    console.print(table)
    for mismatch in mismatches:
        console.print(_describe(mismatch), soft_wrap=True)
    if counts.mismatch_count > len(mismatches):
        click.echo(f"… and {counts.mismatch_count - len(mismatches):,} more. See --limit-mismatches.")
    for provider, count in sorted(counts.unknown_providers.items()):
        click.secho(f"{count:,} calls went to {provider!r}, which this release does not support.", fg="yellow")
    if not counts.call_count and not counts.mismatch_count:
        click.secho("No stored call matches the options; nothing was compared.", fg="yellow")
        return
    speed = counts.call_count / state.seconds if state.seconds else 0.0
    plural = "" if counts.mismatch_count == 1 else "es"
    verdict = f"{counts.mismatch_count:,} mismatch{plural}" if counts.mismatch_count else "No mismatch"
    click.secho(
        f"{verdict} in {counts.call_count:,} calls of {counts.conversation_count:,} conversations: "
        f"{state.seconds:.1f} s, {speed:,.0f} calls per second.",
        fg="red" if counts.mismatch_count else "green",
    )


def write_report(file: Path, state: VerifyState) -> None:
    """Write the report as JSON. Raises `CannotWrite`."""
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
    """Return the rows of the table. The first three are always shown, the others only if they are not 0."""
    usual = [
        ("verified", counts.call_count),
        ("answers compared", counts.answer_count),
        ("requests compared", counts.request_count),
    ]
    unusual = [
        ("without raw bytes, removed by retention", counts.without_bytes_count),
        ("still running, without an answer", counts.running_count),
        ("of unknown providers", counts.unknown_count),
    ]
    return [*usual, *((name, count) for name, count in unusual if count)]


def _describe(mismatch: Mismatch) -> Text:
    """Describe where a mismatch is, and both values below each other. Texts of a model are shown as ASCII JSON."""
    text = Text()
    text.append(mismatch.conversation_id, style="bold")
    if mismatch.turn_seq is not None:
        what = (
            f" turn {mismatch.turn_seq}" if mismatch.turn_seq > 0 else f" background call of epoch {-mismatch.turn_seq}"
        )
        text.append(f"{what} attempt {mismatch.attempt}")
    text.append(f"  {mismatch.subject}", style="red")
    text.append(f"  {mismatch.position}\n  {mismatch.note}")
    for name, value in (("stored", mismatch.stored), ("found ", mismatch.found)):
        if value is not None:
            text.append(f"\n  {name} {value}")
    return text
