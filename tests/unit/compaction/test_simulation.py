"""The simulation counts as the providers do, and no choice is cheaper than its optimum."""

from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.compaction.simulation.comparison import (
    PricedModel,
    Workload,
    compare,
    draw_workload,
    find_priced_model,
    replay,
    simulate,
)
from server.compaction.simulation.grid import PRICED_AT, SHAPES, THINK_TIMES
from server.compaction.simulation.optimum import find_optimum
from server.compaction.simulation.provider import Layout, Prompt, PromptPart, SimulatedProvider, Tariff, Timeline
from server.compaction.simulation.workload import LengthLaw, Shape, ThinkTime, draw_conversation, spread_lengths
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind
from server.conversation.errors import ValidationFailed
from server.conversation.payload import LayerOrder
from server.providers.model_profile import PROFILES
from server.providers.pricing import find_price

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
TARIFF = Tariff(fresh=1_000_000, read=100_000, write=1_250_000, minimum_tokens=1_000, lifetime_seconds=300)
"""A price at which a token costs a dollar."""
OFTEN = ThinkTime(name="often", mean_seconds=30, varies=False)
FREE = CompactionPolicy(fixed_cost_tokens=0)


def prompt(static: int, buffer: int, fresh: int = 0, *, rewriting: int = 0) -> Prompt:
    pieces = (PromptPart(name=("static", 0), tokens=static), PromptPart(name=("buffer", rewriting), tokens=buffer))
    return Prompt(parts=pieces, fresh_tokens=fresh)


def market_of(
    write: float, read: float = 0.1, *, order: LayerOrder = LayerOrder.LAYERED, minimum: int = 0
) -> PricedModel:
    """One dollar for an uncached token."""
    million = 1_000_000.0
    price = find_price("claude-opus-4-8", NOON, 0)
    assert price is not None
    return PricedModel(
        profile=PROFILES["claude-opus-4-8"],
        price=price,
        order=order,
        tariff=Tariff(
            fresh=million, read=read * million, write=write * million, minimum_tokens=minimum, lifetime_seconds=300
        ),
    )


def test_a_growing_request_reads_what_was_sent_and_writes_the_rest() -> None:
    provider = SimulatedProvider(TARIFF)
    first = provider.call(prompt(1_000, 200, 50), NOON)
    second = provider.call(prompt(1_000, 500, 60), NOON + timedelta(seconds=299))
    assert (first.read_tokens, first.written_tokens, first.fresh_tokens) == (0, 1_200, 50)
    assert (second.read_tokens, second.written_tokens, second.fresh_tokens) == (1_200, 300, 60)
    assert second.cost_usd == pytest.approx(120 + 375 + 60)


def test_a_cut_keeps_the_static_layer_and_loses_the_cached_rest() -> None:
    provider = SimulatedProvider(TARIFF)
    provider.call(prompt(1_000, 5_000), NOON)
    bill = provider.call(prompt(3_000, 400, rewriting=7), NOON)
    assert (bill.read_tokens, bill.written_tokens) == (1_000, 2_400)


def test_after_its_lifetime_nothing_is_cached() -> None:
    provider = SimulatedProvider(TARIFF)
    provider.call(prompt(1_000, 200), NOON)
    assert provider.call(prompt(1_000, 200), NOON + timedelta(seconds=300)).read_tokens == 0


def test_below_the_minimum_nothing_is_cached() -> None:
    provider = SimulatedProvider(TARIFF)
    bills = [provider.call(prompt(800, 199), NOON) for _ in range(2)]
    assert [(bill.read_tokens, bill.written_tokens, bill.fresh_tokens) for bill in bills] == [(0, 0, 999)] * 2


PUBLISHED = """
1.25 1.0 50   0.192 0.573 0.427 0.573 0.298 0.211 0.192
1.25 1.0 200  0.127 0.282 0.264 0.248 0.160 0.138 0.127
1.25 0.5 200  0.127 0.220 0.187 0.203 0.110 0.093 0.091
1.0  1.0 50   0.184 0.569 0.408 0.569 0.291 0.199 0.184
1.0  1.0 200  0.124 0.273 0.250 0.245 0.157 0.133 0.124
1.0  0.5 200  0.124 0.215 0.177 0.201 0.108 0.089 0.087
"""
"""Write price, compacted share, exchanges; then the shares of the cost without caching: b, and of c1, c2 and d2 the
threshold and the best.
"""


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines(), ids=lambda line: " ".join(line.split()[:3]))
def test_the_layouts_cost_what_the_formulas_give(line: str) -> None:
    write, compacted, count, *published = line.split()
    thinking = round(300 * (1 - float(compacted)))
    shape = Shape(
        name="formula",
        static_tokens=1_500,
        dynamic_tokens=500,
        task_tokens=50,
        answer_tokens=250 - thinking,
        thinking_tokens=thinking,
    )
    exchanges = draw_conversation(shape, OFTEN, int(count), "any")
    market = market_of(float(write))
    threshold = CompactionPolicy(kind=PolicyKind.THRESHOLD, fixed_cost_tokens=0)
    off = CompactionPolicy(kind=PolicyKind.OFF)

    def cost(layout: Layout, policy: CompactionPolicy) -> float:
        return simulate(Timeline(shape, exchanges, layout), market, policy).cost_usd

    def best(layout: Layout) -> float:
        return find_optimum(Timeline(shape, exchanges, layout), market.tariff, keep=4, fixed_cost_usd=0).cost_usd

    found = [cost(Layout.KEPT, off)]
    for layout in (Layout.LAYERED_REWRITTEN, Layout.LAYERED_VOLATILE, Layout.TRAILING):
        found += [cost(layout, threshold), best(layout)]
    shares = [one / cost(Layout.UNCACHED, off) for one in found]
    assert shares == [pytest.approx(float(figure), abs=0.0006) for figure in published]


shapes = st.builds(
    Shape,
    name=st.just("any"),
    static_tokens=st.integers(0, 5_000),
    dynamic_tokens=st.integers(0, 1_000),
    task_tokens=st.integers(1, 500),
    answer_tokens=st.integers(1, 1_000),
    thinking_tokens=st.integers(0, 1_000),
    tool_share=st.sampled_from([0, 0.5, 1]),
    tool_steps=st.integers(0, 3),
    call_tokens=st.integers(1, 100),
    result_tokens=st.integers(1, 1_000),
    spread=st.sampled_from([0, 0.5]),
    change_share=st.sampled_from([0, 0.5, 1]),
)
layouts = st.sampled_from([layout for layout in Layout if layout not in {Layout.UNCACHED, Layout.KEPT}])
markets = st.builds(
    market_of, st.sampled_from([1.0, 1.25]), st.sampled_from([0.025, 0.1]), minimum=st.sampled_from([0, 512, 4_096])
)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    layout=layouts,
    market=markets,
    seconds=st.sampled_from([20, 250, 3_600]),
    strips=st.booleans(),
    fixed=st.sampled_from([0, 500]),
    seed=st.integers(0, 99),
)
def test_the_optimum_is_the_cheapest_of_all_choices(
    shape: Shape, layout: Layout, market: PricedModel, seconds: int, *, strips: bool, fixed: int, seed: int
) -> None:
    exchanges = draw_conversation(shape, ThinkTime(name="any", mean_seconds=seconds), 8, str(seed))
    timeline = Timeline(shape, exchanges, layout, strips_thinking=strips)
    policy = CompactionPolicy(keep_exchanges=2, fixed_cost_tokens=fixed)
    optimum = find_optimum(timeline, market.tariff, keep=2, fixed_cost_usd=float(fixed))
    moments = range(3, 8)
    choices = [chosen for count in range(6) for chosen in combinations(moments, count)]
    costs = [replay(timeline, market, policy, chosen).cost_usd for chosen in choices]
    assert optimum.cost_usd == pytest.approx(min(costs), rel=1e-9, abs=1e-6)
    assert replay(timeline, market, policy, optimum.compacted_before).cost_usd == pytest.approx(optimum.cost_usd)


@pytest.mark.parametrize("order", LayerOrder)
def test_no_policy_beats_the_optimum(order: LayerOrder) -> None:
    market = find_priced_model("anthropic", "claude-opus-4-8", order, PRICED_AT)
    workload = Workload(shape=SHAPES["support"], think_time=THINK_TIMES["human"], exchanges=30)
    found = compare(market, workload, FREE, CompactionPolicy(kind=PolicyKind.THRESHOLD, fixed_cost_tokens=0))
    for run in (found.threshold, found.cost):
        assert run.cost_usd >= found.optimum.cost_usd - 1e-9
    assert found.cost.cost_usd < found.threshold.cost_usd < found.uncached.cost_usd
    assert found.distance < 1.05


def test_a_simulation_depends_on_its_seed() -> None:
    def draw(seed: int) -> object:
        return draw_workload(Workload(shape=SHAPES["agent"], think_time=THINK_TIMES["slow"], exchanges=5, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_lengths_have_the_requested_mean() -> None:
    assert spread_lengths(40, 4, LengthLaw.EVEN) == [25, 35, 45, 55]
    assert spread_lengths(40, 3, LengthLaw.EQUAL) == [40, 40, 40]
    drawn = spread_lengths(1_000, 400, LengthLaw.EXPONENTIAL)
    assert sum(drawn) / 400 == pytest.approx(1_000, rel=0.01)


def test_a_retained_dynamic_block_is_sent_again_and_thinking_is_lost_after_a_cut() -> None:
    shape = Shape(
        name="plain", static_tokens=1_000, dynamic_tokens=50, task_tokens=10, answer_tokens=20, thinking_tokens=5
    )
    exchanges = draw_conversation(shape, OFTEN, 6, "any")
    kept = Timeline(shape, exchanges, Layout.APPEND_ONLY)
    market = market_of(1.0, order=LayerOrder.APPEND_ONLY)
    assert replay(kept, market, FREE, ()).calls_cost.input_tokens == sum(1_000 + 85 * past + 60 for past in range(6))
    stripped = Timeline(shape, exchanges, Layout.APPEND_ONLY, strips_thinking=True)
    policy = CompactionPolicy(keep_exchanges=2, fixed_cost_tokens=0)
    whole = replay(kept, market, policy, (3,)).calls_cost.input_tokens
    # Two exchanges stay after the cut and are sent three more times without their five tokens of thinking.
    assert replay(stripped, market, policy, (3,)).calls_cost.input_tokens == whole - 3 * 2 * 5


def test_a_model_without_a_price_or_with_another_order_is_refused() -> None:
    with pytest.raises(ValidationFailed, match="no price"):
        find_priced_model("gemini", "gemini-unheard-of", None, NOON)
    with pytest.raises(ValidationFailed, match="takes append_only"):
        find_priced_model("anthropic", "claude-sonnet-5-5", LayerOrder.LAYERED, NOON)


def test_prices_are_those_of_the_date() -> None:
    before, later = (
        find_priced_model("gemini", "gemini-3.8-flash", None, datetime(year, 1, 2, tzinfo=UTC)) for year in (2026, 2027)
    )
    assert later.tariff.fresh == 2 * before.tariff.fresh
