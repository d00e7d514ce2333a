"""A client of a running server over plain HTTP, without the Python client of the project."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.conftest import StrataServer
from tests.support.emulators import MODELS

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city", "parameters": _CITY}

StreamedEvent = tuple[int, str, Any]
"""An event of a stream: its number, its name, its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiClient:
    """Sends requests with one key."""

    client: httpx2.AsyncClient
    key: str

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        """Send one request. Underscores in the names of headers become hyphens."""
        return await self.client.request(method, path, headers=self.headers(headers), **_content(body))

    async def expect(self, status: int, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Send a request, assert the status, and return the JSON of the answer."""
        answer = await self.ask(method, path, body, **headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def begin(self, provider: str = "gemini", **body: Any) -> str:
        """Create a conversation with a new assistant of the provider that has one tool. Returns its id."""
        definition = {"name": "helper", "provider": provider, "model": MODELS[provider], "tools": [WEATHER]}
        assistant = await self.expect(201, "POST", "/v1/assistants", definition)
        made = await self.expect(201, "POST", "/v1/conversations", {"assistant_id": assistant["id"], **body})
        return str(made["id"])

    async def say(self, conversation_id: str, text: str = "Tell me a story.", **headers: str) -> Any:
        """Take a turn and wait for its end."""
        return await self.expect(200, "POST", turns(conversation_id), {"input": text}, **headers)

    @asynccontextmanager
    async def listen(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> AsyncIterator[tuple[httpx2.Response, AsyncIterator[StreamedEvent]]]:
        """Open a stream. Yields the response and its events as they arrive."""
        wanted = self.headers({"accept": "text/event-stream", **headers})
        async with self.client.stream(method, path, headers=wanted, **_content(body)) as answer:
            yield answer, _events(answer)

    async def read_events(self, method: str, path: str, body: Any = None, **headers: str) -> list[StreamedEvent]:
        """All events of a stream."""
        async with self.listen(method, path, body, **headers) as (answer, events):
            assert answer.status_code == 200, (await answer.aread()).decode()
            return [event async for event in events]

    def headers(self, more: dict[str, str]) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", **{name.replace("_", "-"): more[name] for name in more}}


def turns(conversation_id: str, seq: int | None = None) -> str:
    return f"/v1/conversations/{conversation_id}/turns" + ("" if seq is None else f"/{seq}")


@asynccontextmanager
async def open_api(server: StrataServer, key: str | None = None) -> AsyncIterator[ApiClient]:
    async with httpx2.AsyncClient(base_url=server.url, timeout=30) as client:
        yield ApiClient(client=client, key=key or server.client_key)


async def _events(answer: httpx2.Response) -> AsyncIterator[StreamedEvent]:
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def _content(body: Any) -> dict[str, Any]:
    if body is None:
        return {}
    return {"content": body} if isinstance(body, bytes) else {"content": json.dumps(body).encode()}
