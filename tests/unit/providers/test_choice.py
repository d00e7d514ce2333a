"""The choice of provider and key, case by case."""

import pytest

from server.conversation.errors import SettingsInvalid
from server.providers.choice import ProviderChoice, choose_provider

GEMINI_KEY = {"GEMINI_API_KEY": "g-key"}
GOOGLE_KEY = {"GOOGLE_API_KEY": "google-key"}
ANTHROPIC_KEY = {"ANTHROPIC_API_KEY": "a-key"}
BOTH = GEMINI_KEY | ANTHROPIC_KEY


@pytest.mark.parametrize(
    ("named", "api_key", "environment", "provider", "key"),
    [
        ("gemini", None, GEMINI_KEY, "gemini", "g-key"),
        ("gemini", None, GOOGLE_KEY, "gemini", "google-key"),
        ("gemini", None, GEMINI_KEY | GOOGLE_KEY, "gemini", "g-key"),
        ("gemini", None, BOTH, "gemini", "g-key"),
        ("anthropic", None, BOTH, "anthropic", "a-key"),
        ("anthropic", "mine", {}, "anthropic", "mine"),
        ("anthropic", "mine", BOTH, "anthropic", "mine"),
        (None, None, GEMINI_KEY, "gemini", "g-key"),
        (None, None, ANTHROPIC_KEY, "anthropic", "a-key"),
        (None, "mine", ANTHROPIC_KEY, "anthropic", "mine"),
        (None, None, ANTHROPIC_KEY | {"GEMINI_API_KEY": ""}, "anthropic", "a-key"),
    ],
)
def test_a_provider_is_chosen(
    named: str | None, api_key: str | None, environment: dict[str, str], provider: str, key: str
) -> None:
    assert choose_provider(named, api_key, environment) == ProviderChoice(provider=provider, api_key=key)


@pytest.mark.parametrize(
    ("named", "api_key", "environment", "sentence"),
    [
        (None, None, BOTH, "several providers"),
        (None, "mine", BOTH, "several providers"),
        (None, None, {}, "No provider is chosen"),
        (None, "mine", {}, "No provider is chosen"),
        ("gemini", None, ANTHROPIC_KEY, "no key for gemini"),
        ("anthropic", None, {"ANTHROPIC_API_KEY": ""}, "no key for anthropic"),
        ("openai", "mine", BOTH, "no provider named openai"),
    ],
)
def test_an_impossible_choice_is_reported(
    named: str | None, api_key: str | None, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsInvalid, match=sentence) as caught:
        choose_provider(named, api_key, environment)
    for secret in ("g-key", "a-key", "mine"):
        assert secret not in str(caught.value)


def test_a_key_is_not_shown_by_printing_the_choice() -> None:
    assert "a-key" not in repr(choose_provider(None, None, ANTHROPIC_KEY))
