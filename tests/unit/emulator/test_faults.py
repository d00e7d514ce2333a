"""Faults on demand, as written in a header or a body."""

from typing import Any

import pytest

from server.emulator.faults import ArmedFaults, FaultInvalid, parse_fault_body, parse_fault_header
from server.emulator.reply import Fault, FaultKind


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ("cut", Fault(kind=FaultKind.CUT)),
        ("cut;after_chunks=2", Fault(kind=FaultKind.CUT, after_chunks=2)),
        ("rate_limited ; retry_after=1.5", Fault(kind=FaultKind.RATE_LIMITED, retry_after_seconds=1.5)),
    ],
)
def test_a_header_names_a_fault(header: str, fault: Fault) -> None:
    assert parse_fault_header(header) == fault


@pytest.mark.parametrize(
    "header", ["", "cutt", "cut;x=1", "cut;after_chunks", "cut;after_chunks=x", "cut;after_chunks=-1"]
)
def test_a_header_that_names_none_is_refused(header: str) -> None:
    with pytest.raises(FaultInvalid):
        parse_fault_header(header)


def test_a_body_arms_a_fault_for_a_number_of_requests() -> None:
    fault, times = parse_fault_body({"kind": "cut", "times": 2, "after_chunks": 1, "message": "gone"})
    faults = ArmedFaults()
    faults.arm(fault, times)

    assert [faults.take() for _ in range(3)] == [fault, fault, None]
    assert fault == Fault(kind=FaultKind.CUT, after_chunks=1, message="gone")


@pytest.mark.parametrize(
    "body", [None, [], {}, {"kind": "cut", "often": 2}, {"kind": ["cut"]}, {"kind": "cut", "times": -1}]
)
def test_an_invalid_body_is_refused(body: Any) -> None:
    with pytest.raises(FaultInvalid):
        parse_fault_body(body)


def test_raw_bytes_are_given_in_base64() -> None:
    fault, _ = parse_fault_body({"kind": "raw", "body_base64": "/w==", "status": 502, "content_type": "text/html"})
    assert fault == Fault(kind=FaultKind.RAW, body=b"\xff", status=502, content_type="text/html")


@pytest.mark.parametrize("wrong", [{"body_base64": "?"}, {"status": 42}, {"status": "x"}])
def test_invalid_raw_bytes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FaultInvalid):
        parse_fault_body({"kind": "raw", **wrong})
