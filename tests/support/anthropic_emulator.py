"""The Anthropic emulator on a free port, a clock that can be moved, and the stock SDK connected to it."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic, BadRequestError

from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.latency import FULL_SPEED, Latency
from server.emulator.script import Script, load_script
from server.emulator.server import emulating
from server.emulator.state import EmulatorState, build_state

FABLE = "claude-fable-5-2"
"""Checks what precedes a thinking block, for every account."""
OPUS = "claude-opus-5-5"
"""Checks it for new accounts."""
OLD_OPUS = "claude-opus-5"
"""Does not check it."""
MANUAL = "claude-sonnet-4-5"
"""Has a thinking budget, shows its thinking, and accepts prefill."""
BINDING = "thinking-binding-controls-2026-08-01"
COMPACT = "compact-2026-09-04"

# Loading the certificates of the system takes longer than most of these tests, and nothing here is encrypted.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@dataclass(slots=True)
class MovableClock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, kw_only=True)
class AnthropicEmulator:
    url: str
    state: EmulatorState
    clock: MovableClock
    http: httpx2.AsyncClient
    opened: AsyncExitStack

    def client(self, api_key: str = "key-a", **options: Any) -> AsyncAnthropic:
        """The stock SDK, without its retries."""
        http = httpx2.AsyncClient(verify=_NO_TLS, timeout=60)
        client = AsyncAnthropic(
            base_url=self.url, api_key=api_key, http_client=http, **{"max_retries": 0, "timeout": 60, **options}
        )
        self.opened.push_async_callback(client.close)
        return client

    async def post(
        self,
        body: Mapping[str, Any],
        *,
        path: str = "/v1/messages",
        key: str = "key-a",
        betas: str = "",
        fault: str = "",
        version: str = "2026-10-21",
    ) -> httpx2.Response:
        """A request in bare HTTP, for what the SDK would not send or not return."""
        headers = {
            "x-api-key": key,
            "anthropic-version": version,
            **({"anthropic-beta": betas} if betas else {}),
            **({"x-emulator-fault": fault} if fault else {}),
        }
        return await self.http.post(path, json=dict(body), headers=headers)

    async def accepts(self, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The answer to a request that has to be accepted."""
        response = await self.post(body, **options)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refusal(self, body: Mapping[str, Any], *, path: str = "/v1/messages", **options: Any) -> str:
        """The text with which the API refuses a request as invalid, as the SDK reports it."""
        text, _ = await self.refusal_with_code(body, path=path, **options)
        return text

    async def refusal_with_code(
        self, body: Mapping[str, Any], *, path: str = "/v1/messages", betas: str = "", key: str = "key-a"
    ) -> tuple[str, str | None]:
        client = self.client(key)
        with pytest.raises(BadRequestError) as caught:
            await client.post(
                path, body=dict(body), cast_to=object, options={"headers": {"anthropic-beta": betas} if betas else {}}
            )
        error = caught.value
        assert error.type == "invalid_request_error"
        assert error.request_id
        return str(error.api_message), error.error_code


@asynccontextmanager
async def anthropic_emulator(script: str = "", *, latency: Latency = FULL_SPEED) -> AsyncIterator[AnthropicEmulator]:
    clock = MovableClock()
    state = build_state(script=load_script(script) if script else Script(()), clock=clock, latency=latency)
    async with (
        emulating(build_anthropic_app(state)) as url,
        httpx2.AsyncClient(base_url=url, timeout=60, verify=_NO_TLS) as http,
        AsyncExitStack() as opened,
    ):
        yield AnthropicEmulator(url=url, state=state, clock=clock, http=http, opened=opened)


def user(*content: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [block(one) for one in content]}


def assistant(*content: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [block(one) for one in content]}


def system(*content: str | Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": [block(one) for one in content], **more}


def block(content: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": content} if isinstance(content, str) else dict(content)


def marked(text: str, ttl: str | None = None) -> dict[str, Any]:
    """A text block with a cache marker."""
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}


def tool_use(id_: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "get_weather", "input": arguments}


def tool_result(id_: str, content: Any = "sunny", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **more}


def asking(*messages: Mapping[str, Any], model: str = FABLE, **more: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 1_000, "messages": [dict(message) for message in messages], **more}


def answers_to(message: Mapping[str, Any]) -> dict[str, Any]:
    """Results for all tool calls of a message."""
    calls = [one for one in message["content"] if one["type"] == "tool_use"]
    return user(*(tool_result(call["id"], f"{call['input']} is done") for call in calls))


def assistant_message(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an answer to the message that the next request sends back."""
    return {"role": "assistant", "content": answer["content"]}
