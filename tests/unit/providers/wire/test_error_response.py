"""Any error response is a failure of the provider, and its message is passed on."""

import json
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import (
    ProviderFailed,
    ProviderOverloaded,
    ProviderQuotaExceeded,
    ProviderRateLimited,
    ProviderRejected,
    ProviderUnavailable,
    every_error,
)
from server.providers.anthropic.errors import error_from_recording as anthropic_error
from server.providers.gemini.errors import error_from_recording as gemini_error
from server.providers.wire.error_response import MAX_MESSAGE_LENGTH, clean_message, read_retry_after
from server.providers.wire.exchange import Recording
from server.web.errors import answer_headers, encode_problem
from tests.support.strategies import json_values

READERS: Final = {"gemini": gemini_error, "anthropic": anthropic_error}
KINDS: Final = frozenset(every_error(ProviderFailed))
NOW: Final = datetime(2026, 11, 18, tzinfo=UTC)
PAGES: Final = (
    b"",
    b"\xff\xfe<html>\x80</html>",
    "<html>Schlüssel</html>".encode("latin-1"),
    b"{",
    b"[" * 100_000,
    b"9" * 10_000,
    b'{"error": {"code": ' + b"9" * 6000 + b', "message": "\\ud800\\u0000"}}',
    b'{"error": {"type": ["x"], "message": {"a": 1}, "details": {"error_code": ["x"]}}}',
    b'{"error": {"code": 429, "details": [{"retryDelay": "' + b"9" * 500 + b's"}]}}',
    b"[[]]",
    b'[{"error": null}]',
)


def recording(status: int, body: bytes, **headers: str) -> Recording:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Recording(started_at=NOW, status=status, headers=named, pieces=[body])


def refusal(vendor: str, status: int, message: str, kind: str = "invalid_request_error") -> bytes:
    if vendor == "gemini":
        return json.dumps({"error": {"code": status, "message": message, "status": "INVALID_ARGUMENT"}}).encode()
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


def assert_passed_on(failure: ProviderFailed) -> None:
    assert type(failure) in KINDS
    json.loads(encode_problem(failure, "req_1"))
    answer_headers(failure)


@pytest.mark.parametrize("vendor", READERS)
@pytest.mark.parametrize("status", [400, 401, 402, 404, 409, 413, 418, 429, 500, 502, 503, 504, 529])
@pytest.mark.parametrize("page", PAGES, ids=range(len(PAGES)))
def test_any_page_is_a_failure_of_the_provider(vendor: str, status: int, page: bytes) -> None:
    assert_passed_on(READERS[vendor](recording(status, page, retry_after="nan")))


@pytest.mark.parametrize("vendor", READERS)
@given(status=st.integers(400, 599), body=json_values, header=st.text(max_size=8) | st.floats().map(str))
def test_any_json_is_a_failure_of_the_provider(vendor: str, status: int, body: Any, header: str) -> None:
    for document in (body, {"error": body}, {"error": {"message": body, "type": body, "status": body, "code": body}}):
        assert_passed_on(READERS[vendor](recording(status, json.dumps(document).encode(), retry_after=header)))


@pytest.mark.parametrize(
    ("vendor", "status", "message"),
    [
        ("anthropic", 400, "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing."),
        ("anthropic", 400, "You have reached your specified API usage limits. You will regain access on 2026-12-01."),
        ("gemini", 400, "Your prepayment credits are depleted. Please go to AI Studio to manage your billing."),
        ("gemini", 403, "This API method requires billing to be enabled. Please enable billing on project 7."),
        ("gemini", 429, "Your prepayment credits are depleted. Please go to AI Studio to manage your billing."),
    ],
)
def test_an_exhausted_balance_is_reported_as_such(vendor: str, status: int, message: str) -> None:
    failure = READERS[vendor](recording(status, refusal(vendor, status, message)))
    assert type(failure) is ProviderQuotaExceeded
    assert failure.details["provider_message"] == message


@pytest.mark.parametrize("vendor", READERS)
def test_a_refusal_that_mentions_money_for_another_reason_is_a_refusal(vendor: str) -> None:
    message = "messages.0: the tool `get_credit_balance` has no description."
    assert type(READERS[vendor](recording(400, refusal(vendor, 400, message)))) is ProviderRejected


SLOW: Final = refusal("anthropic", 429, "Slow.", "rate_limit_error")
FULL: Final = refusal("anthropic", 529, "Full.", "overloaded_error")


@pytest.mark.parametrize(
    ("vendor", "body", "headers", "kind", "delay"),
    [
        (
            "anthropic",
            SLOW,
            {"retry_after": "7"},
            ProviderRateLimited,
            7,
        ),
        (
            "anthropic",
            FULL,
            {"retry_after": "9"},
            ProviderOverloaded,
            9,
        ),
        (
            "anthropic",
            SLOW,
            {"retry_after_ms": "500"},
            ProviderRateLimited,
            0.5,
        ),
        ("gemini", b'{"error":{"code":429,"details":[{"retryDelay":"3.5s"}]}}', {}, ProviderRateLimited, 3.5),
        ("gemini", b'{"error":{"code":503,"message":"Full."}}', {"retry_after": "4"}, ProviderOverloaded, 4),
        ("gemini", b"<html>", {"retry_after": "4"}, ProviderUnavailable, 4),
    ],
)
def test_the_delay_of_the_provider_is_passed_on_for_every_failure(
    vendor: str, body: bytes, headers: dict[str, str], kind: type[ProviderFailed], delay: float
) -> None:
    status = 502 if body == b"<html>" else 503
    failure = READERS[vendor](recording(status, body, **headers))
    assert (type(failure), failure.details["retry_after_seconds"]) == (kind, delay)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("0", 0),
        ("nan", None),
        ("inf", None),
        ("-1", None),
        ("1e400", None),
        ("soon", None),
        ("9" * 400, None),
        ("99999999999", 31 * 86_400),
        ("Wed, 18 Nov 2026 00:00:30 GMT", 30),
        ("Tue, 17 Nov 2026 00:00:30 GMT", 0),
        ("Wed, 99 Nov 2026 00:00:30 GMT", None),
    ],
)
def test_a_delay_is_a_finite_number(text: str, seconds: float | None) -> None:
    assert read_retry_after({"retry-after": text}, NOW) == seconds


def test_a_message_is_bounded_and_contains_neither_keys_nor_control_characters() -> None:
    key = "AIzaSyA-0123456789abcdefghijklmnopqrstu"
    cleaned = clean_message(
        f"API key not valid: {key} \x1b[31m\ud800 sk-ant-api03-abcdefghijklmnopqrstuv " + "x" * 5000
    )
    assert key not in cleaned
    assert "abcdefghijklmnop" not in cleaned
    assert "\x1b" not in cleaned
    assert len(cleaned) == MAX_MESSAGE_LENGTH
    cleaned.encode()
    assert clean_message({"no": "text"}) == ""


@given(st.text(max_size=3000))
def test_any_message_can_be_passed_on(text: str) -> None:
    cleaned = clean_message(text)
    assert len(cleaned) <= MAX_MESSAGE_LENGTH
    cleaned.encode()
