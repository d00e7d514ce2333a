import asyncio
from datetime import timedelta
from decimal import Decimal

import pytest
from litestar import post
from opentelemetry.trace import SpanKind, StatusCode

from server.conversation.turn import TurnState
from server.conversation.usage import Usage
from server.telemetry.metrics import Metrics
from server.telemetry.spans import open_tracing
from server.telemetry.turns import TurnTelemetry
from server.turns.observer import TurnTimes
from server.turns.running import RunningTurns
from tests.support.builders import A_TIME, call_end, call_start
from tests.support.fakes.collector import attributes_of, open_collector
from tests.support.fakes.site import open_site
from tests.support.fakes.telemetry import ASSISTANT, CONVERSATION, SECRET, TIMES, USAGE, Watched, lease, model_turn


def test_a_turn_has_a_span_with_a_child_for_each_call(watched: Watched) -> None:
    held = lease()
    start = call_start(provider="anthropic", model="claude-opus-5-5", attempt=2, started_at=A_TIME)
    end = call_end(
        usage=USAGE,
        first_byte_at=A_TIME + timedelta(seconds=0.5),
        ended_at=A_TIME + timedelta(seconds=3),
        cost_usd=Decimal("0.25"),
        raw_response=SECRET.encode(),
    )
    watched.observer.turn_began(held)
    watched.observer.call_ended(held, start, end, assistant_id=ASSISTANT)
    watched.observer.turn_ended(held, model_turn(provider="anthropic", model="claude-opus-5-5", attempt=2), TIMES)
    call, turn = watched.exporter.get_finished_spans()
    assert (call.name, call.kind) == ("chat claude-opus-5-5", SpanKind.CLIENT)
    assert dict(call.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "claude-opus-5-5",
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": CONVERSATION,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 15,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.cache_write.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "http.response.status_code": 200,
        "strata.turn.seq": 2,
        "strata.call.attempt": 2,
        "strata.call.epoch": 1,
        "strata.call.cost_usd": 0.25,
    }
    assert (call.end_time or 0) - (call.start_time or 0) == 3_000_000_000
    assert call.start_time == int(A_TIME.timestamp()) * 10**9 + 123_456_000
    assert (turn.name, turn.kind, turn.status.status_code) == ("turn", SpanKind.INTERNAL, StatusCode.UNSET)
    assert call.parent is not None
    assert turn.context is not None
    assert call.parent.span_id == turn.context.span_id
    assert dict(turn.attributes or {}) == {
        "gen_ai.conversation.id": CONVERSATION,
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "claude-opus-5-5",
        "strata.turn.seq": 2,
        "strata.turn.state": "complete",
        "strata.turn.stop_reason": "end_turn",
        "strata.turn.attempts": 2,
        "strata.turn.time_to_accept": 0.003,
        "strata.turn.time_to_build": 0.006,
        "strata.turn.time_to_first_event": 0.8,
    }


def test_gemini_has_the_name_of_the_conventions(watched: Watched) -> None:
    watched.observer.call_ended(lease(), call_start(), call_end(), assistant_id=ASSISTANT)
    (call,) = watched.exporter.get_finished_spans()
    assert (call.attributes or {})["gen_ai.provider.name"] == "gcp.gemini"


@pytest.mark.parametrize(
    ("status", "code", "error_type"),
    [
        (529, "provider_overloaded", "provider_overloaded"),
        (404, None, "404"),
        (200, "provider_disconnected", "provider_disconnected"),
    ],
)
def test_a_failed_call_has_its_error(watched: Watched, status: int, code: str | None, error_type: str) -> None:
    watched.observer.call_ended(
        lease(), call_start(), call_end(status=status, error_code=code, usage=Usage()), assistant_id=ASSISTANT
    )
    (call,) = watched.exporter.get_finished_spans()
    assert call.status.status_code is StatusCode.ERROR
    assert (call.attributes or {})["error.type"] == error_type
    assert "gen_ai.usage.input_tokens" not in (call.attributes or {})


@pytest.mark.parametrize(
    ("state", "code", "error_type"),
    [
        (TurnState.FAILED, "provider_disconnected", "provider_disconnected"),
        (TurnState.INTERRUPTED, None, "interrupted"),
        (TurnState.CANCELLED, None, None),
    ],
)
def test_a_failed_turn_has_its_error_and_a_cancelled_one_has_none(
    watched: Watched, state: TurnState, code: str | None, error_type: str | None
) -> None:
    held = lease()
    watched.observer.turn_began(held)
    watched.observer.turn_ended(held, model_turn(state=state, error_code=code), TurnTimes())
    (turn,) = watched.exporter.get_finished_spans()
    assert (turn.attributes or {}).get("error.type") == error_type
    assert (turn.status.status_code is StatusCode.ERROR) == (error_type is not None)


def test_a_turn_that_was_lost_ends_with_an_error(watched: Watched) -> None:
    held = lease()
    watched.observer.turn_began(held)
    watched.observer.turn_lost(held, "lease_lost")
    watched.observer.turn_lost(held, "lease_lost")
    (turn,) = watched.exporter.get_finished_spans()
    assert (turn.attributes or {})["error.type"] == "lease_lost"


def test_spans_of_turns_that_never_end_are_discarded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.telemetry.spans._MAX_OPEN", 2)
    observer = TurnTelemetry(watched.metrics, watched.tracing)
    for number in range(5):
        observer.turn_began(lease(turn_seq=number))
    given_up = watched.exporter.get_finished_spans()
    assert [(span.attributes or {})["strata.turn.seq"] for span in given_up] == [0, 1, 2]


def test_without_a_collector_there_are_no_spans_and_no_state() -> None:
    observer = TurnTelemetry(Metrics(version="1"), open_tracing(None, None, "strata", "1"))
    observer.turn_began(lease())
    assert observer._spans is None  # noqa: SLF001  reason: the absence of state is not visible from outside


async def test_the_span_of_a_turn_belongs_to_the_request_even_after_its_response() -> None:
    held, running, may_end = lease(), RunningTurns(), asyncio.Event()
    with open_collector() as collector:
        tracing = open_tracing(collector.url, None, "strata", "1")
        observer = TurnTelemetry(Metrics(version="1"), tracing)

        async def take_turn() -> None:
            observer.turn_began(held)
            await may_end.wait()
            observer.call_ended(held, call_start(), call_end(), assistant_id=ASSISTANT)
            observer.turn_ended(held, model_turn(), TIMES)

        @post("/turns")
        async def start_turn() -> None:
            running.start(take_turn(), name="turn")

        async with open_site(tracing=tracing, more_routes=[start_turn]) as site:
            assert (await site.client.post("/turns")).status_code == 201
            may_end.set()
            await running.drain(10)
        await asyncio.to_thread(tracing.shutdown)
    spans = {span.name: span for span in collector.spans}
    request, turn, call = spans["POST /turns"], spans["turn"], spans["chat gemini-3.1-pro-preview"]
    assert {span.trace_id for span in spans.values()} == {request.trace_id}
    assert (turn.parent_span_id, call.parent_span_id) == (request.span_id, turn.span_id)
    assert attributes_of(call)["gen_ai.usage.output_tokens"] == 3
    assert SECRET.encode() not in b"".join(sent.SerializeToString() for sent in collector.requests)
