"""Settings are read strictly, and checked against the model when an assistant is saved."""

from typing import Any

import pytest

from server.caching.explicit_policy import CacheSettings, ExplicitChoice
from server.conversation.errors import ValidationFailed
from server.conversation.payload import CallSettings, LayerOrder
from server.payload.settings import check_settings, read_cache_settings, read_clock_seconds, read_order, read_settings
from server.providers.model_profile import find_profile

FLASH = find_profile("gemini", "gemini-3.8-flash")


def faults(error: ValidationFailed) -> list[str]:
    found: Any = error.details["errors"]
    return [fault["path"] for fault in found]


def test_every_member_is_read() -> None:
    given = {
        "max_output_tokens": 7,
        "thinking": 2048,
        "show_thinking": False,
        "temperature": 1,
        "stop_sequences": ["END"],
        "safety": {"HARM_CATEGORY_HARASSMENT": "OFF"},
        "extra": {"labels": {"a": 1}},
        "layer_order": "append_only",
        "clock_seconds": 60,
        "cache": {"explicit": "on", "ttl_seconds": 60},
    }
    assert read_settings(given) == CallSettings(
        max_output_tokens=7,
        thinking="2048",
        show_thinking=False,
        temperature=1,
        stop_sequences=("END",),
        safety={"HARM_CATEGORY_HARASSMENT": "OFF"},
        extra={"labels": {"a": 1}},
    )
    assert read_order(given, FLASH) is LayerOrder.APPEND_ONLY
    assert read_clock_seconds(given) == 60
    assert read_cache_settings(given) == CacheSettings(explicit=ExplicitChoice.ON, ttl_seconds=60)


def test_omitted_settings_are_left_to_the_model() -> None:
    assert read_settings({"thinking": None, "temperature": None, "layer_order": None}) == CallSettings()
    assert read_order({}, FLASH) is LayerOrder.LAYERED
    assert read_clock_seconds({}) == read_clock_seconds({"clock_seconds": None}) == 3_600
    assert read_clock_seconds({"clock_seconds": 0}) == 0
    for nothing in (None, {}, {"explicit": None, "ttl_seconds": None}):
        assert read_cache_settings({"cache": nothing}) == read_cache_settings({}) == CacheSettings()
    assert read_order({"layer_order": None}, find_profile("anthropic", "claude-fable-5-2")) is LayerOrder.APPEND_ONLY


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clock_seconds", -1),
        ("clock_seconds", 86_401),
        ("clock_seconds", 60.5),
        ("clock_seconds", True),
        ("cache", []),
        ("cache", {"explicit": "maybe"}),
        ("cache", {"ttl_seconds": 59}),
        ("cache", {"ttl_seconds": 86_401}),
        ("cache", {"ttl_seconds": True}),
        ("cache", {"ttl_seconds": "60"}),
        ("cache", {"ttl": 60}),
        ("max_output_tokens", 0),
        ("max_output_tokens", "7"),
        ("max_output_tokens", True),
        ("max_output_tokens", 1.5),
        ("thinking", ""),
        ("thinking", 1.5),
        ("thinking", ["low"]),
        ("show_thinking", "yes"),
        ("temperature", "hot"),
        ("temperature", 2.5),
        ("temperature", False),
        ("stop_sequences", "END"),
        ("stop_sequences", [1]),
        ("stop_sequences", [""]),
        ("safety", []),
        ("safety", {"a": 1}),
        ("extra", "x"),
        ("layer_order", "sideways"),
        ("layer_order", {}),
        ("temprature", 1),
    ],
)
def test_an_invalid_setting_is_refused_with_its_path(name: str, value: object) -> None:
    with pytest.raises(ValidationFailed, match=f"settings.{name}") as caught:
        read_settings({"max_output_tokens": 7, name: value})
    assert faults(caught.value) == [f"settings.{name}"]


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValidationFailed) as caught:
        read_settings({"a": 1, "thinking": [], "b": 2})
    assert faults(caught.value) == ["settings.a", "settings.thinking", "settings.b"]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("gemini-3.8-flash", {"thinking": "minimal", "temperature": 0.5, "layer_order": "append_only"}),
        ("gemini-2.5-flash", {"thinking": "off"}),
        ("gemini-2.5-flash", {"thinking": -1}),
        ("claude-fable-5-2", {"thinking": "max", "layer_order": "append_only", "max_output_tokens": 128_000}),
        ("claude-sonnet-5", {"thinking": "off", "layer_order": "layered"}),
        ("claude-sonnet-4-5", {"thinking": "2048"}),
        ("claude-tomorrow-9", {"max_output_tokens": 10**7}),
    ],
)
def test_settings_that_the_model_supports_are_accepted(model: str, settings: dict[str, Any]) -> None:
    check_settings("gemini" if model.startswith("gemini") else "anthropic", model, settings)


@pytest.mark.parametrize(
    ("model", "settings", "path"),
    [
        ("gemini-4-argon", {"thinking": "minimal"}, "thinking"),
        ("gemini-4-argon", {"thinking": "off"}, "thinking"),
        ("gemini-4-argon", {"temperature": 0.5}, "temperature"),
        ("gemini-2.5-flash", {"thinking": "high"}, "thinking"),
        ("gemini-2.5-pro", {"thinking": "off"}, "thinking"),
        ("claude-fable-5-2", {"thinking": "off"}, "thinking"),
        ("claude-fable-5-2", {"thinking": 2048}, "thinking"),
        ("claude-fable-5-2", {"temperature": 0.5}, "temperature"),
        ("claude-fable-5-2", {"layer_order": "layered"}, "layer_order"),
        ("claude-fable-5-2", {"max_output_tokens": 128_001}, "max_output_tokens"),
        ("claude-fable-5-2", {"tone": "kind"}, "tone"),
    ],
)
def test_settings_that_the_model_does_not_support_are_refused(model: str, settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        check_settings("gemini" if model.startswith("gemini") else "anthropic", model, settings)
    assert faults(caught.value) == [f"settings.{path}"]


def test_an_explicit_cache_can_be_required_only_of_models_that_have_them() -> None:
    check_settings("gemini", "gemini-3.8-flash", {"cache": {"explicit": "on"}})
    check_settings("gemini", "gemini-4-argon", {"cache": {"explicit": "auto"}})
    for provider, model in (("gemini", "gemini-4-argon"), ("anthropic", "claude-fable-5-2")):
        with pytest.raises(ValidationFailed) as caught:
            check_settings(provider, model, {"cache": {"explicit": "on"}})
        assert faults(caught.value) == ["settings.cache"]
