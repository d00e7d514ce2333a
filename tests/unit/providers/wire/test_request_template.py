"""Parts of requests are written once, as long as there is room for them."""

from functools import partial

import pytest

from server.providers.wire.request_template import EncodedPartCache, Placeholders


def test_a_part_is_written_once() -> None:
    written: list[str] = []

    def write(name: str) -> bytes:
        written.append(name)
        return name.encode()

    parts = EncodedPartCache()
    assert [parts.load(name, partial(write, name)) for name in "abaab"] == [b"a", b"b", b"a", b"a", b"b"]
    assert written == ["a", "b"]


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    parts = EncodedPartCache(limit_bytes=20)
    for name in ("a", "b", "a", "c"):
        parts.load(name, lambda: bytes(10))
    assert parts.load("a", lambda: b"new") == bytes(10)
    assert parts.load("c", lambda: b"new") == bytes(10)
    assert parts.load("b", lambda: b"new") == b"new"


def test_one_that_is_larger_than_all_room_is_held_all_the_same() -> None:
    parts = EncodedPartCache(limit_bytes=1)
    parts.load("a", lambda: bytes(10))
    assert parts.load("a", lambda: b"new") == bytes(10)


def test_parts_are_filled_in_whatever_order_the_sdk_writes_them() -> None:
    placeholders = Placeholders()
    first, second, third = (placeholders.make(name) for name in ("first", "second", "third"))
    body = f'{{"b": "{second}", "c": ["{third}"], "a": "{first}", "d": "@strata"}}'
    template = placeholders.split(body.encode())
    parts = {"first": b"[1]", "second": b'{"x":1.0} , {"t":"@b:2"}', "third": b"", "unused": b"!"}
    assert template.fill(parts) == b'{"b": {"x":1.0} , {"t":"@b:2"}, "c": [], "a": [1], "d": "@strata"}'
    assert template.fill({**parts, "first": b"2"}).endswith(b'"a": 2, "d": "@strata"}')
    with pytest.raises(KeyError, match="second"):
        template.fill({"first": b"", "third": b""})


def test_a_placeholder_that_the_sdk_has_not_written_is_an_error() -> None:
    placeholders = Placeholders()
    first = placeholders.make("first")
    placeholders.make("second")
    with pytest.raises(KeyError, match="second"):
        placeholders.split(f'{{"a": "{first}"}}'.encode())


def test_what_fills_a_place_is_not_searched_for_placeholders() -> None:
    placeholders = Placeholders()
    first, second = placeholders.make("first"), placeholders.make("second")
    template = placeholders.split(f'["{second}", "{first}", "{first} and more"]'.encode())
    filled = template.fill({"first": b"1", "second": f'"{first}"'.encode()})
    assert filled == f'["{first}", 1, "{first} and more"]'.encode()


def test_a_body_without_placeholders_stays_as_it_is() -> None:
    assert Placeholders().split(b'{"a": 1}').fill({}) == b'{"a": 1}'
