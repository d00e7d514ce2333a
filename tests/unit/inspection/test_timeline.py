"""What a timeline derives from turns and calls, and which turns it contains."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import Block, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.epoch import EpochReason, Segment
from server.conversation.payload import LayerOrder
from server.conversation.store import EpochOutline
from server.conversation.turn import ModelResponseTurn, StopReason, ToolResponseTurn, TurnState, UserTaskTurn
from server.conversation.usage import Usage
from server.inspection.timeline import (
    CallOutline,
    EpochMark,
    RunningTurn,
    Timeline,
    TimelineAnchor,
    TimelineTurn,
    annotate_timeline,
    choose_range,
    list_compactions,
    read_context,
)
from tests.support.builders import A_TIME, build_conversation


def call(seq: int, *, epoch: int = 1, dynamic: str = "{}", tokens: int = 100, **changes: Any) -> CallOutline:
    values: dict[str, Any] = {
        "turn_seq": seq,
        "attempt": 1,
        "provider": "gemini",
        "model": "m",
        "epoch": epoch,
        "layer_order": LayerOrder.LAYERED,
        "dynamic": dynamic,
        "started_at": A_TIME,
        "first_byte_at": A_TIME,
        "ended_at": A_TIME + timedelta(seconds=2),
        "status": 200,
        "error_code": None,
        "usage": Usage(fresh_input_tokens=tokens),
        "cost_usd": None,
        "cache_expected_tokens": None,
        "cache_miss_reason": None,
        "raw_length": 1,
        "repair_count": 0,
        "template_failure_count": 0,
        "warning_kinds": (),
    }
    return CallOutline(**values | changes)


def asked(seq: int) -> TimelineTurn:
    return TimelineTurn(turn=UserTaskTurn(seq=seq, created_at=A_TIME, blocks=(TextBlock(text="?"),)))


def answered(seq: int, *calls: CallOutline, blocks: tuple[Block, ...] = ()) -> TimelineTurn:
    turn = ModelResponseTurn(
        seq=seq,
        created_at=A_TIME,
        blocks=blocks,
        state=TurnState.COMPLETE,
        stop_reason=StopReason.END_TURN,
        error_code=None,
        provider="gemini",
        model="m",
        usage=Usage(),
        cost_usd=None,
        attempt=1,
        revision=None,
    )
    return TimelineTurn(turn=turn, calls=calls or (call(seq),))


def epoch(number: int, reason: EpochReason, buffer_start_seq: int) -> EpochOutline:
    return EpochOutline(
        number=number,
        reason=reason,
        assistant_version=1,
        generation=0,
        segment_count=1,
        buffer_start_seq=buffer_start_seq,
        created_at=A_TIME,
        last_segment=Segment(
            generation=0, position=0, first_seq=1, last_seq=buffer_start_seq - 1, text="", token_count=9
        ),
    )


def part(turns: Sequence[TimelineTurn], **changes: Any) -> Timeline:
    values: dict[str, Any] = {
        "tenant_id": "tenant_x",
        "tenant_name": "acme",
        "conversation": build_conversation(),
        "assistant_name": "helper",
        "facts": None,
        "turns": turns,
        "earlier_seq": None,
        "later_seq": None,
        "running": None,
        "epochs": (),
        "background_calls": (),
        "last_seq": turns[-1].turn.seq if turns else 0,
    }
    return Timeline(**values | changes)


def context(**values: Any) -> str:
    return json.dumps({"todos": [], **values, "current_datetime": A_TIME.isoformat()})


def test_a_context_is_marked_as_changed_and_the_clock_does_not_count() -> None:
    later = json.dumps({"todos": ["pack"], "current_datetime": "tomorrow"})
    timeline = annotate_timeline(
        part(
            [
                answered(2, call(2, dynamic=context())),
                answered(4, call(4, dynamic=context(todos=["pack"]))),
                answered(6, call(6, dynamic=later)),
                answered(8, call(8, dynamic=context())),
            ]
        )
    )
    assert [turn.is_context_changed for turn in timeline.turns] == [False, True, False, True]


def test_the_first_turn_of_a_page_is_compared_with_the_call_before_it() -> None:
    earlier = call(4, dynamic=context(todos=["pack"]))
    shown = [asked(5), answered(6, call(6, dynamic=context(todos=["pack"])))]
    assert [turn.is_context_changed for turn in annotate_timeline(part(shown, earlier_call=earlier)).turns] == [
        False,
        False,
    ]
    assert [turn.is_context_changed for turn in annotate_timeline(part(shown)).turns] == [False, True]


@pytest.mark.parametrize(
    ("dynamic", "read"), [("", None), ("no JSON", "no JSON"), ("[" * 100_000, "[" * 100_000), ('{"a":1}', {"a": 1})]
)
def test_a_context_that_is_not_json_is_text(dynamic: str, read: object) -> None:
    assert read_context(call(2, dynamic=dynamic)) == read


def test_results_and_calls_refer_to_each_other() -> None:
    blocks = (ToolCallBlock(id="a", name="get_weather", arguments={}), ToolCallBlock(id="b", name="find", arguments={}))
    results = (ToolResultBlock(tool_call_id="a", output=1),)
    response = TimelineTurn(turn=ToolResponseTurn(seq=3, created_at=A_TIME, blocks=results))
    timeline = annotate_timeline(part([answered(2, blocks=blocks), response]))
    assert timeline.turns[0].answered_call_ids == {"a"}
    assert timeline.turns[1].tool_names == {"a": "get_weather", "b": "find"}
    # The call is on the page before.
    assert annotate_timeline(part([response])).turns[0].tool_names == {}


def test_a_compaction_precedes_the_first_turn_that_is_still_a_message() -> None:
    failed = call(4, epoch=2, tokens=0)
    turns = [asked(1), answered(2, call(2, tokens=900)), asked(3), answered(4, failed, call(4, epoch=2, tokens=300))]
    timeline = annotate_timeline(part(turns, epochs=[epoch(2, EpochReason.COMPACTED, 3)]))
    assert [len(turn.compactions) for turn in timeline.turns] == [0, 0, 1, 0]
    [compaction] = timeline.turns[2].compactions
    assert (compaction.tokens_before, compaction.tokens_after, compaction.undone_by) == (900, 300, None)
    assert timeline.compactions_at_end == []


def test_a_compaction_after_the_last_turn_is_at_the_end_and_not_on_earlier_pages() -> None:
    outlines = [epoch(2, EpochReason.COMPACTED, 5)]
    turns = [asked(3), answered(4)]
    assert len(annotate_timeline(part(turns, epochs=outlines)).compactions_at_end) == 1
    assert annotate_timeline(part(turns, epochs=outlines, later_seq=5, last_seq=6)).compactions_at_end == []


def test_an_undo_removes_the_newest_compaction_in_effect() -> None:
    outlines = [
        epoch(6, EpochReason.COMPACTION_UNDONE, 3),
        epoch(5, EpochReason.COMPACTION_UNDONE, 5),
        epoch(4, EpochReason.SUMMARISED, 7),
        epoch(3, EpochReason.COMPACTED, 5),
        epoch(2, EpochReason.COMPACTED, 3),
    ]
    compactions = list_compactions(outlines, [], None)
    assert [(each.outline.number, each.undone_by.number if each.undone_by else None) for each in compactions] == [
        (2, None),
        (3, 6),
        (4, 5),
    ]


def test_the_first_call_of_an_epoch_is_marked() -> None:
    marks = {
        number: EpochMark(
            number=number,
            reason=EpochReason.ASSISTANT_CHANGED,
            assistant_version=number,
            buffer_start_seq=1,
            created_at=A_TIME,
            args={"tone": "calm"},
        )
        for number in (1, 2)
    }
    running = RunningTurn(
        seq=6, owner="x", lease_expires_at=A_TIME, cancel_requested_at=None, calls=[call(6, epoch=2, ended_at=None)]
    )
    turns = [answered(2), answered(4, call(4, epoch=2), call(4, epoch=2, attempt=2))]
    timeline = annotate_timeline(part(turns, call_epochs=marks, running=running, earlier_call=call(1)))
    begins = [[c.began_epoch.number if c.began_epoch else None for c in turn.calls] for turn in timeline.turns]
    assert begins == [[None], [2, None]]
    assert timeline.running is not None
    assert [c.began_epoch for c in timeline.running.calls] == [None]


def test_a_turn_lasts_from_its_first_call_to_the_end_of_its_last() -> None:
    second = call(2, attempt=2, started_at=A_TIME + timedelta(seconds=5), ended_at=A_TIME + timedelta(seconds=9))
    [turn] = annotate_timeline(part([answered(2, call(2), second)])).turns
    assert turn.duration_seconds == 9
    [open_] = annotate_timeline(part([answered(2, replace(second, ended_at=None))])).turns
    assert open_.duration_seconds is None


SIZES = [(seq, 10) for seq in range(1, 11)]


@pytest.mark.parametrize(
    ("anchor", "starts_after"),
    [
        (TimelineAnchor(), 7),
        (TimelineAnchor(after_seq=4), 4),
        (TimelineAnchor(before_seq=6), 2),
        (TimelineAnchor(before_seq=2), 0),
        (TimelineAnchor(before_seq=2**70), 7),
        (TimelineAnchor(around_seq=5), 3),
        (TimelineAnchor(around_seq=2**70), 8),
        (TimelineAnchor(after_seq=-5), 0),
    ],
)
def test_a_position_determines_the_first_turn(anchor: TimelineAnchor, starts_after: int) -> None:
    assert anchor.start_after(10, 3) == starts_after


@pytest.mark.parametrize(
    ("anchor", "part"),
    [
        (TimelineAnchor(), (8, 10)),
        (TimelineAnchor(after_seq=0), (1, 3)),
        (TimelineAnchor(before_seq=8), (5, 7)),
        (TimelineAnchor(around_seq=5), (4, 6)),
        (TimelineAnchor(around_seq=1), (1, 3)),
    ],
)
def test_a_page_that_would_be_too_large_keeps_the_requested_turn(anchor: TimelineAnchor, part: tuple[int, int]) -> None:
    assert choose_range(SIZES, anchor, max_bytes=30) == part


def test_one_turn_is_shown_however_large_it_is() -> None:
    assert choose_range([(1, 5), (2, 1000), (3, 5)], TimelineAnchor(around_seq=2), max_bytes=30) == (2, 2)
    assert choose_range([], TimelineAnchor(), max_bytes=30) is None


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=30),
    st.sampled_from(["after_seq", "before_seq", "around_seq", ""]),
    st.integers(0, 40),
    st.integers(0, 500),
)
def test_a_page_is_within_its_limit_and_cannot_be_extended(sizes: list[int], kind: str, seq: int, limit: int) -> None:
    known = list(enumerate(sizes, 1))
    anchor = TimelineAnchor(**{kind: seq}) if kind else TimelineAnchor()
    part = choose_range(known, anchor, max_bytes=limit)
    if part is None:
        assert kind == "before_seq"
        assert seq <= 1
        return
    first, last = part
    total = sum(sizes[first - 1 : last])
    assert first == last or total <= limit
    end = len(sizes) if kind != "before_seq" else min(len(sizes), max(seq, 1) - 1)
    left = limit - total
    assert first == 1 or sizes[first - 2] > left
    assert last == end or sizes[last] > left
