"""The replay pages: the form as a draft, numbers as charts."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from server.conversation.block import ToolCallBlock
from server.conversation.errors import ValidationFailed
from server.conversation.turn import StopReason
from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectionFilter
from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.figures import compare_facts, format_value
from server.replay.rerun.full_results import FullResult
from server.replay.rerun.replay import (
    ItemState,
    Judge,
    OnMissingResult,
    Replay,
    ReplayDraft,
    ReplayLimits,
    ReplayMode,
    ReplayState,
)
from server.replay.rerun.report import BIN_COUNT, Distribution, Interval, Measure, Measured
from server.replay.rerun.result import AnswerFacts, StoredResult
from server.web.admin.call_links import ItemLinks
from server.web.admin.conversation_filters import label_filters
from server.web.admin.replay_action_pages import ACTIONS
from server.web.admin.replay_charts import HEIGHT, WIDTH, draw_chart
from server.web.admin.replay_forms import fill_limits, read_draft, read_fields, read_limits, seal
from server.web.admin.replay_results import build_shown_result
from tests.support.replay_builders import draft, result

NONE = "\u2013"


def spread(*bins: int, mean: float = 2.0, interval: Interval | None = None) -> Distribution:
    filled = (*bins, *(0,) * (BIN_COUNT - len(bins)))
    quantiles = (0.0, 1.0, 2.0, 3.0, 4.0)
    return Distribution(
        count=sum(bins), mean=mean, least=0.0, most=4.0, quantiles=quantiles, bins=filled, interval=interval
    )


def replay_of(asked: ReplayDraft) -> Replay:
    return Replay(
        id="replay_01jd0z8s3bf6h9kq2m4n6p8r0t",
        tenant_id="tenant_01jd0z8s3bf6h9kq2m4n6p8r0t",
        draft=asked,
        state=ReplayState.DONE,
        item_count=3,
        item_counts=dict.fromkeys(ItemState, 0),
        spent_usd=Decimal(0),
        spent_tokens=0,
        reserved_usd=Decimal(0),
        reserved_tokens=0,
        unpriced_count=0,
        created_at=datetime(2026, 11, 16, tzinfo=UTC),
        created_by=None,
        ended_at=None,
    )


def test_a_form_is_parsed_as_a_draft() -> None:
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
            "judge_provider": "anthropic",
            "judge_model": "claude-sonnet-5-5",
            "judge_prompt": "Is it as good?",
            "judge_settings": '{"temperature": 0}',
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
    assert draft.judge == Judge(
        provider="anthropic", model="claude-sonnet-5-5", prompt="Is it as good?", settings={"temperature": 0}
    )
    assert read_draft({"name": "x"}).judge is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetitions": "many"}, {"repetitions": "0"}, {"budget_usd": "nan"}, {"budget_usd": "much"},
        {"settings": "[]"},
        {"candidate": "{"}, {"candidate": '{"color": "red"}'}, {"mode": "telepathy"}, {"active_after": "soon"},
        {"settings": "[" * 50_000}, {"judge_settings": "cold"},
    ],
)  # fmt: skip
def test_an_invalid_field_is_named(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationFailed) as caught:
        read_draft({"name": "x", **wrong})
    [name] = wrong
    faults: Any = caught.value.details["errors"]
    assert any(name in fault["path"] or fault["path"].startswith("candidate.") for fault in faults)


def test_an_incomplete_judge_is_left_out() -> None:
    with pytest.raises(ValidationFailed, match=r"judge\.model: "):
        read_draft({"name": "x", "judge_provider": "gemini", "judge_prompt": "Is it good?"})


def test_the_limits_of_a_continued_replay_are_those_of_the_form() -> None:
    limits = ReplayLimits(repetitions=3, parallelism=2, calls_per_minute=60, budget_usd=Decimal("10.00"))
    shown = fill_limits(limits)
    assert shown == {"parallelism": "2", "calls_per_minute": "60", "budget_usd": "10", "budget_tokens": ""}
    assert read_limits(shown, limits) == limits
    assert read_limits({"csrf_token": "x"}, limits) is None
    more = read_limits({**shown, "budget_usd": " 12.50 ", "calls_per_minute": "", "repetitions": "9"}, limits)
    assert more == replace(limits, budget_usd=Decimal("12.5"), calls_per_minute=None)
    for name, text in (("budget_usd", "-1"), ("budget_usd", "much"), ("parallelism", ""), ("budget_tokens", "1.5")):
        with pytest.raises(ValidationFailed, match=name):
            read_limits({**shown, name: text}, limits)


def test_filters_are_described_if_they_are_set() -> None:
    since = datetime(2026, 11, 1, 9, 30, tzinfo=UTC)
    answer_with = InspectionFilter(provider="gemini", has_repairs=True, cost_from=Decimal(0), active_after=since)
    assert label_filters(answer_with) == {
        "provider": "gemini",
        "has repairs": "",
        "cost from": "0",
        "active after": "2026-11-01 09:30:00+00:00",
    }
    assert label_filters(InspectionFilter()) == {}


def test_a_signature_is_valid_for_these_fields_only() -> None:
    fields = {"name": "x", "model": "y"}
    assert seal(fields) == seal({"model": "y", "name": "x"})
    assert seal(fields) != seal({**fields, "model": "z"})


def test_bars_stay_in_their_chart_and_the_numbers_are_shown() -> None:
    measured = Measured(
        measure=Measure.LATENCY_MS,
        low=0.0,
        high=4000.0,
        recorded=spread(1, 0, 4),
        candidate=spread(3, mean=1500.0, interval=Interval(low=900.0, high=2100.0)),
    )
    chart = draw_chart(measured)
    # On one scale: three is drawn lower than four.
    assert [(bar.side, bar.height) for bar in chart.bars] == [
        ("recorded", HEIGHT / 4), ("recorded", HEIGHT), ("candidate", HEIGHT * 3 / 4),
    ]  # fmt: skip
    assert chart.bars[1].title == "recorded: 4 from 500 ms to 750 ms"
    assert [(mark.side, mark.mean, mark.low, mark.width) for mark in chart.marks] == [
        ("recorded", 0.16, 0.0, 0.0), ("candidate", WIDTH * 1500 / 4000, WIDTH * 900 / 4000, WIDTH * 1200 / 4000),
    ]  # fmt: skip
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH and bar.y + bar.height == HEIGHT for bar in chart.bars)
    assert (chart.low, chart.high) == ("0 ms", "4.00 s")
    assert [row.interval for row in chart.rows] == ["", "900 ms to 2.10 s"]
    assert format_value(Measure.CACHE_SHARE, 0.25) == "25%"
    assert format_value(Measure.COST_USD, 0.00125) == "$0.00125"


def facts(**changes: Any) -> AnswerFacts:
    usage = Usage(fresh_input_tokens=60, cache_read_tokens=140, output_tokens=30, reasoning_tokens=10)
    made = AnswerFacts(stop_reason=StopReason.END_TURN, usage=usage, cost_usd=Decimal("0.002"), latency_ms=1500)
    return replace(made, **changes)


def test_durations_and_costs_are_shown_side_by_side_with_their_change() -> None:
    other = facts(
        stop_reason=StopReason.LENGTH,
        usage=Usage(fresh_input_tokens=150, cache_read_tokens=50, output_tokens=50),
        cost_usd=Decimal("0.001"),
        latency_ms=900,
    )
    assert [(figure.recorded, figure.candidate, figure.change) for figure in compare_facts(facts(), other)] == [
        ("end_turn", "length", ""),
        ("200", "200", "±0"),
        ("70%", "25%", "\u221245 points"),
        ("40", "50", "+25 %"),
        ("$0.00200", "$0.00100", "\u221250 %"),
        ("1.50 s", "900 ms", "\u221240 %"),
    ]
    assert [figure.name for figure in compare_facts(facts(), other) if figure.is_mismatch] == ["Stop reason"]
    alone = compare_facts(None, facts(cost_usd=None, latency_ms=None, error_code="provider_overloaded"))
    assert [(figure.recorded, figure.candidate) for figure in alone] == [
        (NONE, "provider_overloaded"), (NONE, "200"), (NONE, "70%"), (NONE, "40"), (NONE, "unknown"), (NONE, NONE),
    ]  # fmt: skip
    assert not any(figure.change or figure.is_mismatch for figure in alone)
    assert compare_facts(facts(), facts(latency_ms=150_000))[-1].change == "\u00d7100"


def test_tool_arguments_are_compared_by_name_and_shown_if_they_differ() -> None:
    def answer_with(*calls: ToolCallBlock) -> AnswerContent:
        return AnswerContent(blocks=calls, stop_reason=StopReason.TOOL_USE)

    def call(name: str, **arguments: Any) -> ToolCallBlock:
        return ToolCallBlock(id="call_1", name=name, arguments=arguments)

    recorded = answer_with(call("weather", city="Oslo", days=1), call("time", zone=1.0), call("news"))
    candidate = answer_with(call("time", zone=1), call("weather", days=1, city="Rome"))
    stored = StoredResult(
        number=1, conversation_id="conv_x", repetition=1, replay_conversation_id=None, result=result()
    )
    shown = build_shown_result(FullResult(stored=stored, task="", recorded=recorded, candidate=candidate))
    weather, time, news = shown.pairs
    assert weather.recorded is not None
    assert [(part.text, part.is_changed) for part in weather.recorded.parts] == [
        ('{"city": "', False), ("Oslo", True), ('", "days": 1}', False),
    ]  # fmt: skip
    assert weather.candidate is not None
    assert [part.text for part in weather.candidate.parts if part.is_changed] == ["Rome"]
    assert time.is_same
    assert time.recorded is not None
    assert not any(part.is_changed for part in time.recorded.parts)
    assert (news.is_same, news.candidate) == (False, None)


def test_an_answer_is_linked_on_the_page_that_shows_it() -> None:
    replay = replay_of(draft())
    links = ItemLinks(replay=replay, number=3)
    home = f"/admin/replays/{replay.id}/items/3"
    assert [links.position(position) for position in (1, 20, 21)] == [
        f"{home}#position-1", f"{home}#position-20", f"{home}?page=2#position-21",
    ]  # fmt: skip
    assert links.turn(1) == links.turn(2) == links.position(1)
    assert links.turn(41) == links.turn(42) == links.position(21)


def test_every_action_has_a_description() -> None:
    assert set(ACTIONS) == {"pause", "continue", "cancel", "delete"}
    assert {name for name, action in ACTIONS.items() if action.is_dangerous} == {"cancel", "delete"}
