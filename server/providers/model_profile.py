"""Profiles: what each model supports and requires, as data.

Every difference between models that matters to payloads, caches or settings is a field here, so no code compares model
names. A model that is not listed gets the profile of its family, marked as assumed; calls record this as a warning.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from server.conversation.payload import LayerOrder
from server.providers.model_name import names_in_tables


class ThinkingControl(StrEnum):
    """How the amount of thinking is set."""

    LEVEL = "level"
    """By a named level: Gemini."""
    BUDGET = "budget"
    """By a number of tokens: Gemini 2.5 and older Claude models."""
    EFFORT = "effort"
    """By an effort for adaptive thinking: Claude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The profile of a model, or of a family for models that are not listed."""

    model: str
    provider: str
    family: str
    """Signatures are valid only within the family that made them."""
    window_tokens: int
    output_limit_tokens: int
    orders: tuple[LayerOrder, ...]
    """The layer orders that the model allows; the first is the default."""
    signs_calls: bool
    """A tool call of the current turn must be sent back with its signature."""
    account_bound: bool
    """Signatures are valid only for the account that they were made for."""
    prefix_bound: bool
    """A thinking block is valid only after exactly the messages that it was made after."""
    cache_minimum_tokens: int
    explicit_caches: bool
    """The provider has named caches that requests refer to."""
    breakpoints: int
    """How many cache markers a request may have; 0 if caching needs none."""
    thinking: ThinkingControl
    thinking_levels: tuple[str, ...]
    """The accepted levels or efforts, the lowest first."""
    thinking_optional: bool
    """Whether thinking can be switched off."""
    accepts_sampling: bool
    """Whether temperature and similar settings are accepted. No Claude accepts them in the API version of its SDK."""
    forced_tools: bool = True
    """Whether a request may require a tool call."""
    takes_text_beside_results: bool = True
    """Whether a message of tool results may contain text. For Gemini it would begin a new turn within the tool loop."""
    signs_compaction: bool = False
    """Whether it writes signed summaries, which may replace the summarised turns."""
    assumed: bool = False
    """The model is not listed: the values of its family are assumed."""


_GEMINI_3: Final = ModelProfile(
    model="gemini-3",
    provider="gemini",
    family="gemini-3",
    window_tokens=1_048_576,
    output_limit_tokens=65_536,
    orders=(LayerOrder.LAYERED, LayerOrder.APPEND_ONLY),
    signs_calls=True,
    account_bound=True,
    prefix_bound=False,
    cache_minimum_tokens=4_096,
    explicit_caches=True,
    breakpoints=0,
    thinking=ThinkingControl.LEVEL,
    thinking_levels=("minimal", "low", "medium", "high"),
    thinking_optional=False,
    accepts_sampling=True,
    takes_text_beside_results=False,
)
_GEMINI_2_5: Final = replace(
    _GEMINI_3,
    model="gemini-2.5",
    family="gemini-2.5",
    signs_calls=False,
    cache_minimum_tokens=2_048,
    thinking=ThinkingControl.BUDGET,
    thinking_levels=(),
    thinking_optional=True,
)
_GEMINI_4: Final = replace(
    _GEMINI_3,
    model="gemini-4",
    family="gemini-4",
    cache_minimum_tokens=6_144,
    explicit_caches=False,
    thinking_levels=("low", "medium", "high"),
    accepts_sampling=False,
)
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_CLAUDE_5_5: Final = ModelProfile(
    model="claude-5-5",
    provider="anthropic",
    family="claude",
    window_tokens=1_000_000,
    output_limit_tokens=128_000,
    orders=(LayerOrder.APPEND_ONLY,),
    signs_calls=False,
    # Blocks of another account are left out by the provider itself, so they may stay where they are.
    account_bound=False,
    prefix_bound=True,
    cache_minimum_tokens=512,
    explicit_caches=False,
    breakpoints=4,
    thinking=ThinkingControl.EFFORT,
    thinking_levels=_EFFORTS,
    thinking_optional=False,
    accepts_sampling=False,
    forced_tools=False,
    signs_compaction=True,
)
_CLAUDE_5: Final = replace(
    _CLAUDE_5_5,
    model="claude-5",
    orders=(LayerOrder.APPEND_ONLY, LayerOrder.LAYERED),
    prefix_bound=False,
    forced_tools=True,
)
_CLAUDE_4: Final = replace(_CLAUDE_5, model="claude-4", cache_minimum_tokens=1_024, thinking_optional=True)
_CLAUDE_4_5: Final = replace(
    _CLAUDE_4,
    model="claude-4-5",
    window_tokens=200_000,
    output_limit_tokens=64_000,
    cache_minimum_tokens=4_096,
    thinking=ThinkingControl.BUDGET,
    thinking_levels=(),
    signs_compaction=False,
)

_FAMILIES: Final = (
    # The longest matching prefix wins.
    ("gemini-2.5", _GEMINI_2_5),
    ("gemini-4", _GEMINI_4),
    ("gemini", _GEMINI_3),
    ("claude-opus-4", _CLAUDE_4),
    ("claude-sonnet-4", _CLAUDE_4),
    ("claude-haiku-4", _CLAUDE_4_5),
    ("claude", _CLAUDE_5_5),
)

_LISTED: Final = (
    replace(_GEMINI_4, model="gemini-4-argon"),
    replace(_GEMINI_4, model="gemini-4-carbon", cache_minimum_tokens=4_096),
    replace(_GEMINI_3, model="gemini-3.8-flash"),
    replace(_GEMINI_3, model="gemini-3.7-flash"),
    replace(_GEMINI_3, model="gemini-3.6-flash"),
    replace(_GEMINI_3, model="gemini-3.5-flash"),
    replace(_GEMINI_3, model="gemini-3.5-flash-lite"),
    replace(_GEMINI_3, model="gemini-3.1-pro-preview", thinking_levels=("low", "medium", "high")),
    replace(_GEMINI_3, model="gemini-3.1-flash-lite"),
    replace(_GEMINI_3, model="gemini-3-flash-preview"),
    replace(_GEMINI_2_5, model="gemini-2.5-pro", thinking_optional=False),
    replace(_GEMINI_2_5, model="gemini-2.5-flash"),
    replace(_GEMINI_2_5, model="gemini-2.5-flash-lite"),
    replace(_CLAUDE_5_5, model="claude-fable-5-2"),
    replace(_CLAUDE_5_5, model="claude-fable-5-1"),
    replace(_CLAUDE_5, model="claude-fable-5"),
    replace(_CLAUDE_5_5, model="claude-opus-5-5"),
    replace(_CLAUDE_5, model="claude-opus-5"),
    replace(_CLAUDE_4, model="claude-opus-4-8"),
    replace(_CLAUDE_4, model="claude-opus-4-7", cache_minimum_tokens=2_048),
    replace(_CLAUDE_4, model="claude-opus-4-6", cache_minimum_tokens=4_096),
    replace(_CLAUDE_4_5, model="claude-opus-4-5"),
    replace(_CLAUDE_5_5, model="claude-sonnet-5-5"),
    replace(_CLAUDE_5, model="claude-sonnet-5", cache_minimum_tokens=1_024, thinking_optional=True),
    replace(_CLAUDE_4, model="claude-sonnet-4-6"),
    replace(_CLAUDE_4_5, model="claude-sonnet-4-5", cache_minimum_tokens=1_024),
    replace(_CLAUDE_5_5, model="claude-haiku-5-5", thinking_optional=True),
    replace(_CLAUDE_4_5, model="claude-haiku-4-5"),
)
PROFILES: Final = {profile.model: profile for profile in _LISTED}


def profile_warnings(profile: ModelProfile) -> tuple[dict[str, str], ...]:
    """Return the warnings that a call with this profile records."""
    if not profile.assumed:
        return ()
    return ({"kind": "profile_assumed", "model": profile.model, "family": profile.family},)


def find_family(provider: str, model: str, version: str | None) -> str:
    """Find the signature family of a model: that of the version that its answer named, if the version is known.

    An alias such as `gemini-pro-latest` has no fixed family: it may refer to another model from one day to the next.
    """
    if version is not None and any(
        profile.provider == provider and version.startswith(prefix) for prefix, profile in _FAMILIES
    ):
        return find_profile(provider, version).family
    return find_profile(provider, model).family


def find_profile(provider: str, model: str) -> ModelProfile:
    """Find the profile of a model; that of its family, marked as assumed, if the model is not listed.

    A dated release of a listed model counts as listed.
    """
    names = names_in_tables(model)
    for name in names:
        listed = PROFILES.get(name)
        if listed is not None and listed.provider == provider:
            return listed if name == model else replace(listed, model=model)
    fitting = [
        (prefix, profile)
        for prefix, profile in _FAMILIES
        if profile.provider == provider and names[0].startswith(prefix)
    ]
    fallback = next(profile for _, profile in reversed(_FAMILIES) if profile.provider == provider)
    family = max(fitting, key=lambda pair: len(pair[0]))[1] if fitting else fallback
    return replace(family, model=model, assumed=True)
