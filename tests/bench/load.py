"""The load generator: clients that each take one turn after the other, over connections that cost little.

The clients share their core with Postgres and the upstream. A general HTTP client would use as much CPU as the servers
that are measured, and would be measured with them.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httptools

from tests.bench.processes import Serving

_ANSWER_LIMIT_SECONDS = 60.0


@dataclass(slots=True)
class Answer:
    """The answer to one request."""

    wanted: bytes
    """Bytes of the body whose first appearance is the first event."""
    sent_at: float = field(default_factory=time.perf_counter)
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    first_seconds: float | None = None
    """From the request to the first event."""


class Client(asyncio.Protocol):
    """One HTTP connection that stays open; one request at a time."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._ended: asyncio.Future[Answer] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.close()

    async def post(self, path: str, body: Any, headers: Mapping[str, str], wanted: bytes = b"") -> Answer:
        """Send JSON and wait for the whole answer. Raises `ConnectionError` if the connection is lost before."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._transport, _ = await loop.create_connection(
                lambda: self, self._address.hostname or "", self._address.port or 80
            )
        content = json.dumps(body).encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._address.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n{lines}\r\n"
        )
        self._parser = httptools.HttpResponseParser(self)
        self._ended = loop.create_future()
        self._answer = Answer(wanted)
        self._transport.write(head.encode() + content)
        async with asyncio.timeout(_ANSWER_LIMIT_SECONDS):
            return await self._ended

    async def post_json(self, path: str, body: Any, headers: Mapping[str, str]) -> Any:
        """Send JSON and return the JSON of the answer, which has to have a status of success."""
        answer = await self.post(path, body, headers)
        assert answer.status in {200, 201}, (answer.status, bytes(answer.body))
        return json.loads(answer.body)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"The server closed the connection: {exc}"))

    def on_body(self, data: bytes) -> None:
        answer = self._answer
        assert answer is not None
        answer.body += data
        if answer.first_seconds is None and answer.wanted in answer.body:
            answer.first_seconds = time.perf_counter() - answer.sent_at

    def on_message_complete(self) -> None:
        assert self._ended is not None
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
            self._transport = None
        if not self._ended.done():
            self._ended.set_result(self._answer)


TakeTurn = Callable[[Client, str], Awaitable[Answer]]
"""Take the next turn of one conversation with this text of the user."""


class Target(Protocol):
    """A server that is measured."""

    @property
    def name(self) -> str: ...
    @property
    def serving(self) -> Serving: ...
    async def open_conversation(self, client: Client) -> TakeTurn: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many clients that take so many turns together."""

    clients: int
    turns: int
    turns_per_conversation: int | None
    """None: each client has one conversation, which grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one target did under one load."""

    turns_per_second: float
    cpu_ms: float
    """Of the server, per turn, with its work in the background."""
    first_event_ms: Sequence[float]


async def run_round(target: Target, load: Load) -> Round:
    """Put the load on the target once."""
    share = load.turns // load.clients
    first: list[float] = []

    async def run_client() -> None:
        async with Client(target.serving.url) as client:
            for number in range(share):
                if number % (load.turns_per_conversation or share) == 0:
                    take_turn = await target.open_conversation(client)
                answer = await take_turn(client, f"Task {number}: tell me a story.")
                assert answer.first_seconds is not None, bytes(answer.body)
                first.append(answer.first_seconds * 1000)

    cpu, began = target.serving.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(run_client() for _ in range(load.clients)))
    seconds = time.perf_counter() - began
    await target.serving.wait_until_idle()
    turns = share * load.clients
    return Round(
        turns_per_second=turns / seconds,
        cpu_ms=(target.serving.cpu_seconds() - cpu) * 1000 / turns,
        first_event_ms=first,
    )


async def run_rounds(targets: Sequence[Target], load: Load, rounds: int) -> dict[str, list[Round]]:
    """Put the load on each target in turn, `rounds` times, so that other work of the machine affects all of them."""
    results: dict[str, list[Round]] = {target.name: [] for target in targets}
    for _ in range(rounds):
        for target in targets:
            results[target.name].append(await run_round(target, load))
    return results
