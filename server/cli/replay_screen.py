"""Replays on a terminal: what they would come to, how far they are, what came out."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

import click
from rich.markup import escape
from rich.table import Column, Table

from server.cli.chat_text import one_line
from server.cli.terminal import open_console
from server.replay.rerun.replay import ItemState, Replay, ReplayEstimate, ReplayState
from server.replay.rerun.report import Measure, Measured, ReplayReport
from server.replay.rerun.result import StoredResult
from server.replay.rerun.statistics import Distribution

_DOLLARS: Final = frozenset({Measure.COST_USD})


def show_estimate(estimate: ReplayEstimate) -> None:
    """What a replay would come to."""
    click.echo(f"{estimate.item_count:,} items of {estimate.conversation_count:,} conversations.")
    click.echo(f"{estimate.call_count:,} calls.")
    click.echo(f"{estimate.input_tokens:,} input and {estimate.output_tokens:,} output tokens.")
    if estimate.cost_usd is None:
        click.echo("The candidate's price is not known.")
    else:
        click.echo(
            f"{_usd(estimate.cost_usd)} with the cache as it was, {_usd(estimate.uncached_cost_usd)} without it."
        )
    if estimate.unpriced_count:
        click.echo(f"{estimate.unpriced_count:,} calls have no known price and are left out.")
    if estimate.unmeasured_count:
        click.echo(f"Of {estimate.unmeasured_count:,} calls no usage was recorded.")
    if estimate.is_rough:
        click.echo("A rough one: a free-running candidate takes as many turns as it likes.")


def show_replays(replays: Sequence[Replay]) -> None:
    """A table of them."""
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
    """How far it is."""
    counts = ", ".join(f"{count:,} {state}" for state, count in replay.item_counts.items() if count)
    click.echo(f"{replay.id} {one_line(replay.draft.name)}: {replay.state.value}.")
    click.echo(f"Items: {counts or 'none'}. Spent: {_usd(replay.spent_usd)}, {replay.spent_tokens:,} tokens.")
    if replay.unpriced_count:
        click.echo(f"{replay.unpriced_count:,} calls have no known price: it is at least that.")


def show_report(replay: Replay, report: ReplayReport, worst: Sequence[StoredResult]) -> None:
    """What came out."""
    show_state(replay)
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.items() if count)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items() if count)
    click.echo(f"Answers: {outcomes or 'none'}.{f' They differ in: {kinds}.' if kinds else ''}")
    if report.same_share is not None:
        sure = report.same_interval
        told = "" if sure is None else f", {sure.low:.1%} to {sure.high:.1%} in 95 of 100 such runs"
        click.echo(f"The same: {report.same_share:.1%} of those that were compared{told}.")
    if report.measures:
        _show_measures(report.measures)
    for count in report.assertions:
        colour = "red" if count.failed else "green"
        click.secho(f"assert {one_line(count.name)}: {count.passed:,} passed, {count.failed:,} failed", fg=colour)
    if worst:
        _show_worst(worst)


def failed(replay: Replay, report: ReplayReport) -> bool:
    """Whether somebody's build should stop."""
    is_short = replay.state is not ReplayState.DONE or replay.item_counts[ItemState.FAILED] > 0
    return is_short or report.failed_assertion_count > 0


def _show_measures(measures: Sequence[Measured]) -> None:
    names = ("mean", "95 % interval", "5 %", "median", "95 %")
    table = Table("measure", "side", *(Column(name, justify="right") for name in names))
    for measured in measures:
        for side, spread in (("recorded", measured.recorded), ("candidate", measured.candidate)):
            if spread is not None:
                table.add_row(measured.measure.value, side, *_cells(measured.measure, spread))
    open_console().print(table)


def _cells(measure: Measure, spread: Distribution) -> tuple[str, ...]:
    interval = spread.interval
    told = "" if interval is None else f"{_number(measure, interval.low)} to {_number(measure, interval.high)}"
    picked = (spread.quantiles[0], spread.median, spread.quantiles[-1])
    return _number(measure, spread.mean), told, *(_number(measure, value) for value in picked)


def _number(measure: Measure, value: float) -> str:
    if measure in _DOLLARS:
        return f"${value:,.6f}"
    return f"{value:.3f}" if measure.is_share else f"{value:,.1f}"


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
            "" if result.similarity is None else f"{result.similarity:.3f}",
        )
    open_console().print(table)


def _usd(amount: Decimal | None) -> str:
    return "unknown" if amount is None else f"${amount:,.4f}"
