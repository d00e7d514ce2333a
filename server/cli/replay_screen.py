"""Replays on the terminal: the estimate, the list, the state and the report."""

from collections.abc import Sequence
from decimal import Decimal

import click
from rich.markup import escape
from rich.table import Column, Table

from server.cli.terminal import one_line, open_console
from server.replay.rerun.figures import describe_measure, describe_unpriced, format_value, list_estimate_notes
from server.replay.rerun.replay import ItemState, Replay, ReplayEstimate, ReplayState
from server.replay.rerun.report import Measure, Measured, ReplayReport
from server.replay.rerun.result import StoredResult


def show_estimate(estimate: ReplayEstimate) -> None:
    """Print the estimate of a replay."""
    click.echo(f"{estimate.item_count:,} items of {estimate.conversation_count:,} conversations.")
    click.echo(f"{estimate.call_count:,} calls.")
    click.echo(f"{estimate.input_tokens:,} input and {estimate.output_tokens:,} output tokens.")
    if estimate.cost_usd is None:
        click.echo("The price of the candidate's model is not known.")
    else:
        click.echo(
            f"{_usd(estimate.cost_usd)} with the recorded cache reads, "
            f"{_usd(estimate.uncached_cost_usd)} without cache reads."
        )
    for note in list_estimate_notes(estimate):
        click.echo(note)


def show_replays(replays: Sequence[Replay]) -> None:
    """Print a table of replays."""
    table = Table(
        Column("replay", no_wrap=True),
        "name",
        "state",
        *(Column(name, justify="right") for name in ("items", "done", "failed", "spent")),
        "created",
    )
    for replay in replays:
        table.add_row(
            replay.id,
            escape(one_line(replay.draft.name)),
            replay.state.value,
            f"{replay.item_count:,}",
            f"{replay.item_counts[ItemState.DONE]:,}",
            f"{replay.item_counts[ItemState.FAILED]:,}",
            _usd(replay.spent_usd),
            replay.created_at.strftime("%Y-%m-%d %H:%M"),
        )
    open_console().print(table)


def show_state(replay: Replay) -> None:
    """Print the state of a replay, its items and its spending."""
    counts = ", ".join(f"{count:,} {state}" for state, count in replay.item_counts.items() if count)
    click.echo(f"{replay.id} {one_line(replay.draft.name)}: {replay.state.value}.")
    click.echo(f"Items: {counts or 'none'}. Spent: {_usd(replay.spent_usd)}, {replay.spent_tokens:,} tokens.")
    if replay.unpriced_count:
        click.echo(describe_unpriced(replay.unpriced_count))


def show_report(replay: Replay, report: ReplayReport, worst: Sequence[StoredResult]) -> None:
    """Print the state, the numbers, the assertions and the worst results of a replay."""
    show_state(replay)
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.items() if count)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items() if count)
    click.echo(f"Answers: {outcomes or 'none'}.{f' Differences: {kinds}.' if kinds else ''}")
    if report.same_share is not None:
        interval = report.same_interval
        range_ = "" if interval is None else f" (95 % interval {interval.low:.1%} to {interval.high:.1%})"
        click.echo(f"Same: {report.same_share:.1%} of the compared answers{range_}.")
    if report.measures:
        _show_measures(report.measures)
    for count in report.assertions:
        colour = "red" if count.failed else "green"
        click.secho(f"assert {one_line(count.name)}: {count.passed:,} passed, {count.failed:,} failed", fg=colour)
    if worst:
        _show_worst(worst)


def failed(replay: Replay, report: ReplayReport) -> bool:
    """Return whether the replay did not end as done, an item failed, or an assertion failed: the exit code is 1."""
    is_incomplete = replay.state is not ReplayState.DONE or replay.item_counts[ItemState.FAILED] > 0
    return is_incomplete or report.failed_assertion_count > 0


def _show_measures(measures: Sequence[Measured]) -> None:
    names = ("mean", "95 % interval", "5 %", "median", "95 %")
    table = Table("measure", "side", *(Column(name, justify="right") for name in names))
    for measured in measures:
        for row in describe_measure(measured):
            cells = row.mean, row.interval, row.low, row.median, row.high
            table.add_row(measured.measure.value, row.side.value, *cells)
    open_console().print(table)


def _show_worst(worst: Sequence[StoredResult]) -> None:
    table = Table(
        Column("item", justify="right"), Column("conversation", no_wrap=True), Column("turn", justify="right"),
        "outcome", "differs in", Column("similarity", justify="right"),
    )  # fmt: skip
    for stored in worst:
        result = stored.result
        table.add_row(
            str(stored.number),
            stored.conversation_id,
            "" if result.source_seq is None else str(result.source_seq),
            result.outcome.value,
            ", ".join(result.kinds) or result.note or "",
            "" if result.similarity is None else format_value(Measure.SIMILARITY, result.similarity),
        )
    open_console().print(table)


def _usd(amount: Decimal | None) -> str:
    return "unknown" if amount is None else f"${amount:,.4f}"
