"""An assistant's settings. Unknown members are errors, because a misspelled one would otherwise go unnoticed.

| member              | value                                                                            |
|---------------------|----------------------------------------------------------------------------------|
| `max_output_tokens` | a positive number                                                                |
| `thinking`          | a level or an effort, `off`, or a number of tokens, depending on the model       |
| `show_thinking`     | whether thinking is returned, if the provider supports it                        |
| `temperature`       | a number from 0 to 2, if the model supports it                                   |
| `stop_sequences`    | a list of texts                                                                  |
| `safety`            | thresholds by category; Gemini only                                              |
| `extra`             | members that are added to the provider's request unchanged                       |
| `layer_order`       | `layered` or `append_only`, if the model supports it                             |
| `clock_seconds`     | 0 to 86,400: the precision of the time in the dynamic block of the layered order |
| `compaction`        | when old exchanges are moved, see `server.conversation.compaction_policy`        |
| `cache`             | `explicit`: `auto`, `on` or `off`; `ttl_seconds`: 60 to 86,400                   |
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from server.caching.explicit_policy import CacheSettings, ExplicitChoice
from server.conversation.block import JsonValue
from server.conversation.compaction_policy import read_policy
from server.conversation.errors import ValidationFailed
from server.conversation.payload import CallSettings, LayerOrder
from server.payload.dynamic_clock import DEFAULT_CLOCK_SECONDS
from server.providers.model_name import check_model_name
from server.providers.model_profile import ModelProfile, ThinkingControl, find_profile

_OFF: Final = "off"
_LAYER_ORDER: Final = "layer_order"
_CLOCK_SECONDS: Final = "clock_seconds"
_CACHE: Final = "cache"
_COMPACTION: Final = "compaction"
_TTL_RANGE: Final = range(60, 86_401)
_CLOCK_RANGE: Final = range(86_401)
_NOT_CALL_SETTINGS: Final = frozenset({_LAYER_ORDER, _CLOCK_SECONDS, _CACHE, _COMPACTION})
"""Members about building and caching requests, not about the model."""
_MAX_TEMPERATURE: Final = 2


def read_settings(settings: Mapping[str, JsonValue]) -> CallSettings:
    """Read the settings of a call. Raises `ValidationFailed` for a member that is unknown or has a wrong type."""
    _refuse(_find_faults(settings))
    members = {name: value for name, value in settings.items() if name not in _NOT_CALL_SETTINGS and value is not None}
    if "thinking" in members:
        members["thinking"] = str(members["thinking"])
    if "stop_sequences" in members:
        members["stop_sequences"] = tuple(members["stop_sequences"])
    return CallSettings(**members)


def read_order(settings: Mapping[str, JsonValue], profile: ModelProfile) -> LayerOrder:
    """Return the order that the assistant chose, otherwise the model's default. Raises `ValidationFailed` for an
    unsupported one.
    """
    chosen = settings.get(_LAYER_ORDER)
    if chosen is None:
        return profile.orders[0]
    if chosen not in list(profile.orders):
        allowed = " or ".join(profile.orders)
        _refuse([(_LAYER_ORDER, f"{profile.model} supports {allowed}.")])
    return LayerOrder(chosen)


def read_clock_seconds(settings: Mapping[str, JsonValue]) -> int:
    """Return the period of the clock in the dynamic block, see `server.payload.dynamic_clock`."""
    chosen = settings.get(_CLOCK_SECONDS)
    return DEFAULT_CLOCK_SECONDS if chosen is None else chosen


def read_cache_settings(settings: Mapping[str, JsonValue]) -> CacheSettings:
    """Read the member `cache`. Raises `ValidationFailed` for members that are unknown or have a wrong type."""
    _refuse(_find_faults({_CACHE: settings.get(_CACHE)}))
    requested = settings.get(_CACHE) or {}
    return CacheSettings(
        explicit=ExplicitChoice(requested.get("explicit") or ExplicitChoice.AUTO),
        ttl_seconds=requested.get("ttl_seconds"),
    )


def check_settings(provider: str, model: str, settings: Mapping[str, JsonValue]) -> None:
    """Check a model name and the settings for it, before an assistant is saved. Raises `ValidationFailed`."""
    check_model_name(provider, model)
    profile = find_profile(provider, model)
    requested = read_settings(settings)
    read_policy(settings.get(_COMPACTION) or {})
    read_order(settings, profile)
    faults: list[tuple[str, str]] = []
    if requested.thinking is not None and (fault := _find_thinking_fault(requested.thinking, profile)):
        faults.append(("thinking", fault))
    if requested.temperature is not None and not profile.accepts_sampling:
        faults.append(("temperature", f"{model} does not support temperature."))
    if read_cache_settings(settings).explicit is ExplicitChoice.ON and not profile.explicit_caches:
        faults.append((_CACHE, f"{model} does not support explicit caches."))
    limit = profile.output_limit_tokens
    if not profile.assumed and (requested.max_output_tokens or 0) > limit:
        faults.append(("max_output_tokens", f"{model} returns at most {limit} tokens."))
    _refuse(faults)


def _find_thinking_fault(requested: str, profile: ModelProfile) -> str | None:
    if requested == _OFF:
        return None if profile.thinking_optional else f"{profile.model} cannot turn thinking off."
    if profile.thinking is ThinkingControl.BUDGET:
        return None if _is_number_text(requested) else f"{profile.model} supports a number of tokens, or off."
    if requested in profile.thinking_levels:
        return None
    return f"{profile.model} supports one of {', '.join(profile.thinking_levels)}."


def _find_faults(settings: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if name not in _MEMBERS:
            yield name, f"There is no such setting. The settings are {', '.join(_MEMBERS)}."
        elif value is not None:
            is_valid, expected = _MEMBERS[name]
            if not is_valid(value):
                yield name, f"The value must be {expected}."


def _refuse(faults: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> None:
    errors = [{"path": f"settings.{name}", "source": "body", "message": message} for name, message in faults]
    if errors:
        raise ValidationFailed(f"{errors[0]['path']}: {errors[0]['message']}", errors=errors)


def _is_whole(value: JsonValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number_text(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _is_temperature(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_TEMPERATURE


def _are_texts(value: JsonValue) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)


def _is_object(value: JsonValue) -> bool:
    return isinstance(value, Mapping)


def _is_caching(value: JsonValue) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"explicit", "ttl_seconds"}:
        return False
    explicit, seconds = value.get("explicit"), value.get("ttl_seconds")
    return (explicit is None or explicit in list(ExplicitChoice)) and (
        seconds is None or (_is_whole(seconds) and seconds in _TTL_RANGE)
    )


_MEMBERS: Final[Mapping[str, tuple[Callable[[JsonValue], bool], str]]] = {
    "max_output_tokens": (lambda value: _is_whole(value) and value > 0, "a positive integer"),
    "thinking": (
        lambda value: _is_whole(value) or (isinstance(value, str) and value != ""),
        "a word or a number of tokens",
    ),
    "show_thinking": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": (_is_temperature, "a number from 0 to 2"),
    "stop_sequences": (_are_texts, "a list of texts"),
    "safety": (
        lambda value: _is_object(value) and all(isinstance(word, str) for word in value.values()),
        "an object of categories and thresholds",
    ),
    "extra": (_is_object, "an object"),
    _COMPACTION: (_is_object, "an object"),
    _LAYER_ORDER: (lambda value: value in list(LayerOrder), " or ".join(LayerOrder)),
    _CLOCK_SECONDS: (
        lambda value: _is_whole(value) and value in _CLOCK_RANGE,
        f"an integer from {_CLOCK_RANGE[0]} to {_CLOCK_RANGE[-1]}",
    ),
    _CACHE: (
        _is_caching,
        f"an object of explicit ({', '.join(ExplicitChoice)}) and ttl_seconds ({_TTL_RANGE[0]} to {_TTL_RANGE[-1]})",
    ),
}
