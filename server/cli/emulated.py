"""A program whose providers are emulators in the same process, for `strata demo` and `strata seed`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.gemini.app import build_gemini_app
from server.emulator.server import emulating
from server.emulator.state import EmulatorState
from server.providers.choice import ANTHROPIC, GEMINI, KEY_VARIABLES, ProviderChoice

_KEY: Final = "emulated"
"""The emulators accept any key."""


@asynccontextmanager
async def open_emulated_program(
    settings: Settings, *, gemini: EmulatorState, anthropic: EmulatorState
) -> AsyncIterator[Program]:
    """Open the program with both providers emulated, until the block ends. It calls no other server."""
    async with (
        emulating(build_gemini_app(gemini)) as gemini_url,
        emulating(build_anthropic_app(anthropic)) as anthropic_url,
    ):
        emulated = settings.model_copy(
            update={f"{GEMINI}_base_url": gemini_url, f"{ANTHROPIC}_base_url": anthropic_url}
        )
        choice = ProviderChoice(provider=GEMINI, api_key=_KEY)
        environment = {names[0]: _KEY for names in KEY_VARIABLES.values()}
        async with (
            open_providers(emulated, choice, environment) as providers,
            open_program(emulated, providers=providers) as program,
        ):
            yield program
