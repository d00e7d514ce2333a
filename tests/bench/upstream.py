"""A provider that costs nothing: it answers every request at once with the same bytes, encoded beforehand.

It understands the paths of Gemini, of Claude and of the OpenAI APIs, which gateways call, and reads no body. All chunks
of an answer leave in one write, each as a chunk of HTTP, so a reader gets them in one read or a few; with
`separate_writes` each leaves in a write of its own, which makes the relay more expensive and Strata hardly. The strict
emulator would use more CPU than the server that is measured.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import httptools

from tests.bench.processes import Serving, wait_for_end

CHUNKS: Final = 50
WORDS: Final = "some words of an answer, as many as come at once "
GEMINI_MODEL, ANTHROPIC_MODEL, OPENAI_MODEL = "gemini-3.8-flash", "claude-fable-5-2", "gpt-bench"


def gemini_chunks(count: int = CHUNKS) -> list[bytes]:
    def chunk(part: dict[str, Any], **more: Any) -> bytes:
        candidate = {"content": {"parts": [part], "role": "model"}, **more, "index": 0}
        usage = {"promptTokenCount": 1200, "candidatesTokenCount": 9, "totalTokenCount": 1209, "thoughtsTokenCount": 80}
        document = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": GEMINI_MODEL, "responseId": "r1"}
        return f"data: {json.dumps(document)}\r\n\r\n".encode()

    return [
        *[chunk({"text": WORDS})] * (count - 1),
        chunk({"text": "", "thoughtSignature": "c2ln"}, finishReason="STOP"),
    ]


def anthropic_chunks(count: int = CHUNKS) -> list[bytes]:
    usage = {"input_tokens": 1200, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": ANTHROPIC_MODEL, "content": []}
    delta = _event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": WORDS})
    ending = {"stop_reason": "end_turn", "stop_sequence": None}
    return [
        _event(type="message_start", message={**message, "stop_reason": None, "stop_sequence": None, "usage": usage}),
        _event(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *[delta] * (count - 5),
        _event(type="content_block_stop", index=0),
        _event(type="message_delta", delta=ending, usage={"output_tokens": 9}),
        _event(type="message_stop"),
    ]


def chat_chunks(count: int = CHUNKS) -> list[bytes]:
    """Of OpenAI's Chat Completions."""

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": OPENAI_MODEL}
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode()

    usage = {"prompt_tokens": 1200, "completion_tokens": 9, "total_tokens": 1209}
    return [
        chunk({"role": "assistant", "content": ""}),
        *[chunk({"content": WORDS})] * (count - 3),
        chunk({}, "stop", usage=usage),
        b"data: [DONE]\n\n",
    ]


def responses_chunks(count: int = CHUNKS) -> list[bytes]:
    """Of OpenAI's Responses."""
    numbers = iter(range(count))
    text = WORDS * (count - 8)
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": OPENAI_MODEL, "parallel_tool_calls": True}
    head |= {"tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None, "instructions": None}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant"}
    said = {**item, "status": "completed", "content": [{**part, "text": text}]}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 1200, "output_tokens": 9, "total_tokens": 1209, **details}

    def event(kind: str, **data: Any) -> bytes:
        return _event(type=f"response.{kind}", sequence_number=next(numbers), **data)

    return [
        event("created", response={**head, "status": "in_progress", "output": []}),
        event("in_progress", response={**head, "status": "in_progress", "output": []}),
        event("output_item.added", output_index=0, item={**item, "status": "in_progress", "content": []}),
        event("content_part.added", **place, part=part),
        *[event("output_text.delta", **place, delta=WORDS, logprobs=[]) for _ in range(count - 8)],
        event("output_text.done", **place, text=text, logprobs=[]),
        event("content_part.done", **place, part={**part, "text": text}),
        event("output_item.done", output_index=0, item=said),
        event("completed", response={**head, "status": "completed", "output": [said], "usage": usage}),
    ]


def _event(**data: Any) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


def _stream(chunks: Sequence[bytes]) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n"]


def _document(value: Any, status: str = "200 OK") -> list[bytes]:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


def _answers() -> Mapping[bytes, list[bytes]]:
    """The pieces of the answer by the end of the path."""
    return {
        b":streamGenerateContent": _stream(gemini_chunks()),
        b":countTokens": _document({"totalTokens": 1200}),
        b"/count_tokens": _document({"input_tokens": 1200}),
        b"/messages": _stream(anthropic_chunks()),
        b"/chat/completions": _stream(chat_chunks()),
        b"/responses": _stream(responses_chunks()),
        b"/models": _document({"object": "list", "data": [{"id": OPENAI_MODEL, "object": "model", "owned_by": "b"}]}),
        b"/health": _document({}),
    }


class Upstream(asyncio.Protocol):
    """One connection; it stays open between requests."""

    def __init__(self, find_answer: Callable[[bytes], Sequence[bytes]]) -> None:
        self._find_answer = find_answer
        self._path = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # reason: it is one with both directions
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.partition(b"?")[0]

    def on_message_complete(self) -> None:
        self._write(self._find_answer(self._path), 0)

    def _write(self, pieces: Sequence[bytes], index: int) -> None:
        self._transport.write(pieces[index])
        if index + 1 < len(pieces):
            # In the next iteration of the loop: uvloop joins the writes of one iteration.
            asyncio.get_running_loop().call_soon(self._write, pieces, index + 1)


async def serve_upstream(parent: Connection, separate_writes: bool = False) -> None:  # noqa: FBT001, FBT002  reason: the arguments of a process are positional
    """Serve until the process has to end; see `in_process`."""
    answers = {end: pieces if separate_writes else [b"".join(pieces)] for end, pieces in _answers().items()}
    unknown = _document({"error": {"message": "The upstream of the benchmark has no such path."}}, "404 Not Found")

    def find_answer(path: bytes) -> Sequence[bytes]:
        return next((answer for end, answer in answers.items() if path.endswith(end)), unknown)

    server = await asyncio.get_running_loop().create_server(lambda: Upstream(find_answer), "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()
    parent.send(Serving(pid=os.getpid(), url=f"http://{host}:{port}"))
    await wait_for_end(parent)
