import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import ValidationFailed
from server.web.headers import (
    announces_retry,
    is_unchanged,
    prefers_async,
    read_expected_revision,
    read_idempotency_key,
    read_last_event_id,
    wants_stream,
    write_etag,
)


@pytest.mark.parametrize(
    ("accept", "stream"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("text/*", False),
        ("text/event-stream", True),
        ("Text/Event-Stream; charset=utf-8", True),
        ("application/json, text/event-stream", True),
        ("application/json, text/event-stream;q=0.9", False),
        ("application/json;q=0.5, text/event-stream;q=0.9", True),
        ("text/event-stream, */*", True),
        ("text/event-stream;q=0.5, */*", False),
        ("text/event-stream;q=0.5, */*;q=0.1", True),
        ("text/event-stream;q=0", False),
        ("text/event-stream;q=nonsense", False),
        ("application/json;q=0, */*, text/event-stream;q=0.1", True),
    ],
)
def test_events_are_sent_if_they_are_accepted_by_name(*, accept: str | None, stream: bool) -> None:
    assert wants_stream(accept) is stream


@given(st.text(max_size=60))
def test_any_accept_header_can_be_parsed(accept: str) -> None:
    assert wants_stream(accept) in {True, False}


@pytest.mark.parametrize(
    ("prefer", "wanted"),
    [
        (None, False),
        ("wait=10", False),
        ("respond-async", True),
        ("wait=10, Respond-Async; x=y", True),
        ("not-respond-async", False),
    ],
)
def test_a_client_may_prefer_not_to_wait(*, prefer: str | None, wanted: bool) -> None:
    assert prefers_async(prefer) is wanted


def test_the_expected_revision_may_be_in_one_place_or_equal_in_both() -> None:
    assert read_expected_revision(None) is None
    assert read_expected_revision(None, 3) == 3
    assert read_expected_revision("*", 3) == 3
    assert read_expected_revision(write_etag(3)) == 3
    assert read_expected_revision(' "3" ', 3) == 3
    with pytest.raises(ValidationFailed):
        read_expected_revision('"3"', 4)
    with pytest.raises(ValidationFailed):
        read_expected_revision('"3"', 0)


@pytest.mark.parametrize(
    "value", ["", "3", 'W/"3"', '"3", "4"', '"x"', '"-1"', f'"{2**63}"', '"٣"', '"' + "9" * 99 + '"']
)
def test_an_invalid_if_match_is_refused(value: str) -> None:
    with pytest.raises(ValidationFailed):
        read_expected_revision(value)


@pytest.mark.parametrize(
    ("header", "unchanged"),
    [(None, False), ('"4"', False), ('"3"', True), ('W/"3"', True), ('"1", "3"', True), ("*", True), ("3", False)],
)
def test_a_client_with_the_current_revision_gets_not_modified(*, header: str | None, unchanged: bool) -> None:
    assert is_unchanged(header, 3) is unchanged


@pytest.mark.parametrize("key", ["a", "a b", "~" * 255, "0d6f0b6a-6b7b-4a0e"])
def test_a_key_is_printable_ascii(key: str) -> None:
    assert read_idempotency_key(key) == key


@pytest.mark.parametrize("key", ["", "a" * 256, "é", "a\tb", "\x7f"])
def test_another_key_is_refused(key: str) -> None:
    with pytest.raises(ValidationFailed):
        read_idempotency_key(key)
    assert read_idempotency_key(None) is None


@pytest.mark.parametrize(
    ("value", "retry"), [(None, False), ("0", False), ("1", True), ("12", True), ("x", False), ("-1", False)]
)
def test_the_retry_count_is_only_a_hint(*, value: str | None, retry: bool) -> None:
    assert announces_retry(value) is retry


def test_the_last_event_is_read_from_the_header_or_the_query() -> None:
    assert read_last_event_id(None, None) == 0
    assert read_last_event_id(None, 4) == 4
    assert read_last_event_id("7", 4) == 7
    for value in ("", "x", "-1", "1.5", "1" * 20):
        with pytest.raises(ValidationFailed):
            read_last_event_id(value, None)
