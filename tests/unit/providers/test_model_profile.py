"""Profiles are data: every model with a price has one, and an unlisted model is assumed with a warning."""

import pytest

from server.conversation.payload import LayerOrder
from server.emulator.anthropic.models import MODELS as CLAUDE_MODELS
from server.emulator.gemini.models import MODELS
from server.providers.model_profile import PROFILES, ThinkingControl, find_profile
from server.providers.pricing import PRICES


def test_every_model_with_a_price_has_a_profile_and_vice_versa() -> None:
    assert {price.model for price in PRICES} == set(PROFILES)


@pytest.mark.parametrize("model", PROFILES)
def test_a_listed_profile_is_whole(model: str) -> None:
    profile = find_profile(PROFILES[model].provider, model)
    assert (profile.model, profile.assumed) == (model, False)
    assert profile.output_limit_tokens < profile.window_tokens
    assert (profile.breakpoints == 4) is (profile.provider == "anthropic")
    # A model with prefix-bound thinking cannot have a changing block before the buffer.
    assert not (profile.prefix_bound and LayerOrder.LAYERED in profile.orders)
    assert bool(profile.thinking_levels) is (profile.thinking is not ThinkingControl.BUDGET)


@pytest.mark.parametrize("model", [name for name in PROFILES if name in MODELS])
def test_a_profile_has_no_level_that_the_emulator_refuses(model: str) -> None:
    """Both are written independently from the same documents: they must not disagree."""
    assert {level.upper() for level in PROFILES[model].thinking_levels} == set(MODELS[model].thinking_levels)


@pytest.mark.parametrize("model", [name for name in PROFILES if name in CLAUDE_MODELS])
def test_a_profile_has_signed_summaries_if_the_emulator_has_them(model: str) -> None:
    assert PROFILES[model].signs_compaction is CLAUDE_MODELS[model].compacts
    assert PROFILES[model].prefix_bound is CLAUDE_MODELS[model].preserves_thinking


def test_gemini_signs_no_summaries() -> None:
    assert not any(profile.signs_compaction for profile in PROFILES.values() if profile.provider == "gemini")


@pytest.mark.parametrize(
    ("provider", "model", "like"),
    [
        ("gemini", "gemini-4-neon", "gemini-4-argon"),
        ("gemini", "gemini-3.9-flash", "gemini-3.8-flash"),
        ("gemini", "gemini-2.5-flash-image", "gemini-2.5-flash"),
        ("gemini", "learnlm-5", "gemini-3.8-flash"),
        ("anthropic", "claude-haiku-4-9", "claude-haiku-4-5"),
        ("anthropic", "claude-opus-6", "claude-opus-5-5"),
        ("anthropic", "gemini-4-argon", "claude-opus-5-5"),
    ],
)
def test_an_unlisted_model_has_the_profile_of_its_family(provider: str, model: str, like: str) -> None:
    found, relative = find_profile(provider, model), PROFILES[like]
    assert found.assumed
    assert (found.model, found.provider) == (model, provider)
    assert (found.family, found.signs_calls, found.prefix_bound) == (
        relative.family,
        relative.signs_calls,
        relative.prefix_bound,
    )
