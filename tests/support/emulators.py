"""Both providers as emulators in the test's own process: what they say, what goes wrong, what they were asked."""

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
from tests.contracts.provider_rig import Lines

MODELS = {GEMINI: "gemini-3.1-pro-preview", ANTHROPIC: "claude-opus-5-5"}
BOTH = tuple(MODELS)


@dataclass(slots=True)
class MovedClock:
    """A clock for emulators that a test may put forward."""

    ahead_seconds: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """One provider."""

    name: str
    url: str
    state: EmulatorState
    lines: Lines

    @property
    def model(self) -> str:
        return MODELS[self.name]

    def says(self, *turns: Turn) -> None:
        """What the model says next; then it improvises again."""
        self.lines.turns.extend(turns)

    def fails(self, kind: FaultKind, *, times: int = 1, **options: Any) -> None:
        """What goes wrong with the next requests."""
        self.state.faults.arm(Fault(kind=kind, **options), times)

    def requests(self) -> list[dict[str, Any]]:
        """What it was asked, oldest first."""
        return self.state.request_log.list()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedProviders:
    """Both."""

    gemini: Emulated
    anthropic: Emulated

    def __getitem__(self, name: str) -> Emulated:
        return {GEMINI: self.gemini, ANTHROPIC: self.anthropic}[name]

    def point(self, settings: Settings) -> Settings:
        """The settings with the emulators' addresses."""
        return settings.model_copy(
            update={"gemini_base_url": self.gemini.url, "anthropic_base_url": self.anthropic.url}
        )

    @asynccontextmanager
    async def open(self, settings: Settings, key: str = "test") -> AsyncIterator[Providers]:
        """Our own providers, pointed at the emulators."""
        environment = {names[0]: key for names in KEY_VARIABLES.values()}
        choice = ProviderChoice(provider=GEMINI, api_key=key)
        async with open_providers(self.point(settings), choice, environment) as providers:
            yield providers


@dataclass(slots=True)
class Stage:
    """An application whose part is played by another one in each test: one server for all of them saves its ending."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Where the emulators of one test after the other are served: a URL and a stage for each."""

    gemini: tuple[str, Stage]
    anthropic: tuple[str, Stage]

    def play(self, *, clock: Clock = time.time, implicit_cache: bool = True) -> EmulatedProviders:
        """Both providers, new."""
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
    """On servers of their own."""
    async with open_stages() as stages:
        yield stages.play(clock=clock, implicit_cache=implicit_cache)
