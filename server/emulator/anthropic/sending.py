"""Sends a response, with the faults that can occur while sending."""

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
    """Raise `Refused` for the faults that replace a response."""
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
class SendOptions:
    """How a response is sent."""

    fault: Fault | None
    latency: Latency
    headers: Mapping[str, str]
    begin: Callable[[], None]
    """Called before the first byte is sent."""


async def send_events(exchange: Exchange, events: Iterable[Event], options: SendOptions) -> None:
    """Send the stream up to the fault: after the given number of deltas, at the latest before the end."""
    fault = options.fault
    if fault is not None and fault.kind is FaultKind.SILENCE and not fault.after_chunks:
        await exchange.wait_for_disconnect()
        return
    speed = _speed(options)
    await speed.wait_first()
    options.begin()
    await exchange.start(200, content_type=_STREAM, headers={**options.headers, "cache-control": "no-cache"})
    if fault is not None and fault.kind is FaultKind.EMPTY_STREAM:
        await exchange.finish()
        return
    pending = fault if fault is not None and fault.kind in _STOPPING else None
    deltas = 0
    for event in events:
        if pending is not None and _is_due(event, deltas, pending):
            if not await _apply_fault(exchange, pending):
                return
            pending = None
        if event["type"] == "content_block_delta":
            deltas += 1
            await speed.wait_next()
        await exchange.send(encode_event(event))
    await exchange.finish()


async def send_message(exchange: Exchange, message: dict[str, Any], options: SendOptions) -> None:
    """Send the whole message at once, damaged by the fault if there is one."""
    kind = options.fault.kind if options.fault else None
    body = json.dumps(message, ensure_ascii=False).encode()
    if kind is FaultKind.SILENCE:
        await exchange.wait_for_disconnect()
        return
    await _speed(options).wait_first()
    options.begin()
    if kind in {FaultKind.CUT, FaultKind.EARLY_END, FaultKind.MALFORMED_JSON, FaultKind.EMPTY_STREAM}:
        await exchange.start(200, content_type=_JSON, headers=options.headers)
        if kind is not FaultKind.EMPTY_STREAM:
            await exchange.send(body[: len(body) // 2])
        await (exchange.cut() if kind is FaultKind.CUT else exchange.finish())
        return
    await exchange.answer(200, body, content_type=_JSON, headers=options.headers)


def encode_event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _speed(options: SendOptions) -> Latency:
    fault = options.fault
    return options.latency.slowed() if fault is not None and fault.kind is FaultKind.SLOW else options.latency


def _is_due(event: Event, deltas: int, fault: Fault) -> bool:
    if event["type"] == "message_delta":
        return True
    return event["type"] == "content_block_delta" and deltas == fault.after_chunks


async def _apply_fault(exchange: Exchange, fault: Fault) -> bool:
    """Apply a fault in the middle of a stream. Returns whether the stream continues."""
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
