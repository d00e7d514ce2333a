"""Where cache markers are placed and how long they last."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.caching.policy import (
    LONG_SECONDS,
    SHORT_SECONDS,
    Lifetimes,
    Rhythm,
    apply_caching,
    encode_caching,
    measure_gaps,
    place_breakpoints,
    plan_lifetimes,
)
from server.conversation.payload import Payload, count_static_breakpoints
from server.providers.pricing import find_price
from tests.contracts.provider_harness import build_payload

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
OPUS = find_price("claude-opus-5-5", NOW, 0)
MINUTE = 60.0

rhythms = st.builds(
    Rhythm,
    gaps_seconds=st.lists(st.floats(0, 10_000), max_size=9).map(tuple),
    prefix_tokens=st.integers(0, 200_000),
    growth_tokens=st.integers(0, 20_000),
)


def rhythm(*gaps_seconds: float, prefix_tokens: int = 20_000, growth_tokens: int = 500) -> Rhythm:
    return Rhythm(gaps_seconds=gaps_seconds, prefix_tokens=prefix_tokens, growth_tokens=growth_tokens)


@given(
    message_count=st.integers(0, 40),
    has_tools=st.booleans(),
    static_piece_count=st.integers(0, 5),
    is_wide=st.booleans(),
    limit=st.integers(0, 5),
)
def test_there_are_never_more_breakpoints_than_allowed(
    *, message_count: int, has_tools: bool, static_piece_count: int, is_wide: bool, limit: int
) -> None:
    markers = place_breakpoints(
        message_count, has_tools=has_tools, static_piece_count=static_piece_count, limit=limit, is_wide=is_wide
    )
    used = len(markers.messages) + markers.tools + count_static_breakpoints(static_piece_count, limit)
    assert used <= limit
    assert list(markers.messages) == sorted(set(markers.messages))
    assert all(0 <= place < message_count for place in markers.messages)
    assert has_tools or not markers.tools
    if message_count and limit > 2:
        assert markers.messages[-1] == message_count - 1


@pytest.mark.parametrize(
    ("static_piece_count", "is_wide", "expected"),
    [
        (1, False, (True, (8, 9))),
        (1, True, (False, (7, 8, 9))),
        (2, False, (False, (8, 9))),
        (9, True, (False, (7, 9))),
    ],
)
def test_a_wide_answer_and_a_long_text_take_the_markers_of_other_blocks(
    *, static_piece_count: int, is_wide: bool, expected: tuple[bool, tuple[int, ...]]
) -> None:
    markers = place_breakpoints(10, has_tools=True, static_piece_count=static_piece_count, limit=4, is_wide=is_wide)
    assert (markers.tools, markers.messages) == expected


@given(rhythm=rhythms, asked=st.none() | st.integers(60, 86_400), priced=st.booleans())
def test_an_earlier_marker_lives_at_least_as_long_as_a_later_one(
    *, rhythm: Rhythm, asked: int | None, priced: bool
) -> None:
    lifetimes = plan_lifetimes(rhythm, OPUS if priced else None, requested_seconds=asked)
    assert lifetimes.static_seconds >= lifetimes.message_seconds
    assert {lifetimes.static_seconds, lifetimes.message_seconds} <= {SHORT_SECONDS, LONG_SECONDS}


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((), (LONG_SECONDS, SHORT_SECONDS)),
        ((MINUTE, MINUTE), (LONG_SECONDS, SHORT_SECONDS)),
        ((10 * MINUTE,), (LONG_SECONDS, LONG_SECONDS)),
        ((10 * MINUTE, MINUTE, MINUTE, MINUTE), (LONG_SECONDS, LONG_SECONDS)),
        ((120 * MINUTE, 180 * MINUTE), (SHORT_SECONDS, SHORT_SECONDS)),
        ((120 * MINUTE, 10 * MINUTE, 10 * MINUTE), (LONG_SECONDS, LONG_SECONDS)),
    ],
)
def test_the_lifetime_follows_the_pauses_between_calls(gaps: tuple[float, ...], expected: tuple[int, int]) -> None:
    lifetimes = plan_lifetimes(rhythm(*gaps), OPUS)
    assert (lifetimes.static_seconds, lifetimes.message_seconds) == expected


def test_a_lifetime_of_an_hour_has_to_pay_for_its_writes() -> None:
    """One pause in nine calls, and each call doubles the content: writing for an hour costs more than it saves."""
    gaps = (10 * MINUTE, *[MINUTE] * 8)
    assert (
        plan_lifetimes(rhythm(*gaps, prefix_tokens=1_000, growth_tokens=1_000), OPUS).message_seconds == SHORT_SECONDS
    )
    assert (
        plan_lifetimes(rhythm(*gaps, prefix_tokens=50_000, growth_tokens=1_000), OPUS).message_seconds == LONG_SECONDS
    )


@pytest.mark.parametrize(("asked", "expected"), [(60, SHORT_SECONDS), (3599, SHORT_SECONDS), (3600, LONG_SECONDS)])
def test_an_assistant_may_set_the_lifetime(asked: int, expected: int) -> None:
    lifetimes = plan_lifetimes(rhythm(10 * MINUTE), OPUS, requested_seconds=asked)
    assert lifetimes == Lifetimes(static_seconds=expected, message_seconds=expected)


def test_gaps_are_measured_up_to_now_and_never_negative() -> None:
    times = [NOW - timedelta(seconds=seconds) for seconds in (10, 40, 35)]
    assert measure_gaps(times, NOW) == (10, 30, 0)
    assert measure_gaps([], NOW) == ()


asked_payloads = st.one_of(
    st.builds(lambda name: build_payload("m", [b"{}"], cached_content=name), st.text(max_size=9)),
    st.builds(
        lambda places, tools, seconds, static, wants, previous: build_payload(
            "m",
            [b"{}"],
            breakpoints=places,
            marks_tools=tools,
            cache_seconds=seconds,
            static_cache_seconds=static,
            requests_diagnosis=wants,
            previous_response_id=previous if wants else None,
        ),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.booleans(),
        st.sampled_from([SHORT_SECONDS, LONG_SECONDS]),
        st.sampled_from([SHORT_SECONDS, LONG_SECONDS]),
        st.booleans(),
        st.none() | st.text(max_size=9),
    ),
)


@given(payload=asked_payloads)
def test_the_cache_settings_of_a_call_are_read_back_from_it(payload: Payload) -> None:
    assert apply_caching(build_payload("m", [b"{}"]), encode_caching(payload)) == payload


def test_a_call_without_cache_settings_has_no_markers() -> None:
    assert encode_caching(build_payload("m", [b"{}"])) == {}
    payload = build_payload("m", [b"{}"], breakpoints=(0,))
    assert apply_caching(payload, {}) == payload
