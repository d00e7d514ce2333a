"""The providers as values: those whose keys are there, each with its own connections."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from server.app.settings import Settings
from server.conversation.errors import SettingsInvalid
from server.providers.anthropic.stream import AnthropicFold
from server.providers.call_slots import CallSlots
from server.providers.choice import ANTHROPIC, GEMINI, KEY_VARIABLES, ProviderChoice, find_key
from server.providers.gemini.stream import GeminiFold
from server.providers.provider import Fold, Provider
from server.providers.wire.transport import WireLimits, WireTransport

FOLDS: Final[Mapping[str, Callable[[], Fold]]] = {
    GEMINI: GeminiFold,
    ANTHROPIC: AnthropicFold,
}
"""Reading what a provider once said takes no key."""
_NO_KEY: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Who can be asked."""

    default: str | None = None
    """Whom an assistant gets that names nobody."""
    by_name: Mapping[str, Provider] = field(default_factory=dict)
    call_slots: CallSlots = field(default_factory=CallSlots)
    """Shared by all of them."""


@asynccontextmanager
async def open_providers(
    settings: Settings, choice: ProviderChoice, environment: Mapping[str, str]
) -> AsyncIterator[Providers]:
    """The chosen provider, and every other one whose key is in the environment, until the block ends."""
    keys = {name: key for name in KEY_VARIABLES if (key := find_key(name, environment))}
    keys[choice.provider] = choice.api_key
    slots = _build_slots(settings)
    async with AsyncExitStack() as stack:
        opened = {}
        for name, key in keys.items():
            opened[name] = _build(settings, name, key, slots)
            stack.push_async_callback(opened[name].close)
        yield Providers(default=choice.provider, by_name=opened, call_slots=slots)


@asynccontextmanager
async def open_available_providers(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[Providers]:
    """Every provider whose key is in the environment, be it none, until the block ends."""
    slots = _build_slots(settings)
    async with AsyncExitStack() as stack:
        opened = {}
        for name in KEY_VARIABLES:
            if key := find_key(name, environment):
                opened[name] = _build(settings, name, key, slots)
                stack.push_async_callback(opened[name].close)
        yield Providers(by_name=opened, call_slots=slots)


@asynccontextmanager
async def open_offline_providers(settings: Settings) -> AsyncIterator[Mapping[str, Provider]]:
    """All providers by name, for writing requests again and reading answers. They have no key: nobody can be asked."""
    slots = _build_slots(settings)
    async with AsyncExitStack() as stack:
        opened = {}
        for name in KEY_VARIABLES:
            opened[name] = _build(settings, name, _NO_KEY, slots)
            stack.push_async_callback(opened[name].close)
        yield opened


def _build_slots(settings: Settings) -> CallSlots:
    return CallSlots(settings.provider_call_limit, settings.provider_call_wait_seconds)


def _build(settings: Settings, name: str, key: str, slots: CallSlots) -> Provider:
    """An SDK takes a second or more to import: only who asks its provider waits for it."""
    limits = WireLimits(
        connect_seconds=settings.provider_connect_seconds,
        silence_seconds=settings.provider_silence_seconds,
        call_seconds=settings.provider_call_seconds,
    )
    transport = WireTransport(limits, slots)
    match name:
        case "gemini":
            from server.providers.gemini.provider import GeminiProvider  # noqa: PLC0415  reason: see above

            return GeminiProvider(key, base_url=settings.gemini_base_url, transport=transport)
        case "anthropic":
            from server.providers.anthropic.provider import AnthropicProvider  # noqa: PLC0415  reason: see above

            return AnthropicProvider(key, base_url=settings.anthropic_base_url, transport=transport)
        case _:
            raise SettingsInvalid(f"There is no provider called {name}.")
