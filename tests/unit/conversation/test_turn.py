"""What a provider reports about the end of a turn is kept and passed on; ordinary ends add nothing."""

import json

import pytest

from server.conversation.errors import Internal, ProviderNotConfigured, ProviderRateLimited, RateLimited, StrataError
from server.conversation.turn import StopReason, describe_ending, describe_failure, describe_stop
from server.web.errors import answer_headers, encode_problem


def test_a_failure_of_the_provider_keeps_its_message_and_nothing_else() -> None:
    failure = {"provider_message": "Slow down.", "provider_status": "RESOURCE_EXHAUSTED", "retry_after_seconds": 3.5}
    assert describe_failure(ProviderRateLimited(**failure, secret="x")) == failure  # type: ignore[arg-type]  # reason: details
    assert describe_failure(Internal(provider_message="no")) == {}
    assert describe_failure(ProviderRateLimited()) == {}


@pytest.mark.parametrize(
    ("reason", "details", "kept"),
    [
        (StopReason.END_TURN, {"reason": "STOP"}, None),
        (StopReason.END_TURN, {"reason": "STOP", "safetyRatings": [1]}, None),
        (StopReason.TOOL_USE, {"reason": "tool_use"}, None),
        (StopReason.END_TURN, None, None),
        (None, None, None),
        (StopReason.END_TURN, {"reason": "stop_sequence", "stop_sequence": "END"}, ["reason", "stop_sequence"]),
        (StopReason.REFUSAL, {"reason": "SAFETY", "safetyRatings": [1]}, ["reason", "safetyRatings"]),
        (StopReason.ERROR, {"reason": "OTHER"}, ["reason"]),
    ],
)
def test_an_ordinary_stop_has_no_details(
    reason: StopReason | None, details: dict[str, object] | None, kept: list[str] | None
) -> None:
    described = describe_stop(reason, details)
    assert described == ({} if kept is None else {"stop_details": {name: (details or {})[name] for name in kept}})


def test_the_end_is_described_in_a_sentence() -> None:
    assert describe_ending({}) == ""
    ending = {"provider_message": "Slow.", "retry_after_seconds": 30.0, "stop_details": {"category": "bio", "x": 1}}
    assert describe_ending(ending) == "Provider message: Slow. Retry after 30 s. Category: bio"


@pytest.mark.parametrize(
    ("error", "source", "delay"),
    [
        (RateLimited(retry_after_seconds=7), "strata", "7"),
        (ProviderRateLimited(retry_after_seconds=8.2), "provider", "9"),
        (ProviderRateLimited(), "provider", None),
        (ProviderNotConfigured(), "strata", None),
    ],
)
def test_a_client_can_distinguish_the_429_of_the_provider(error: StrataError, source: str, delay: str | None) -> None:
    assert json.loads(encode_problem(error, "req_1"))["source"] == source
    assert answer_headers(error).get("retry-after") == delay
