"""`strata simulate`: the cost of conversations with a simulated provider and the server's own planner."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Column, Table

from server.cli.simulate_chart import draw_grid, draw_lengths
from server.cli.terminal import open_bar, open_console
from server.compaction.simulation.comparison import Comparison, PricedModel, Run, Workload, compare, find_priced_model
from server.compaction.simulation.grid import COLUMNS, ROW_COUNT, SHAPES, THINK_TIMES, WHO, GridRow, walk_grid
from server.compaction.simulation.workload import LengthLaw
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind
from server.conversation.errors import ValidationFailed
from server.conversation.payload import LayerOrder
from server.payload.dynamic_clock import DEFAULT_CLOCK_SECONDS
from server.providers.model_profile import PROFILES

_CHART_STEPS: Final = 6
_NAMES: Final = {
    "uncached": "no caching",
    "kept": "append-only",
    "threshold": "threshold",
    "cost": "cost policy",
    "optimum": "optimum",
}


def _check_chart(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix != ".svg":
        raise click.BadParameter("Charts are written as SVG: name a file that ends in .svg.")
    return path


@click.command()
@click.option("--model", default="gemini-3.8-flash", show_default=True, help="Model with a known price.")
@click.option("--order", type=click.Choice([order.value for order in LayerOrder]), help="Layer order.  [the model's]")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="Date of the prices.  [today]")
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="chat", show_default=True, help="Shape of a conversation."
)
@click.option(
    "--think-time",
    type=click.Choice(list(THINK_TIMES)),
    default="human",
    show_default=True,
    help="Time between an answer and the next message.",
)
@click.option(
    "--exchanges",
    type=click.IntRange(1, 1000),
    default=40,
    show_default=True,
    help="Mean per conversation.",
)
@click.option(
    "--lengths",
    type=click.Choice([law.value for law in LengthLaw]),
    default="even",
    show_default=True,
    help="Distribution of the lengths around the mean.",
)
@click.option("--length-unknown", is_flag=True, help="Do not give typical lengths to the planner.")
@click.option("--conversations", type=click.IntRange(1, 1000), default=12, show_default=True, help="Sample size.")
@click.option(
    "--keep-exchanges", type=click.IntRange(1), default=4, show_default=True, help="Exchanges that are never compacted."
)
@click.option(
    "--fixed-cost-tokens",
    type=click.IntRange(0),
    default=500,
    show_default=True,
    help="Fixed cost of a compaction in the cost policy.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=8_000, show_default=True, help="Of the threshold policy.")
@click.option(
    "--clock-seconds",
    type=click.IntRange(1, 86_400),
    default=DEFAULT_CLOCK_SECONDS,
    show_default=True,
    help="Period of the clock in the dynamic block of the layered order.",
)
@click.option(
    "--change-share",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of exchanges before which the context changes.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same figures.")
@click.option("--grid", is_flag=True, help="Simulate every model, shape, pace and length of docs/operations/costs.md.")
@click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_chart,
    metavar="FILE.svg",
    help="Also write a chart to this SVG file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
def simulate(*, grid: bool, chart: Path | None, as_json: bool, **options: Any) -> None:
    """Compute what input costs under each policy, as a share of its cost without any cache.

    Nothing is sent to a provider. The figures in docs/operations/costs.md are the output of `strata simulate --grid`.
    """
    cost = CompactionPolicy(keep_exchanges=options["keep_exchanges"], fixed_cost_tokens=options["fixed_cost_tokens"])
    threshold = replace(cost, kind=PolicyKind.THRESHOLD, max_tokens=options["max_tokens"])
    if grid:
        _simulate_grid(cost, threshold, options, chart=chart, as_json=as_json)
        return
    model = _read_model(options)
    workload = _read_workload(options)
    comparison = compare(model, workload, cost, threshold)
    if as_json:
        for name, run in _runs(comparison).items():
            click.echo(json.dumps({"policy": name, **_describe(comparison, run)}))
    else:
        _show(model, workload, comparison)
    if chart is not None:
        shares = {
            mean: compare(model, replace(workload, exchanges=mean), cost, threshold)
            for mean in _chart_lengths(workload.exchanges)
        }
        draw_lengths(f"{model.profile.model}, {workload.shape.name}", shares, _NAMES, chart)


def _read_model(options: dict[str, Any]) -> PricedModel:
    profile = PROFILES.get(options["model"])
    if profile is None:
        raise ValidationFailed(f"The price of {options['model']} is unknown.")
    day = options["date"].replace(tzinfo=UTC) if options["date"] else datetime.now(UTC)
    order = LayerOrder(options["order"]) if options["order"] else None
    return find_priced_model(profile.provider, profile.model, order, day)


def _read_workload(options: dict[str, Any]) -> Workload:
    return Workload(
        shape=replace(SHAPES[options["shape"]], change_share=options["change_share"]),
        think_time=THINK_TIMES[options["think_time"]],
        exchanges=options["exchanges"],
        lengths=LengthLaw(options["lengths"]),
        length_known=not options["length_unknown"],
        conversations=options["conversations"],
        seed=options["seed"],
        clock_seconds=options["clock_seconds"],
    )


def _simulate_grid(
    cost: CompactionPolicy, threshold: CompactionPolicy, options: dict[str, Any], *, chart: Path | None, as_json: bool
) -> None:
    rows: list[GridRow] = []
    with open_bar() as progress:
        task = progress.add_task("simulating", total=ROW_COUNT)
        for row in walk_grid(
            lengths=LengthLaw(options["lengths"]),
            length_known=not options["length_unknown"],
            seed=options["seed"],
            policy=cost,
            threshold=threshold,
            clock_seconds=options["clock_seconds"],
            change_share=options["change_share"],
        ):
            rows.append(row)
            progress.advance(task)
    if as_json:
        for row in rows:
            click.echo(json.dumps(dict(zip(COLUMNS, row.cells(), strict=True))))
    else:
        _show_grid(rows)
    if chart is not None:
        draw_grid(rows, chart)


def _runs(comparison: Comparison) -> dict[str, Run]:
    return {name: getattr(comparison, name) for name in _NAMES}


def _describe(comparison: Comparison, run: Run) -> dict[str, Any]:
    bill = run.calls_cost
    return {
        "cost_usd": round(run.cost_usd, 6),
        "share": round(comparison.share(run), 4),
        "distance": round(run.cost_usd / comparison.optimum.cost_usd, 4),
        "fresh_tokens": bill.fresh_tokens,
        "cache_read_tokens": bill.read_tokens,
        "cache_write_tokens": bill.written_tokens,
        "compactions": run.compaction_count,
    }


def _show(model: PricedModel, workload: Workload, comparison: Comparison) -> None:
    table = Table(
        Column("policy"),
        *(Column(name, justify="right") for name in ("input cost", "share", "to optimum", "cached", "compactions")),
        title=f"{model.profile.model} ({model.order}), {workload.shape.name}, {workload.think_time.name}: "
        f"{workload.conversations} conversations of about {workload.exchanges} exchanges",
        box=None,
    )
    for name, run in _runs(comparison).items():
        table.add_row(
            _NAMES[name],
            f"${run.cost_usd:.4f}",
            f"{comparison.share(run):.3f}",
            f"{run.cost_usd / comparison.optimum.cost_usd:.3f}",
            f"{run.calls_cost.read_tokens / run.calls_cost.input_tokens:.0%}",
            str(run.compaction_count),
        )
    open_console().print(table)


def _show_grid(rows: list[GridRow]) -> None:
    figures = {name for name in COLUMNS if name not in WHO}
    table = Table(*(Column(name, justify="right" if name in figures else "left") for name in COLUMNS), box=None)
    for row in rows:
        table.add_row(*row.cells())
    console = open_console()
    console.print(table)
    farthest = max(comparison.distance for row in rows for comparison in row.by_length.values())
    console.print(f"The cost policy costs at most {farthest:.3f} times the optimum.")


def _chart_lengths(longest: int) -> list[int]:
    return sorted({max(1, round(longest * step / _CHART_STEPS)) for step in range(1, _CHART_STEPS + 1)})
