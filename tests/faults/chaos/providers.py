"""The providers of a chaos run: the strict emulators, with random answers, pauses and faults, all recorded."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.exchange import ASGIApp, Receive, Scope, Send
from server.emulator.gemini.app import build_gemini_app
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall, Turn
from server.emulator.script import Script
from server.emulator.server import emulating
from server.emulator.state import build_state
from tests.faults.chaos.journal import Journal
from tests.support.fuzzing import mutate, without_length

WORDS = ["rain", "wind", "sun", "fog", "snow", "sea", "hill", "road", "bridge", "harbour", "market", "lantern"]
HARMLESS = frozenset({FaultKind.SLOW, FaultKind.BAD_AUTH, FaultKind.CONTEXT_EXCEEDED})
"""Left out: slow answers only cost time, and the other two report a wrong configuration."""
FAULTS = tuple(kind for kind in FaultKind if kind not in HARMLESS)


class RandomScript(Script):
    """Random answers: texts, tool calls, and now and then a fault."""

    def __init__(self, seed: int, fault_share: float) -> None:
        super().__init__(())
        self._random = random.Random(seed)  # noqa: S311  reason: test data
        self.fault_share = fault_share

    def take(self, request_number: int, prompt: str, *, after_tools: bool) -> Turn | None:
        if self._random.random() < self.fault_share:
            return Fault(kind=self._random.choice(FAULTS), after_chunks=self._random.randrange(6))
        text = " ".join(self._random.choices(WORDS, k=self._random.choice((2, 10, 60))))
        if self._random.random() < (0.15 if after_tools else 0.3):
            cities = self._random.sample(WORDS, self._random.choice((1, 2)))
            calls = tuple(ToolCall(name="get_weather", arguments={"city": city}) for city in cities)
            return Reply(thinking=f"I need to know about {text}.", tool_calls=calls)
        return Reply(thinking="That is easy." if self._random.random() < 0.5 else "", text=text)


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Wraps an emulator: records every model request and every byte of its answer."""

    provider: str
    journal: Journal
    random: random.Random
    fuzz_share: float
    pause_seconds: float
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    def around(self, app: ASGIApp) -> ASGIApp:
        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or not _is_model_call(scope["path"]):
                await app(scope, receive, send)
                return
            await self._record(app, scope, receive, send)

        return recorded

    async def _record(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self.numbers)
        request, answer = hashlib.sha256(), bytearray()
        status, complete = 0, False
        fuzzed = self.random.random() < self.fuzz_share

        async def receive_hashed() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.request":
                request.update(message.get("body", b""))
                if not message.get("more_body", False):
                    self.journal.write(
                        "asked",
                        provider=self.provider,
                        number=number,
                        request_sha256=request.hexdigest(),
                        fuzzed=fuzzed,
                    )
            return message

        async def send_kept(message: MutableMapping[str, Any]) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                if fuzzed:
                    message = without_length(message)
            else:
                body = message.get("body", b"")
                if fuzzed and body and self.random.random() < 0.3:
                    body = mutate(self.random, body)
                answer.extend(body)
                complete = not message.get("more_body", False)
                message = {**message, "body": body}
                await asyncio.sleep(self.random.uniform(0, self.pause_seconds))
            await send(message)

        try:
            await app(scope, receive_hashed, send_kept)
        finally:
            name = f"{self.provider}-{number}"
            self.journal.keep_answer(name, bytes(answer))
            self.journal.write(
                "answered", provider=self.provider, number=number, status=status, file=name, complete=complete
            )


def _is_model_call(path: str) -> bool:
    return "streamGenerateContent" in path or "generateContent" in path or path.endswith("/messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosProviders:
    """The addresses of the providers, and the sources of their faults."""

    urls: dict[str, str]
    scripts: tuple[RandomScript, ...]
    recorders: tuple[Recorder, ...]

    def calm(self) -> None:
        """From now on they answer without faults."""
        for script in self.scripts:
            script.fault_share = 0.0
        for recorder in self.recorders:
            recorder.fuzz_share = 0.0


@asynccontextmanager
async def open_chaos_providers(
    journal: Journal, seed: int, *, fault_share: float, fuzz_share: float, pause_seconds: float
) -> AsyncIterator[ChaosProviders]:
    urls: dict[str, str] = {}
    scripts, recorders = [], []
    async with AsyncExitStack() as stack:
        for place, (name, build) in enumerate((("gemini", build_gemini_app), ("anthropic", build_anthropic_app))):
            script = RandomScript(seed + place, fault_share)
            recorder = Recorder(
                provider=name,
                journal=journal,
                random=random.Random(seed + 10 + place),  # noqa: S311  reason: test data
                fuzz_share=fuzz_share,
                pause_seconds=pause_seconds,
            )
            app = recorder.around(build(build_state(script=script, seed=seed)))
            urls[name] = await stack.enter_async_context(emulating(app))
            scripts.append(script)
            recorders.append(recorder)
        yield ChaosProviders(urls=urls, scripts=tuple(scripts), recorders=tuple(recorders))
