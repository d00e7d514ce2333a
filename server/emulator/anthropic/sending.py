"""Sending an answer, and the ways in which that can go wrong."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.anthropic.answer import Event
from server.emulator.anthropic.errors import ApiProblem, Refused
from server.emulator.exchange import Exchange
from server.emulator.latency import Latency
from server.emulator.reply import Fault, FaultKind

_STREAM: Final = "text/event-stream; charset=utf-8"
_JSON: Final = "application/json"
_SPEND_LIMIT: Final = (
    "You have reached your specified API usage limits. You will regain access on the first of the month."
)
_NO_CREDIT: Final = (
    "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase "
    "credits."
)

_PROBLEMS: Final = {
    FaultKind.RATE_LIMITED: ApiProblem(
        type="rate_limit_error",
        message="This request would exceed your organization's rate limit. Please try again later.",
        retry_after_seconds=1,
    ),
    FaultKind.RATE_LIMITED_NO_DELAY: ApiProblem(type="rate_limit_error", message=_SPEND_LIMIT),
    FaultKind.INTERNAL: ApiProblem(type="api_error", message="Internal server error"),
    FaultKind.UNAVAILABLE: ApiProblem(type="api_error", message="Service Unavailable", status=503),
    FaultKind.OVERLOADED: ApiProblem(type="overloaded_error", message="Overloaded"),
    FaultKind.GATEWAY_TIMEOUT: ApiProblem(type="timeout_error", message="Request timed out"),
    FaultKind.SIGNATURE_REJECTED: ApiProblem(
        type="invalid_request_error", message="messages.1.content.0: Invalid `signature` in `thinking` block"
    ),
    FaultKind.NO_CREDIT: ApiProblem(type="invalid_request_error", message=_NO_CREDIT),
    FaultKind.BAD_AUTH: ApiProblem(type="authentication_error", message="invalid x-api-key"),
}
_BROKEN_STREAMS: Final = {
    FaultKind.OVERLOADED_MID_STREAM: FaultKind.OVERLOADED,
    FaultKind.ERROR_MID_STREAM: FaultKind.INTERNAL,
}
_STOPPING: Final = frozenset(
    {*_BROKEN_STREAMS, FaultKind.CUT, FaultKind.EARLY_END, FaultKind.SILENCE, FaultKind.MALFORMED_JSON}
)


def refuse_by(fault: Fault | None, *, is_stream: bool, is_compaction: bool = False) -> None:
    """Raises `Refused` for the faults that come in place of an answer."""
    if fault is None:
        return
    kind = fault.kind if is_stream else _BROKEN_STREAMS.get(fault.kind, fault.kind)
    problem = _PROBLEMS.get(kind)
    if problem is None:
        return
    delay = fault.retry_after_seconds
    raise Refused(
        ApiProblem(
            type=problem.type,
            message=fault.message or problem.message,
            error_code="compaction_unavailable" if is_compaction and kind is FaultKind.OVERLOADED else None,
            status=problem.status,
            retry_after_seconds=problem.retry_after_seconds if delay is None else delay,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """How an answer is sent."""

    fault: Fault | None
    latency: Latency
    headers: Mapping[str, str]
    begin: Callable[[], None]
    """Called when the first byte is about to be sent."""


async def send_events(exchange: Exchange, events: Iterable[Event], performance: Performance) -> None:
    """The stream, up to where the fault strikes: after so many deltas, at the latest before the end is announced."""
    fault = performance.fault
    if fault is not None and fault.kind is FaultKind.SILENCE and not fault.after_chunks:
        await exchange.wait_for_disconnect()
        return
    speed = _speed(performance)
    await speed.wait_first()
    performance.begin()
    await exchange.start(200, content_type=_STREAM, headers={**performance.headers, "cache-control": "no-cache"})
    if fault is not None and fault.kind is FaultKind.EMPTY_STREAM:
        await exchange.finish()
        return
    pending = fault if fault is not None and fault.kind in _STOPPING else None
    deltas = 0
    for event in events:
        if pending is not None and _is_due(event, deltas, pending):
            if not await _strike(exchange, pending):
                return
            pending = None
        if event["type"] == "content_block_delta":
            deltas += 1
            await speed.wait_next()
        await exchange.send(encode_event(event))
    await exchange.finish()


async def send_message(exchange: Exchange, message: dict[str, Any], performance: Performance) -> None:
    """The whole message at once, broken as the fault has it."""
    kind = performance.fault.kind if performance.fault else None
    body = json.dumps(message, ensure_ascii=False).encode()
    if kind is FaultKind.SILENCE:
        await exchange.wait_for_disconnect()
        return
    await _speed(performance).wait_first()
    performance.begin()
    if kind in {FaultKind.CUT, FaultKind.EARLY_END, FaultKind.MALFORMED_JSON, FaultKind.EMPTY_STREAM}:
        await exchange.start(200, content_type=_JSON, headers=performance.headers)
        if kind is not FaultKind.EMPTY_STREAM:
            await exchange.send(body[: len(body) // 2])
        await (exchange.cut() if kind is FaultKind.CUT else exchange.finish())
        return
    await exchange.answer(200, body, content_type=_JSON, headers=performance.headers)


def encode_event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _speed(performance: Performance) -> Latency:
    fault = performance.fault
    return performance.latency.slowed() if fault is not None and fault.kind is FaultKind.SLOW else performance.latency


def _is_due(event: Event, deltas: int, fault: Fault) -> bool:
    if event["type"] == "message_delta":
        return True
    return event["type"] == "content_block_delta" and deltas == fault.after_chunks


async def _strike(exchange: Exchange, fault: Fault) -> bool:
    """Does what the fault does in the middle of a stream. Whether the stream goes on."""
    match fault.kind:
        case FaultKind.CUT:
            await exchange.cut()
        case FaultKind.SILENCE:
            await exchange.wait_for_disconnect()
        case FaultKind.MALFORMED_JSON:
            await exchange.send(b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"del\n\n')
            return True
        case FaultKind.OVERLOADED_MID_STREAM | FaultKind.ERROR_MID_STREAM:
            problem = _PROBLEMS[_BROKEN_STREAMS[fault.kind]]
            error = {"type": problem.type, "message": fault.message or problem.message}
            await exchange.send(encode_event({"type": "error", "error": error}))
            await exchange.finish()
        case _:
            await exchange.finish()
    return False
