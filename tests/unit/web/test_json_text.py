import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given

from server.web.json_text import decode_json, encode_json
from tests.strategies import json_values


@given(json_values)
def test_any_value_is_one_line_of_json_in_utf_8(value: object) -> None:
    encoded = encode_json(value)
    assert b"\n" not in encoded
    assert b"\r" not in encoded
    assert json.loads(encoded.decode()) == json.loads(json.dumps(value))


@given(json_values)
def test_what_was_written_is_read(value: object) -> None:
    assert decode_json(json.dumps(value).encode()) == json.loads(json.dumps(value))


def test_only_what_has_no_place_in_utf_8_is_escaped() -> None:
    assert encode_json("å😀") == '"å😀"'.encode()
    assert encode_json("å\ud83d") == b'"\\u00e5\\ud83d"'
    assert encode_json("\x00") == b'"\\u0000"'


def test_times_are_written_in_utc() -> None:
    moment = datetime(2026, 1, 31, 11, 30, tzinfo=timezone(timedelta(hours=2)))
    assert encode_json([moment, moment.astimezone(UTC)]) == b'["2026-01-31T09:30:00Z","2026-01-31T09:30:00Z"]'


@pytest.mark.parametrize("body", [b"NaN", b"-Infinity", b"1e400", b"{", b'"\xff"', b"", b"9" * 5000, b"[1,]", b"'x'"])
def test_what_is_no_json_or_could_not_be_written_again_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_json(body)
