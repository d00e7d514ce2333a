"""Sends responses, with the faults that can occur while sending.

A stream is one event per chunk: `data: {json}` and an empty line, with CRLF; no event names, no comments, no `[DONE]`.
Without `alt=sse` it is one growing JSON array. Sending does not wait for the client to read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from server.emulator.exchange import Exchange
from server.emulator.gemini.errors import ApiError
from server.emulator.gemini.faults import error_mid_stream
from server.emulator.latency import Latency
from server.emulator.reply import Fault, FaultKind

JSON: Final = "application/json; charset=UTF-8"
_BREAKING: Final = frozenset(
    {
        FaultKind.CUT,
        FaultKind.EARLY_END,
        FaultKind.EMPTY_STREAM,
        FaultKind.SILENCE,
        FaultKind.MALFORMED_JSON,
        FaultKind.OVERLOADED_MID_STREAM,
        FaultKind.ERROR_MID_STREAM,
    }
)


class Framing(Protocol):
    """How the documents of a stream are framed."""

    content_type: str

    def frame(self, document: str, index: int) -> bytes: ...

    def end(self, frames: int) -> bytes: ...


class EventFraming:
    """Server-sent events."""

    content_type = "text/event-stream"

    def frame(self, document: str, index: int) -> bytes:  # noqa: ARG002  reason: the other framing needs it
        return f"data: {document}\r\n\r\n".encode()

    def end(self, frames: int) -> bytes:  # noqa: ARG002  reason: the other framing needs it
        return b""


class ArrayFraming:
    """One JSON array, element by element."""

    content_type = JSON

    def frame(self, document: str, index: int) -> bytes:
        return f"{',' if index else '['}{document}\r\n".encode()

    def end(self, frames: int) -> bytes:
        return b"]" if frames else b"[]"


async def send_error(exchange: Exchange, error: ApiError, *, as_list: bool = False) -> None:
    """Send an error; a stream without SSE has it in a list of one."""
    document = [error.render()] if as_list else error.render()
    body = json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
    await exchange.answer(error.code, body, content_type=JSON)


async def send_stream(
    exchange: Exchange, documents: Sequence[Mapping[str, Any]], framing: Framing, latency: Latency, fault: Fault | None
) -> None:
    """Send the documents, up to the fault if there is one."""
    if fault is not None and fault.kind is FaultKind.SLOW:
        latency = latency.slowed()
    breaking = fault if fault is not None and fault.kind in _BREAKING else None
    if breaking is not None and breaking.kind is FaultKind.SILENCE and breaking.after_chunks == 0:
        await exchange.wait_for_disconnect()
        return
    whole = documents
    if breaking is not None:
        # Never the last one: with its finish reason the answer would be complete.
        documents = documents[: min(breaking.after_chunks, len(documents) - 1)]
    await exchange.start(200, content_type=framing.content_type)
    for index, document in enumerate(documents):
        await (latency.wait_next() if index else latency.wait_first())
        await exchange.send(framing.frame(_dump(document), index))
    if breaking is not None:
        await _break(exchange, breaking, framing, len(documents), _dump(whole[len(documents)]))
        return
    await exchange.send(framing.end(len(documents)))
    await exchange.finish()


async def send_unary(exchange: Exchange, document: Mapping[str, Any], latency: Latency, fault: Fault | None) -> None:
    """Send one document, changed by the fault if there is one."""
    if fault is not None and fault.kind is FaultKind.SILENCE:
        await exchange.wait_for_disconnect()
        return
    if error := error_mid_stream(fault):
        await send_error(exchange, error)
        return
    await (latency.slowed() if fault is not None and fault.kind is FaultKind.SLOW else latency).wait_first()
    body = json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
    match fault.kind if fault is not None else None:
        case FaultKind.CUT:
            await exchange.start(200, content_type=JSON)
            await exchange.send(body[: len(body) // 2])
            await exchange.cut()
        case FaultKind.MALFORMED_JSON:
            await exchange.answer(200, body[: len(body) // 2], content_type=JSON)
        case FaultKind.EMPTY_STREAM:
            await exchange.answer(200, b"{}\n", content_type=JSON)
        case FaultKind.EARLY_END:
            unfinished = [{**one, "finishReason": None} for one in document.get("candidates", ())]
            kept = [{name: value for name, value in one.items() if value is not None} for one in unfinished]
            await exchange.answer(200, _dump({**document, "candidates": kept}).encode(), content_type=JSON)
        case _:
            await exchange.answer(200, body, content_type=JSON)


async def _break(exchange: Exchange, fault: Fault, framing: Framing, index: int, document: str) -> None:
    """Apply a fault in place of the next document."""
    next_frame = framing.frame(document, index)
    match fault.kind:
        case FaultKind.CUT:
            await exchange.send(next_frame[: len(next_frame) // 2])
            await exchange.cut()
        case FaultKind.SILENCE:
            await exchange.wait_for_disconnect()
        case FaultKind.MALFORMED_JSON:
            await exchange.send(next_frame[: len(next_frame) // 2] + b"\r\n\r\n")
            await exchange.finish()
        case _:
            if error := error_mid_stream(fault):
                await exchange.send(framing.frame(_dump(error.render()), index))
            await exchange.finish()


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False)
