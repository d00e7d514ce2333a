import pytest

from server.conversation.turn import TurnState
from server.turns.observer import TurnTimes
from tests.support.builders import call_end, call_start
from tests.support.fakes.telemetry import ASSISTANT, TIMES, Watched, lease, model_turn


def test_an_ended_turn_is_counted_by_its_outcome(watched: Watched) -> None:
    failed = {"state": TurnState.FAILED, "stop_reason": None, "error_code": "provider_overloaded"}
    watched.observer.turn_began(lease())
    watched.observer.turn_ended(lease(), model_turn(), TIMES)
    watched.observer.turn_ended(lease(), model_turn(**failed), TurnTimes())
    assert watched.value("strata_turns_begun_total") == 1
    assert watched.series("strata_turns_total") == [
        {
            "provider": "gemini",
            "model": "gemini-3.1-pro-preview",
            "state": "complete",
            "stop_reason": "end_turn",
            "error_code": "none",
        },
        {
            "provider": "gemini",
            "model": "gemini-3.1-pro-preview",
            "state": "failed",
            "stop_reason": "none",
            "error_code": "provider_overloaded",
        },
    ]


def test_each_step_that_was_reached_is_timed(watched: Watched) -> None:
    watched.observer.turn_ended(lease(), model_turn(), TIMES)
    watched.observer.turn_ended(lease(), model_turn(), TurnTimes(accepted=0.001))
    for name, count, total in (
        ("strata_turn_time_to_accept_seconds", 2, 0.004),
        ("strata_turn_time_to_build_seconds", 1, 0.006),
        ("strata_turn_time_to_first_event_seconds", 1, 0.8),
        ("strata_turn_duration_seconds", 1, 2.5),
    ):
        assert watched.value(f"{name}_count") == count
        assert watched.value(f"{name}_sum") == pytest.approx(total)


def test_lost_and_recovered_turns_are_counted(watched: Watched) -> None:
    assert watched.series("strata_turns_lost_total") == [
        {"error_code": "lease_lost"},
        {"error_code": "database_unavailable"},
        {"error_code": "turn_stalled"},
    ]
    watched.observer.turn_lost(lease(), "lease_lost")
    watched.observer.turn_recovered(lease())
    assert watched.value("strata_turns_lost_total", error_code="lease_lost") == 1
    assert watched.value("strata_turns_recovered_total") == 1


def test_a_turn_that_failed_before_its_assistant_was_known_has_no_provider(watched: Watched) -> None:
    watched.observer.turn_ended(lease(), model_turn(provider="", model=""), TIMES)
    assert watched.value("strata_turns_total", provider="none", model="none") == 1


def test_invented_models_do_not_create_unbounded_series(watched: Watched) -> None:
    for number in range(200):
        watched.observer.turn_ended(lease(), model_turn(model=f"made-up-{number}"), TIMES)
        watched.observer.call_ended(lease(), call_start(model=f"made-up-{number}"), call_end(), assistant_id=ASSISTANT)
    watched.observer.turn_ended(lease(), model_turn(model="claude-opus-5-5", provider="anthropic"), TIMES)
    assert len(watched.series("strata_turns_total")) == 52
    assert watched.value("strata_turns_total", model="_OTHER") == 150
    assert watched.value("strata_turns_total", model="claude-opus-5-5") == 1
    assert len(watched.series("strata_calls_total")) == 51
