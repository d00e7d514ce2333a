"""The request log of an emulator: everything but credentials, with a limit."""

from typing import Any

from server.emulator.exchange import Request
from server.emulator.state import RequestLog


def request(**more: Any) -> Request:
    fields: dict[str, Any] = {"method": "POST", "path": "/x", "query": {}, "headers": {}, "body": b""}
    return Request(**fields | more)


def test_credentials_are_never_kept() -> None:
    log = RequestLog()
    names = ("authorization", "cookie", "x-api-key", "x-goog-api-key")
    log.begin(request(headers={**dict.fromkeys(names, "secret"), "accept": "*/*"}, query={"key": "secret"}), at=1)

    (kept,) = log.list()
    assert "secret" not in str(kept)
    assert kept["headers"]["accept"] == "*/*"


def test_bodies_are_json_or_text() -> None:
    log = RequestLog()
    for body in (b'{"a": 1}', b"plain", b"", b"\xff"):
        log.begin(request(body=body), at=1)

    assert [kept["body"] for kept in log.list()] == [{"a": 1}, "plain", None, "\N{REPLACEMENT CHARACTER}"]


def test_numbers_increase_and_can_be_selected() -> None:
    log = RequestLog()
    for _ in range(3):
        log.begin(request(), at=1)
    log.clear()
    log.begin(request(), at=1)

    assert [kept["number"] for kept in log.list()] == [4]
    assert log.list(after=4) == []


def test_only_the_last_ten_thousand_are_kept() -> None:
    log = RequestLog()
    for _ in range(10_001):
        log.begin(request(), at=1)

    assert [log.list()[0]["number"], len(log.list())] == [2, 10_000]
