import json
import re
from dataclasses import replace
from datetime import UTC
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import Usage
from server.turns.observer import TurnTimes
from tests.support.builders import call_end, call_start
from tests.support.fakes.log_capture import capture_log
from tests.support.fakes.telemetry import ASSISTANT, CONVERSATION, SECRET, TIMES, Watched, lease, model_turn
from tests.support.strategies import any_text, blocks, json_objects


class TestLog:
    def test_a_turn_leaves_one_line_without_content(self, watched: Watched) -> None:
        watched.observer.turn_began(lease())
        watched.observer.call_ended(
            lease(), call_start(), call_end(raw_response=SECRET.encode()), assistant_id=ASSISTANT
        )
        watched.observer.turn_ended(lease(), model_turn(), TIMES)
        (line,) = watched.lines
        line.pop("timestamp")
        assert line == {
            "event": "turn.ended",
            "level": "info",
            "logger": "strata.turn",
            "conversation_id": CONVERSATION,
            "turn_seq": 2,
            "provider": "gemini",
            "model": "gemini-3.1-pro-preview",
            "state": "complete",
            "stop_reason": "end_turn",
            "error_code": None,
            "attempt": 1,
            "fresh_input_tokens": 7,
            "cache_read_tokens": 5,
            "cache_write_tokens": 3,
            "output_tokens": 2,
            "reasoning_tokens": 1,
            "cost_usd": 0.25,
            "accepted_ms": 3.0,
            "built_ms": 6.0,
            "first_event_ms": 800.0,
            "duration_ms": 2500.0,
        }

    @pytest.mark.parametrize(
        ("state", "event", "level"),
        [
            (TurnState.COMPLETE, "turn.ended", "info"),
            (TurnState.CANCELLED, "turn.ended", "info"),
            (TurnState.FAILED, "turn.failed", "warning"),
            (TurnState.INTERRUPTED, "turn.failed", "warning"),
        ],
    )
    def test_a_failure_is_a_warning(self, watched: Watched, state: TurnState, event: str, level: str) -> None:
        watched.observer.turn_ended(lease(), model_turn(state=state, error_code="provider_disconnected"), TIMES)
        (line,) = watched.lines
        assert (line["event"], line["level"], line["error_code"]) == (event, level, "provider_disconnected")

    def test_a_turn_that_failed_before_its_assistant_was_known_names_none(self, watched: Watched) -> None:
        watched.observer.turn_ended(lease(), model_turn(provider="", model=""), TIMES)
        (line,) = watched.lines
        assert (line["provider"], line["model"]) == (None, None)

    def test_lost_and_recovered_turns_are_not_logged_by_the_observer(self, watched: Watched) -> None:
        watched.observer.turn_lost(lease(), "lease_lost")
        watched.observer.turn_recovered(lease())
        assert watched.lines == []

    def test_a_broken_prefix_is_logged_by_its_position_only(self, watched: Watched) -> None:
        broken = {"kind": "prefix_break", "index": 4, "layer": "buffered", "seq": 3, "text": SECRET}
        watched.observer.call_ended(lease(), call_start(warnings=(broken,)), call_end(), assistant_id=ASSISTANT)
        (line,) = watched.lines
        assert (line["event"], line["level"], line["attempt"], line["epoch"]) == ("turn.prefix_broken", "warning", 1, 1)
        assert line["difference"] == {"index": 4, "layer": "buffered", "seq": 3}


any_integer = st.integers(-(2**70), 2**70) | st.just(10**400)
moments = st.datetimes(timezones=st.just(UTC) | st.timezones())
usages = st.builds(
    Usage,
    fresh_input_tokens=any_integer,
    cache_read_tokens=any_integer,
    cache_write_tokens=any_integer,
    output_tokens=any_integer,
    reasoning_tokens=any_integer,
)
names = st.sampled_from(["gemini", "anthropic", "lease_lost", "gemini-3.1-pro-preview"]) | any_text
costs = st.none() | st.decimals()
notes = st.lists(
    json_objects
    | st.builds(
        lambda kind, rest: {**rest, "kind": kind},
        st.sampled_from(["prefix_break", "signatures_withheld", "result_supplied"]),
        json_objects,
    ),
    max_size=3,
)
leases = st.builds(Lease, conversation_id=any_text, token=st.uuids(), owner=any_text, turn_seq=any_integer)
starts = st.builds(
    CallStart,
    attempt=any_integer,
    provider=names,
    model=names,
    account=any_text,
    epoch=any_integer,
    started_at=moments,
    manifest=st.just(()),
    request_hash=st.binary(max_size=8),
    cache_expected_tokens=st.none() | any_integer,
    repairs=notes,
    template_failures=notes,
    warnings=notes,
)
ends = st.builds(
    CallEnd,
    ended_at=moments,
    first_byte_at=st.none() | moments,
    status=st.none() | any_integer,
    headers=st.dictionaries(any_text, any_text, max_size=2),
    raw_response=st.none() | st.binary(max_size=8),
    usage=usages,
    cost_usd=costs,
    error_code=st.none() | names,
)
turns = st.builds(
    ModelResponseTurn,
    seq=any_integer,
    created_at=moments,
    blocks=st.lists(blocks, max_size=2).map(tuple),
    state=st.sampled_from(TurnState),
    stop_reason=st.none() | st.sampled_from(StopReason),
    error_code=st.none() | names,
    provider=names,
    model=names,
    usage=usages,
    cost_usd=costs,
    attempt=st.none() | any_integer,
    revision=st.none() | any_integer,
)
seconds = st.none() | st.floats()
times = st.builds(TurnTimes, accepted=seconds, built=seconds, first_event=seconds, ended=seconds)


class TestAnyValues:
    @given(leases, starts, ends, turns, times, names)
    def test_no_value_raises_an_error_and_all_output_can_be_parsed(
        self, held: Lease, start: CallStart, end: CallEnd, turn: ModelResponseTurn, took: TurnTimes, code: str
    ) -> None:
        with capture_log() as log:
            watched = Watched(log)
            watched.observer.turn_began(held)
            watched.observer.call_ended(held, start, end, assistant_id=ASSISTANT)
            watched.observer.turn_ended(held, turn, took)
            watched.observer.turn_began(replace(held, token=UUID(int=0)))
            watched.observer.turn_lost(replace(held, token=UUID(int=0)), code)
            watched.observer.turn_recovered(held)
            spans = watched.exporter.get_finished_spans()
            sent = encode_spans(spans).resource_spans[0].scope_spans[0].spans
            assert [len(span.attributes) for span in sent] == [len(span.attributes or {}) for span in spans]
            assert len(sent) == 3
            assert watched.value("strata_turns_total") == 1
            text = watched.metrics.render().decode()
            assert not re.search(r"^strata_.* (NaN|[+-]Inf)$", text, re.MULTILINE)
            for line in log.getvalue().splitlines():
                json.loads(line, parse_constant=_refuse)


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")
