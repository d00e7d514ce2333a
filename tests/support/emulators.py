"""Both providers as emulators in the process of the test: their replies, their faults, and the requests they
received.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.app.providers import Providers, open_providers
from server.app.settings import Settings
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.exchange import ASGIApp, Receive, Scope, Send
from server.emulator.gemini.app import build_gemini_app
from server.emulator.reply import Fault, FaultKind, Turn
from server.emulator.server import emulating
from server.emulator.state import Clock, EmulatorState, build_state
from server.providers.choice import ANTHROPIC, GEMINI, KEY_VARIABLES, ProviderChoice
from tests.contracts.provider_harness import Lines

MODELS = {GEMINI: "gemini-3.1-pro-preview", ANTHROPIC: "claude-opus-5-5"}
BOTH = tuple(MODELS)


@dataclass(slots=True)
class MovedClock:
    """A clock for emulators that a test can move forward."""

    ahead_seconds: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """One emulated provider."""

    name: str
    url: str
    state: EmulatorState
    lines: Lines

    @property
    def model(self) -> str:
        return MODELS[self.name]

    def queue_replies(self, *turns: Turn) -> None:
        """Queue the next replies of the model; afterwards it improvises again."""
        self.lines.turns.extend(turns)

    def inject_fault(self, kind: FaultKind, *, times: int = 1, **options: Any) -> None:
        """Inject faults into the next requests."""
        self.state.faults.arm(Fault(kind=kind, **options), times)

    def requests(self) -> list[dict[str, Any]]:
        """The received requests, oldest first."""
        return self.state.request_log.list()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedProviders:
    """Both emulated providers."""

    gemini: Emulated
    anthropic: Emulated

    def __getitem__(self, name: str) -> Emulated:
        return {GEMINI: self.gemini, ANTHROPIC: self.anthropic}[name]

    def point(self, settings: Settings) -> Settings:
        """The settings with the addresses of the emulators."""
        return settings.model_copy(
            update={"gemini_base_url": self.gemini.url, "anthropic_base_url": self.anthropic.url}
        )

    @asynccontextmanager
    async def open(self, settings: Settings, key: str = "test") -> AsyncIterator[Providers]:
        """The providers of the server, connected to the emulators."""
        environment = {names[0]: key for names in KEY_VARIABLES.values()}
        choice = ProviderChoice(provider=GEMINI, api_key=key)
        async with open_providers(self.point(settings), choice, environment) as providers:
            yield providers


@dataclass(slots=True)
class Stage:
    """An application that delegates to another one in each test. Sharing one HTTP server saves the time to stop it."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The servers for the emulators of consecutive tests: a URL and a stage for each provider."""

    gemini: tuple[str, Stage]
    anthropic: tuple[str, Stage]

    def play(self, *, clock: Clock = time.time, implicit_cache: bool = True) -> EmulatedProviders:
        """Both providers with a new state."""
        return EmulatedProviders(
            gemini=_play(GEMINI, self.gemini, partial(build_gemini_app, implicit_cache=implicit_cache), clock),
            anthropic=_play(ANTHROPIC, self.anthropic, build_anthropic_app, clock),
        )


@asynccontextmanager
async def open_stages() -> AsyncIterator[Stages]:
    gemini, anthropic = Stage(build_gemini_app(build_state())), Stage(build_anthropic_app(build_state()))
    async with emulating(gemini) as gemini_url, emulating(anthropic) as anthropic_url:
        yield Stages(gemini=(gemini_url, gemini), anthropic=(anthropic_url, anthropic))


def _play(name: str, place: tuple[str, Stage], build: Callable[[EmulatorState], ASGIApp], clock: Clock) -> Emulated:
    url, stage = place
    lines = Lines()
    state = build_state(script=lines, clock=clock)
    stage.app = build(state)
    return Emulated(name=name, url=url, state=state, lines=lines)


@asynccontextmanager
async def emulating_both(*, clock: Clock = time.time, implicit_cache: bool = True) -> AsyncIterator[EmulatedProviders]:
    """Both providers on separate servers."""
    async with open_stages() as stages:
        yield stages.play(clock=clock, implicit_cache=implicit_cache)
