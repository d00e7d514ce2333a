"""A provider connected to its emulator, and observation of the emulator's side of the connection."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.conversation.assistant import Tool
from server.conversation.block import TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.event import ProviderEvent
from server.conversation.payload import CallSettings, Layer, Payload, PayloadMessage
from server.emulator.exchange import ASGIApp, Receive, Scope, Send
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall, Turn
from server.emulator.script import Script
from server.emulator.server import emulating
from server.emulator.state import EmulatorState, build_state
from server.providers.provider import Provider, ProviderAnswer, ProviderStream
from server.providers.wire.transport import WireLimits

WAIT_SECONDS = 30.0
"""The maximum wait for something that should happen at once."""
BRIEF = WireLimits(silence_seconds=1)

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    Tool(name="get_weather", description="The weather in a city", parameters=_CITY),
    Tool(name="get_time", description="The time in a city", parameters=_CITY),
)


class BuildProvider(Protocol):
    """The class of a provider."""

    def __call__(self, api_key: str, *, base_url: str | None = None, limits: WireLimits | None = None) -> Provider: ...


class Watch:
    """Wraps an application: reports when a request has arrived, and when its answer has ended or its client
    disconnected.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._visits: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        over = asyncio.Event()
        self._visits.put_nowait(over)
        try:
            await self._app(scope, receive, send)
        finally:
            over.set()

    async def next_visit(self) -> asyncio.Event:
        """Wait for the next request; the returned event is set when the peer has finished it."""
        return await asyncio.wait_for(self._visits.get(), WAIT_SECONDS)

    def forget(self) -> None:
        while not self._visits.empty():
            self._visits.get_nowait()


class Lines(Script):
    """A script that a test extends as it runs."""

    def __init__(self) -> None:
        super().__init__(())
        self.turns: deque[Turn] = deque()

    def take(self, request_number: int, prompt: str, *, after_tools: bool) -> Turn | None:
        return self.turns.popleft() if self.turns else None


@dataclass(slots=True, kw_only=True)
class ProviderHarness:
    provider: Provider
    build: BuildProvider
    url: str
    model: str
    state: EmulatorState
    lines: Lines
    watch: Watch
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    def another(self, key: str = "key-b", limits: WireLimits | None = None) -> Provider:
        """A separate provider, closed with the harness."""
        provider = self.build(key, base_url=self.url, limits=limits)
        self.opened.push_async_callback(provider.close)
        return provider

    def queue_replies(self, *turns: Turn) -> None:
        """Queue the next replies of the model."""
        self.lines.turns.extend(turns)

    def inject_fault(self, kind: FaultKind, **options: Any) -> None:
        """Inject a fault into the next request."""
        self.state.faults.arm(Fault(kind=kind, **options))

    def payload(self, messages: Sequence[bytes], **more: Any) -> Payload:
        return build_payload(self.model, messages, **more)

    def ask(self, text: str = "What is the weather in Oslo?", **more: Any) -> Payload:
        return self.payload([self.provider.user_message([TextBlock(text=text)], {})], **more)

    def requests(self) -> list[dict[str, Any]]:
        return self.state.request_log.list()

    async def renew(self) -> None:
        """Clear the state of earlier tests, and open new connections: one that a fault has closed must not be
        reused.
        """
        await self.provider.close()
        self.provider = self.build("key-a", base_url=self.url)
        self.reset()

    def reset(self) -> None:
        self.state.request_log.clear()
        self.state.faults.clear()
        self.lines.turns.clear()
        self.watch.forget()


@asynccontextmanager
async def open_harness(
    build_app: Callable[[EmulatorState], ASGIApp], build_provider: BuildProvider, model: str
) -> AsyncIterator[ProviderHarness]:
    lines = Lines()
    state = build_state(script=lines)
    watch = Watch(build_app(state))
    async with emulating(watch) as url, AsyncExitStack() as opened:
        harness = ProviderHarness(
            provider=build_provider("key-a", base_url=url),
            build=build_provider,
            url=url,
            model=model,
            state=state,
            lines=lines,
            watch=watch,
            opened=opened,
        )
        try:
            yield harness
        finally:
            await harness.provider.close()


def build_payload(model: str, messages: Sequence[bytes], **more: Any) -> Payload:
    return Payload(
        model=model,
        messages=tuple(PayloadMessage(layer=Layer.BUFFERED, data=data) for data in messages),
        **{"static_text": "You help.", "tools": TOOLS, "settings": CallSettings(max_output_tokens=4_000), **more},
    )


async def consume(stream: ProviderStream) -> list[ProviderEvent]:
    return [event async for event in stream.events()]


async def complete(provider: Provider, payload: Payload) -> ProviderAnswer:
    """The whole answer to a successful request."""
    stream = provider.open_stream(payload)
    await consume(stream)
    return stream.answer


def step(number: int, *, text: str = "") -> Reply:
    """A step of a tool loop: some thinking, and two calls at once."""
    calls = tuple(ToolCall(name=tool.name, arguments={"city": f"City {number}"}) for tool in TOOLS)
    return Reply(thinking=f"Step {number}: both tools.", text=text, tool_calls=calls)


def answer_calls(provider: Provider, answer: ProviderAnswer) -> bytes:
    """Results for all calls of an answer."""
    results = [
        ToolResultBlock(tool_call_id=block.id, output={"celsius": 4})
        for block in answer.blocks
        if isinstance(block, ToolCallBlock)
    ]
    return provider.tool_message(results, answer.blocks)


def native_of(answer: ProviderAnswer) -> bytes:
    assert answer.native is not None
    return answer.native.data


def comparable(request: dict[str, Any]) -> dict[str, Any]:
    """A logged request without what belongs to the connection and not to the call."""
    passing = {"accept-encoding", "connection", "content-length", "host", "transfer-encoding"}
    headers = {name: value for name, value in request["headers"].items() if name not in passing}
    return {**{name: request[name] for name in ("method", "path", "query", "body")}, "headers": headers}
