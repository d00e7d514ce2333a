"""Opening providers: those whose keys are set, each with its own connections."""

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
"""Reading stored responses needs no key."""
_NO_KEY: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """The providers that can be called."""

    default: str | None = None
    """The provider of assistants that name none."""
    by_name: Mapping[str, Provider] = field(default_factory=dict)
    call_slots: CallSlots = field(default_factory=CallSlots)
    """Shared by all of them."""


@asynccontextmanager
async def open_providers(
    settings: Settings, choice: ProviderChoice | None, environment: Mapping[str, str]
) -> AsyncIterator[Providers]:
    """Open the chosen provider and every other one whose key is in the environment, until the block ends.

    Without a choice there is no default; without any key there are no providers.
    """
    keys = {name: key for name in KEY_VARIABLES if (key := find_key(name, environment))}
    if choice is not None:
        keys[choice.provider] = choice.api_key
    async with _open(settings, keys) as (by_name, slots):
        yield Providers(default=None if choice is None else choice.provider, by_name=by_name, call_slots=slots)


@asynccontextmanager
async def open_offline_providers(settings: Settings) -> AsyncIterator[Mapping[str, Provider]]:
    """Open all providers without keys, to encode requests again and read stored responses. They cannot be called."""
    async with _open(settings, dict.fromkeys(KEY_VARIABLES, _NO_KEY)) as (by_name, _):
        yield by_name


@asynccontextmanager
async def _open(settings: Settings, keys: Mapping[str, str]) -> AsyncIterator[tuple[Mapping[str, Provider], CallSlots]]:
    slots = CallSlots(settings.provider_call_limit, settings.provider_call_wait_seconds)
    async with AsyncExitStack() as stack:
        by_name = {}
        for name, key in keys.items():
            by_name[name] = _build(settings, name, key, slots)
            stack.push_async_callback(by_name[name].close)
        yield by_name, slots


def _build(settings: Settings, name: str, key: str, slots: CallSlots) -> Provider:
    """Build a provider. Its SDK is imported here, because that takes a second or more."""
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
            raise SettingsInvalid(f"There is no provider named {name}.")
