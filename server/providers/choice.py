"""The default provider of a server and its key.

| --provider | keys in the environment | --api-key | outcome                                          |
|------------|-------------------------|-----------|--------------------------------------------------|
| named      | any                     | given     | that provider with that key                      |
| named      | its own                 | not given | that provider with its key from the environment  |
| named      | not its own             | not given | error: the key is missing                        |
| not named  | one provider's          | any       | that provider, with --api-key if it is given     |
| not named  | both providers'         | any       | error: name one                                  |
| not named  | none                    | any       | error with usage                                 |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from server.conversation.errors import SettingsInvalid

GEMINI: Final = "gemini"
ANTHROPIC: Final = "anthropic"
KEY_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    GEMINI: ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    ANTHROPIC: ("ANTHROPIC_API_KEY",),
}

DEFAULT_MODELS: Final[Mapping[str, str]] = {GEMINI: "gemini-3.1-pro-preview", ANTHROPIC: "claude-sonnet-5-5"}
"""The models of assistants that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderChoice:
    """A provider and its key."""

    provider: str
    api_key: str = field(repr=False)


def choose_provider(named: str | None, api_key: str | None, environment: Mapping[str, str]) -> ProviderChoice:
    """Choose the default provider by the table above. Raises `SettingsInvalid`, whose text never contains a key."""
    keys = {provider: found for provider in KEY_VARIABLES if (found := find_key(provider, environment))}
    if named is not None:
        return _choose_named(named, api_key or keys.get(named))
    if len(keys) > 1:
        raise SettingsInvalid(
            "The environment has keys of several providers.", hint="Name one with --provider gemini or anthropic."
        )
    if not keys:
        variables = " or ".join(names[0] for names in KEY_VARIABLES.values())
        raise SettingsInvalid(
            "No provider is chosen and the environment has no key.",
            hint=f"Set {variables}, or use --provider gemini|anthropic with --api-key.",
        )
    provider, key = next(iter(keys.items()))
    return ProviderChoice(provider=provider, api_key=api_key or key)


def find_key(provider: str, environment: Mapping[str, str]) -> str | None:
    """Return the provider's key in the environment; an empty one counts as missing."""
    return next((environment[name] for name in KEY_VARIABLES[provider] if environment.get(name)), None)


def _choose_named(named: str, key: str | None) -> ProviderChoice:
    if named not in KEY_VARIABLES:
        raise SettingsInvalid(f"There is no provider named {named}.", hint="Name gemini or anthropic.")
    if not key:
        raise SettingsInvalid(
            f"There is no key for {named}.", hint=f"Set {' or '.join(KEY_VARIABLES[named])}, or use --api-key."
        )
    return ProviderChoice(provider=named, api_key=key)
