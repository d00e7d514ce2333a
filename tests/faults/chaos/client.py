"""Clients of a chaos run: each owns conversations, sends tasks to any server, and retries as an application should.

A client never sends a new input before the last one has ended, so the expected content of a conversation is exact.
Every input has an idempotency key; after a lost connection it is sent again with the same key, or the stream is resumed
with `Last-Event-ID`, on any server that is up.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2

from tests.faults.chaos.journal import Journal

ENDS = frozenset({"turn.completed", "turn.failed", "turn.cancelled"})
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_STUCK_SECONDS = 90.0
"""Longer than any fault lasts, with the lease and the database's limits on top."""
_READ_SECONDS = 20.0
_RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class Gone(Exception):
    """The connection ended, or the server cannot answer now."""


class Servers(Protocol):
    """The addresses of the servers."""

    def urls(self) -> Sequence[str]: ...


@dataclass(slots=True, kw_only=True)
class OpenConversation:
    """One conversation as its client has it."""

    id: str
    provider: str
    pending: list[str] = field(default_factory=list)
    inputs: int = 0


class Client:
    """Takes turns until it is stopped."""

    def __init__(self, name: str, servers: Servers, key: str, journal: Journal, seed: int) -> None:
        self._name = name
        self._servers = servers
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._journal = journal
        self._random = random.Random(seed)  # noqa: S311  reason: it only selects what to try
        self._http = httpx2.AsyncClient(timeout=httpx2.Timeout(_READ_SECONDS, connect=3.0))
        self.conversations: list[OpenConversation] = []
        self.turns_ended = 0
        self.stop = asyncio.Event()

    async def run(self, assistants: dict[str, str], conversations: int) -> None:
        """`assistants` has the id of an assistant by provider."""
        providers = sorted(assistants)
        for number in range(conversations):
            provider = providers[number % len(providers)]
            created = await self.retry_write("POST", "/v1/conversations", {"assistant_id": assistants[provider]}, 201)
            self.conversations.append(OpenConversation(id=created["id"], provider=provider))
            self._journal.write("created", conversation=created["id"], provider=provider)
        while not self.stop.is_set():
            await self.take_turn(self._random.choice(self.conversations))

    async def close(self) -> None:
        await self._http.aclose()

    async def take_turn(self, conversation: OpenConversation, *, plain: bool = False) -> dict[str, Any] | None:
        """One input until the end of its turn. `plain`: without any disturbance. None if it never ended."""
        conversation.inputs += 1
        key = f"{self._name}-{conversation.id[-6:]}-{conversation.inputs}"
        body = self._compose(conversation, key)
        self._journal.write("sent", key=key, conversation=conversation.id, body=body)
        exchange = _Exchange(conversation=conversation, key=key, body=body, trick="" if plain else self._choose_trick())
        deadline = time.monotonic() + _STUCK_SECONDS
        while exchange.ended is None and not exchange.refused:
            try:
                await self._pursue(exchange)
            except Gone:
                if time.monotonic() > deadline:
                    self._journal.write("stuck", key=key, conversation=conversation.id)
                    return None
                await asyncio.sleep(self._random.uniform(0.05, 0.4))
        if exchange.ended is None:
            conversation.pending = []
            return None
        conversation.pending = [call["id"] for call in exchange.ended["conversation"]["pending_tool_calls"]]
        self.turns_ended += 1
        return exchange.ended

    def _compose(self, conversation: OpenConversation, key: str) -> dict[str, Any]:
        if conversation.pending:
            results = [{"tool_call_id": call_id, "output": {"key": key}} for call_id in conversation.pending]
            return {"tool_results": results}
        filler = "Tell me more about the weather. " * self._random.choice((1, 1, 1, 8, 60))
        return {"input": f"[{key}] {filler}"}

    def _choose_trick(self) -> str:
        names = ("", "json", "stall", "leave", "cancel", "async")
        return self._random.choices(names, weights=(70, 8, 4, 8, 6, 4))[0]

    async def _pursue(self, exchange: "_Exchange") -> None:
        """Try to reach the end of a turn with one request. Raises `Gone`."""
        if exchange.seq is not None and self._random.random() < 0.6:
            await self._resume(exchange)
            return
        trick, exchange.trick = exchange.trick, ""
        path = f"/v1/conversations/{exchange.conversation.id}/turns"
        headers = {"idempotency-key": exchange.key}
        if trick in {"json", "async"}:
            prefer = {"prefer": "respond-async"} if trick == "async" else {}
            status, answer = await self._ask("POST", path, exchange.body, headers | prefer)
            self._read_whole(exchange, status, answer)
            return
        async with aclosing(self._stream("POST", path, exchange.body, headers, exchange)) as events:
            await self._read_events(exchange, events, trick)

    async def _resume(self, exchange: "_Exchange") -> None:
        path = f"/v1/conversations/{exchange.conversation.id}/turns/{exchange.seq}/events"
        headers = {"last-event-id": str(exchange.last_id)} if exchange.last_id else {}
        async with aclosing(self._stream("GET", path, None, headers, exchange)) as events:
            await self._read_events(exchange, events, "")

    async def _read_events(
        self, exchange: "_Exchange", events: AsyncIterator[tuple[int, str, dict[str, Any]]], trick: str
    ) -> None:
        received = 0
        async for number, name, data in events:
            received += 1
            if name == "turn.started":
                self._started(exchange, data)
            self._journal.write(
                "event", conversation=exchange.conversation.id, seq=exchange.seq, id=number, name=name, data=data
            )
            exchange.last_id = number
            if name in ENDS:
                self._ended(exchange, data)
                return
            if trick == "leave" and received >= 3:
                raise Gone
            if trick == "stall" and received >= 2:
                # Stop reading while the server continues to send.
                await asyncio.sleep(self._random.uniform(0.5, 3.0))
                raise Gone
            if trick == "cancel" and received >= 2:
                trick = ""
                await self._ask(
                    "POST", f"/v1/conversations/{exchange.conversation.id}/cancel", {"turn_seq": exchange.seq}, {}
                )
        raise Gone

    def _read_whole(self, exchange: "_Exchange", status: int, answer: dict[str, Any]) -> None:
        if status == 200 and "turn" in answer:
            self._ended(exchange, answer)
        elif status == 202:
            seq = answer["turn"]["seq"]
            self._started(exchange, {"input_seq": seq - 1, "seq": seq})
            raise Gone
        elif status < 500 and status not in _RETRY_STATUSES:
            self._refused(exchange, status, answer)
        else:
            # The response to a failed turn contains the turn; the stream has it too, which distinguishes it from a
            # refusal.
            raise Gone

    async def _stream(
        self, method: str, path: str, body: Any, headers: dict[str, str], exchange: "_Exchange"
    ) -> AsyncGenerator[tuple[int, str, dict[str, Any]], None]:
        wanted = self._headers | headers | {"accept": "text/event-stream"}
        content = None if body is None else json.dumps(body).encode()
        try:
            async with self._http.stream(method, self._pick() + path, headers=wanted, content=content) as answer:
                if answer.status_code == 204:
                    # Nothing follows the last received event, so it was the end, and the connection was lost after it.
                    exchange.last_id = 0
                    raise Gone
                if answer.status_code != 200:
                    refusal = json.loads(await answer.aread() or b"{}")
                    if answer.status_code in _RETRY_STATUSES or answer.status_code == 404:
                        raise Gone
                    self._refused(exchange, answer.status_code, refusal)
                    return
                fields: dict[str, str] = {}
                async for line in answer.aiter_lines():
                    if line:
                        name, _, value = line.partition(": ")
                        fields[name] = value
                    elif "data" in fields:
                        yield int(fields["id"]), fields["event"], json.loads(fields["data"])
                        fields = {}
        except (httpx2.HTTPError, OSError) as error:
            raise Gone from error

    async def _ask(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        try:
            content = None if body is None else json.dumps(body).encode()
            answer = await self._http.request(
                method, self._pick() + path, headers=self._headers | headers, content=content
            )
        except (httpx2.HTTPError, OSError) as error:
            raise Gone from error
        return answer.status_code, json.loads(answer.content or b"{}")

    async def retry_write(self, method: str, path: str, body: Any, wanted: int) -> dict[str, Any]:
        """Send the request until it is answered with the expected status."""
        while True:
            try:
                status, answer = await self._ask(method, path, body, {})
            except Gone:
                status, answer = 0, {}
            if status == wanted:
                return answer
            await asyncio.sleep(0.1)

    def _pick(self) -> str:
        urls = self._servers.urls()
        if not urls:
            raise Gone
        return self._random.choice(list(urls))

    def _started(self, exchange: "_Exchange", data: dict[str, Any]) -> None:
        if exchange.seq is None:
            exchange.seq = data["seq"]
            self._journal.write(
                "started",
                key=exchange.key,
                conversation=exchange.conversation.id,
                input_seq=data["input_seq"],
                seq=data["seq"],
            )

    def _ended(self, exchange: "_Exchange", data: dict[str, Any]) -> None:
        exchange.ended = data
        self._journal.write(
            "ended", key=exchange.key, conversation=exchange.conversation.id, seq=data["turn"]["seq"], turn=data["turn"]
        )

    def _refused(self, exchange: "_Exchange", status: int, answer: dict[str, Any]) -> None:
        exchange.refused = True
        self._journal.write("refused", key=exchange.key, status=status, code=answer.get("code"), answer=answer)


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One input and the progress of its turn."""

    conversation: OpenConversation
    key: str
    body: dict[str, Any]
    trick: str
    seq: int | None = None
    last_id: int = 0
    ended: dict[str, Any] | None = None
    refused: bool = False
