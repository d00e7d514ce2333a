"""Parts of requests are encoded once and cached up to a limit."""

from functools import partial

import pytest

from server.providers.wire.request_parts import EncodedPartCache, Placeholders
from server.providers.wire.transport import ResponseCapture


def test_a_part_is_encoded_once() -> None:
    written: list[str] = []

    def write(name: str) -> bytes:
        written.append(name)
        return name.encode()

    parts = EncodedPartCache()
    assert [parts.load(name, partial(write, name)) for name in "abaab"] == [b"a", b"b", b"a", b"a", b"b"]
    assert written == ["a", "b"]


def test_the_least_recently_used_part_is_evicted_first() -> None:
    parts = EncodedPartCache(limit_bytes=20)
    for name in ("a", "b", "a", "c"):
        parts.load(name, lambda: bytes(10))
    assert parts.load("a", lambda: b"new") == bytes(10)
    assert parts.load("c", lambda: b"new") == bytes(10)
    assert parts.load("b", lambda: b"new") == b"new"


def test_a_part_above_the_limit_is_kept_while_it_is_used() -> None:
    parts = EncodedPartCache(limit_bytes=1)
    parts.load("a", lambda: bytes(10))
    assert parts.load("a", lambda: b"new") == bytes(10)


def test_placeholders_are_filled_in_any_order() -> None:
    placeholders = Placeholders()
    first, second, third = placeholders.make(b"[1]"), placeholders.make(b'{"x":1.0}'), placeholders.make(b"")
    with ResponseCapture(placeholders.contents) as capture:
        body = f'{{"b": "{second}", "c": ["{third}"], "a": "{first}", "d": "@strata"}}'
        assert capture.fill(body.encode()) == b'{"b": {"x":1.0}, "c": [], "a": [1], "d": "@strata"}'
        with pytest.raises(KeyError):
            capture.fill(f'{{"a": "{first}"}}'.encode())


def test_filled_content_is_not_searched_for_placeholders() -> None:
    placeholders = Placeholders()
    first = placeholders.make(b"1")
    second = placeholders.make(f'"{first}"'.encode())
    with ResponseCapture(placeholders.contents) as capture:
        assert capture.fill(f'["{second}", "{first}"]'.encode()) == f'["{first}", 1]'.encode()
