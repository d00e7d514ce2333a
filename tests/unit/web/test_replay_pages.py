"""What the pages of replays are made of: the form as a draft, numbers as charts."""

from decimal import Decimal
from typing import Any

import pytest

from server.errors import ValidationFailed
from server.replay import OnMissingResult, ReplayMode
from server.replay_report import Measure, Measured
from server.replay_statistics import BIN_COUNT, Distribution, Interval
from server.web.admin.replay_action_pages import ACTIONS
from server.web.admin.replay_charts import HEIGHT, WIDTH, draw_chart, show_value
from server.web.admin.replay_forms import read_draft, read_fields, seal


def spread(*bins: int, mean: float = 2.0, interval: Interval | None = None) -> Distribution:
    filled = (*bins, *(0,) * (BIN_COUNT - len(bins)))
    quantiles = (0.0, 1.0, 2.0, 3.0, 4.0)
    return Distribution(
        count=sum(bins), mean=mean, least=0.0, most=4.0, quantiles=quantiles, bins=filled, interval=interval
    )


def test_a_form_is_the_draft_that_it_says() -> None:
    fields = read_fields(
        {
            "name": " Nightly ",
            "conversation_ids": "conv_a,\r\nconv_b",
            "active_after": "2026-11-01T09:30",
            "sample_count": "5",
            "model": "gemini-3-flash-preview",
            "settings": '{"thinking": "low"}',
            "candidate": '{"instructions": {"roles": "You are brief."}}',
            "mode": "free_running",
            "on_missing_result": "nearest",
            "repetitions": "3",
            "budget_usd": "2.50",
            "assertions": "similarity > 0.5\r\n\r\nlen(text) < 9\r\n",
            "csrf_token": "x",
            "provider": "  ",
        }
    )
    draft = read_draft(fields)
    assert (draft.name, draft.mode, draft.on_missing_result) == (
        "Nightly", ReplayMode.FREE_RUNNING, OnMissingResult.NEAREST,
    )  # fmt: skip
    assert draft.selection.conversation_ids == ("conv_a", "conv_b")
    assert draft.selection.filters.active_after is not None
    assert draft.selection.filters.active_after.isoformat() == "2026-11-01T09:30:00+00:00"
    assert (draft.candidate.provider, draft.candidate.settings) == (None, {"thinking": "low"})
    assert draft.candidate.instructions is not None
    assert draft.candidate.instructions.roles == "You are brief."
    assert (draft.limits.repetitions, draft.limits.budget_usd) == (3, Decimal("2.5"))
    assert [assertion.expression for assertion in draft.assertions] == ["similarity > 0.5", "len(text) < 9"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetitions": "many"}, {"repetitions": "0"}, {"budget_usd": "nan"}, {"budget_usd": "much"},
        {"settings": "[]"},
        {"candidate": "{"}, {"candidate": '{"color": "red"}'}, {"mode": "telepathy"}, {"active_after": "soon"},
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationFailed) as caught:
        read_draft({"name": "x", **wrong})
    [name] = wrong
    faults: Any = caught.value.details["errors"]
    assert any(name in fault["path"] or fault["path"].startswith("candidate.") for fault in faults)


def test_a_seal_is_for_these_fields_alone() -> None:
    fields = {"name": "x", "model": "y"}
    assert seal(fields) == seal({"model": "y", "name": "x"})
    assert seal(fields) != seal({**fields, "model": "z"})


def test_bars_stay_in_their_chart_and_the_numbers_are_told() -> None:
    measured = Measured(
        measure=Measure.LATENCY_MS,
        low=0.0,
        high=4000.0,
        recorded=spread(1, 0, 4),
        candidate=spread(3, mean=1500.0, interval=Interval(low=900.0, high=2100.0)),
    )
    chart = draw_chart(measured)
    assert [(bar.side, bar.height) for bar in chart.bars] == [
        ("recorded", HEIGHT / 4), ("recorded", HEIGHT), ("candidate", HEIGHT),
    ]  # fmt: skip
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH and bar.y + bar.height == HEIGHT for bar in chart.bars)
    assert (chart.low, chart.high) == ("0 ms", "4.0 s")
    assert [row.interval for row in chart.rows] == ["", "900 ms to 2.1 s"]
    assert show_value(Measure.CACHE_SHARE, 0.25) == "25%"
    assert show_value(Measure.COST_USD, 0.00125) == "$0.00125"


def test_every_action_says_what_it_does() -> None:
    assert set(ACTIONS) == {"pause", "continue", "cancel", "delete"}
    assert {name for name, action in ACTIONS.items() if action.is_dangerous} == {"cancel", "delete"}
