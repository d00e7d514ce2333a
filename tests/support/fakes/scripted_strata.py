"""A small Strata server for tests of its client: real HTTP, scripted answers, and a network that breaks on request.

It implements what the guarantees of the client depend on: a turn is accepted once per idempotency key, and its events
can be read again from any number. It models nothing else of the server.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

CONVERSATION_ID: Final = "conv_1"
KEY: Final = "strata_test_key"

Event = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A scripted response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    streams: bool = False
    """The body is chunked, and more may follow."""

    def encode(self) -> bytes:
        length = {"transfer-encoding": "chunked"} if self.streams else {"content-length": str(len(self.body))}
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in {**self.headers, **length, "connection": "close"}.items()]
        return "\r\n".join([*lines, "", ""]).encode() + (chunk(self.body) if self.streams else self.body)


@dataclass(slots=True, kw_only=True)
class ScriptedTurn:
    """An accepted turn."""

    seq: int
    body: Any
    events: Sequence[Event]
    readable: int
    """The number of its events that exist so far."""


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""


def problem(status: int, code: str, detail: str = "It cannot be.", hint: str = "", **headers: str) -> Answer:
    """An error in the format of the server."""
    body = {"type": f"urn:strata:error:{code}", "status": status, "code": code, "detail": detail, "hint": hint}
    return answer_json(
        {**body, "request_id": "req_1", "extra": [1]},
        status=status,
        headers={"content-type": "application/problem+json", **{k.replace("_", "-"): v for k, v in headers.items()}},
    )


def answer_json(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    content = {"content-type": "application/json", **(headers or {})}
    return Answer(status=status, headers=content, body=json.dumps(body).encode())


def usage(**tokens: int) -> dict[str, int]:
    names = ("fresh_input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
    return {name: tokens.get(name, 0) for name in names}


def status_of(revision: int, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    state = "awaiting_tools" if calls else "idle"
    return {"id": CONVERSATION_ID, "revision": revision, "state": state, "pending_tool_calls": list(calls)}


def turn_json(seq: int, blocks: Sequence[Mapping[str, Any]], **members: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "kind": "model_response",
        "state": "complete",
        "blocks": list(blocks),
        "created_at": "2026-11-16T08:00:00Z",
        "stop_reason": "end_turn",
        "error": None,
        "usage": usage(fresh_input_tokens=200, cache_read_tokens=800, output_tokens=12),
        "cost_usd": 0.0123,
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
        **members,
    }


def answer_events(seq: int, *pieces: str, thinking: str = "", **members: Any) -> list[Event]:
    """The events of an answer with text."""
    events: list[Event] = [("thinking.delta", {"text": thinking})] if thinking else []
    events += [("text.delta", {"text": piece}) for piece in pieces]
    blocks = [{"type": "thinking", "text": thinking}] if thinking else []
    turn = turn_json(seq, [*blocks, {"type": "text", "text": "".join(pieces)}], **members)
    name = {"complete": "turn.completed", "cancelled": "turn.cancelled"}.get(turn["state"], "turn.failed")
    return [_started(seq), *events, ("usage", turn["usage"]), (name, {"turn": turn, "conversation": status_of(seq)})]


def called(seq: int, *calls: Mapping[str, Any]) -> list[Event]:
    """The events of an answer with tool calls."""
    events: list[Event] = [_started(seq)]
    for call in calls:
        arguments = json.dumps(call["arguments"])
        events += [
            ("tool_call.begin", {"id": call["id"], "name": call["name"]}),
            ("tool_call.delta", {"id": call["id"], "arguments_json": arguments}),
            ("tool_call.end", call),
        ]
    turn = turn_json(seq, [{"type": "tool_call", **call} for call in calls], stop_reason="tool_use")
    return [*events, ("turn.completed", {"turn": turn, "conversation": status_of(seq, calls)})]


def failed(seq: int, *pieces: str, code: str = "provider_overloaded") -> list[Event]:
    """The events of a failed answer."""
    error = {"code": code, "message": "The provider is overloaded.", "hint": "Try again in a moment."}
    return answer_events(seq, *pieces, state="failed", stop_reason="error", error=error)


def encode_events(events: Sequence[Event], after: int = 0) -> bytes:
    numbered = list(enumerate(events, 1))[after:]
    return b"".join(
        f"id: {number}\nevent: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
        for number, (name, data) in numbered
    )


def _started(seq: int) -> Event:
    return ("turn.started", {"conversation_id": CONVERSATION_ID, "input_seq": seq - 1, "seq": seq})


class ScriptedStrata:
    """Answers turns with `replies` in order, and other requests from `answers`."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self.request_came = asyncio.Event()
        """Set at each request; a test that waits for the next one clears it first."""
        self.replies: deque[Callable[[int], Sequence[Event]]] = deque()
        """The events of the next turns, by their number."""
        self.answers: dict[tuple[str, str], deque[Answer]] = {}
        """Responses by method and path; the last one is repeated. They have precedence over everything else."""
        self.cuts: deque[int | None] = deque()
        """After how many bytes the connections of the next responses are cut; None: not at all."""
        self.resets = False
        """A cut is a reset, which may discard what was sent just before it."""
        self.preface = b""
        """The beginning of every stream, such as a comment."""
        self.turns: dict[str, ScriptedTurn] = {}
        """The accepted turns by idempotency key."""
        self.held = asyncio.Event()
        """While it is cleared, running turns send nothing after their first events."""
        self.held.set()
        self.held_behind = 2
        self.conversation: dict[str, Any] = {**status_of(0), "assistant_id": "asst_1", "assistant_version": 1}
        self.seen_bytes = 0
        """Of the newest response, before any cut."""

    def script(self, method: str, path: str, *answers: Answer) -> None:
        self.answers[method, path] = deque(answers)

    def asked(self, method: str, path: str) -> list[Request]:
        return [request for request in self.requests if (request.method, request.path) == (method, path)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):  # A client may disconnect at any time.
                request = await _read_request(reader)
                self.requests.append(request)
                self.request_came.set()
                answer = self._answer(request)
                await self._write(writer, answer)
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        data = answer.encode()
        self.seen_bytes = len(data)
        cut = self.cuts.popleft() if self.cuts else None
        writer.write(data if cut is None else data[:cut])
        await writer.drain()
        if cut is not None and cut < len(data):
            if self.resets:
                writer.transport.abort()
            return
        if answer.streams:
            await self._write_rest(writer)

    async def _write_rest(self, writer: asyncio.StreamWriter) -> None:
        if not self.held.is_set():
            await self.held.wait()
            turn = list(self.turns.values())[-1]
            writer.write(chunk(encode_events(turn.events, turn.readable)))
            turn.readable = len(turn.events)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _answer(self, request: Request) -> Answer:
        scripted = self.answers.get((request.method, request.path))
        if scripted:
            return scripted.popleft() if len(scripted) > 1 else scripted[0]
        turns = f"/v1/conversations/{CONVERSATION_ID}/turns"
        if (request.method, request.path) == ("POST", turns):
            return self._take_turn(request)
        if request.method == "GET" and request.path.startswith(f"{turns}/") and request.path.endswith("/events"):
            seq = int(request.path.split("/")[-2])
            turn = next(turn for turn in self.turns.values() if turn.seq == seq)
            return self._stream(turn, after=int(request.headers.get("last-event-id", "0")))
        if (request.method, request.path) == ("GET", f"/v1/conversations/{CONVERSATION_ID}"):
            return answer_json(self.conversation)
        return problem(404, "route_not_found", f"There is no {request.method} {request.path}.")

    def _take_turn(self, request: Request) -> Answer:
        key = request.headers["idempotency-key"]
        known = key in self.turns
        if not known:
            seq = 2 * (len(self.turns) + 1)
            events = self.replies.popleft()(seq)
            readable = len(events) if self.held.is_set() else self.held_behind
            self.turns[key] = ScriptedTurn(seq=seq, body=request.body, events=events, readable=readable)
        if self.turns[key].body != request.body:
            return problem(409, "idempotency_key_reused", x_should_retry="false")
        headers = {"idempotency-replayed": "true"} if known else {}
        if request.headers.get("prefer") == "respond-async":
            turn = {"seq": self.turns[key].seq, "kind": "model_response", "state": "running"}
            return answer_json({"turn": turn, "conversation": status_of(1)}, status=202, headers=headers)
        return self._stream(self.turns[key], headers=headers)

    def _stream(self, turn: ScriptedTurn, *, after: int = 0, headers: Mapping[str, str] | None = None) -> Answer:
        return Answer(
            headers={"content-type": "text/event-stream; charset=utf-8", **(headers or {})},
            body=self.preface + encode_events(turn.events[: turn.readable], after),
            streams=True,
        )


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    return Request(
        method=method,
        path=parts.path,
        query=dict(parse_qsl(parts.query)),
        headers=headers,
        body=json.loads(body) if body else None,
    )


@asynccontextmanager
async def open_scripted_strata() -> AsyncIterator[ScriptedStrata]:
    """A server on a free port of this machine."""
    scripted = ScriptedStrata()
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        scripted.held.set()
        server.close()
        await server.wait_closed()
