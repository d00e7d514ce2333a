"""The models, their capabilities, and the generation settings that they support."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.gemini.errors import invalid

_DYNAMIC: Final = -1
_UNSPECIFIED: Final = "THINKING_LEVEL_UNSPECIFIED"
_LEVELS: Final = frozenset({"LOW", "MEDIUM", "HIGH"})
_LEVELS_AND_MINIMAL: Final = _LEVELS | {"MINIMAL"}
_METHODS: Final = ("generateContent", "countTokens", "createCachedContent", "batchGenerateContent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    id: str
    display_name: str
    family: str
    """Signatures are valid within a family."""
    thinking_levels: frozenset[str] = frozenset()
    """Empty if thinking is controlled by a budget only."""
    takes_budget: bool = True
    budget_range: tuple[int, int] = (0, 32_768)
    validates_signatures: bool = True
    numbers_calls: bool = True
    """Whether each function call has an id."""
    keeps_thoughts: bool = False
    """Whether signatures of earlier turns are read and count as input."""
    explicit_minimum_tokens: int | None = 4_096
    """None: no explicit caches."""
    implicit_minimum_tokens: int = 4_096
    bad_signature_text: str = "Corrupted thought signature."
    input_limit_tokens: int = 1_048_576
    output_limit_tokens: int = 65_536

    def render(self) -> dict[str, Any]:
        """The resource that `models.get` returns."""
        methods = [name for name in _METHODS if self.explicit_minimum_tokens or name != "createCachedContent"]
        return {
            "name": f"models/{self.id}",
            "version": "001",
            "displayName": self.display_name,
            "description": f"{self.display_name}, emulated.",
            "inputTokenLimit": self.input_limit_tokens,
            "outputTokenLimit": self.output_limit_tokens,
            "supportedGenerationMethods": methods,
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "maxTemperature": 2,
            "thinking": True,
        }


def _of_2_5(name: str, title: str, *, budget: tuple[int, int], explicit: int) -> Model:
    return Model(
        id=name,
        display_name=title,
        family="gemini-2.5",
        budget_range=budget,
        validates_signatures=False,
        numbers_calls=False,
        explicit_minimum_tokens=explicit,
        implicit_minimum_tokens=2_048,
    )


def _of_4(name: str, title: str, *, implicit: int) -> Model:
    return Model(
        id=name,
        display_name=title,
        family="gemini-4",
        thinking_levels=_LEVELS,
        takes_budget=False,
        keeps_thoughts=True,
        explicit_minimum_tokens=None,
        implicit_minimum_tokens=implicit,
    )


def _of_3(name: str, title: str, *, minimal: bool = True, keeps_thoughts: bool = True, **more: Any) -> Model:
    return Model(
        id=name,
        display_name=title,
        family="gemini-3",
        thinking_levels=_LEVELS_AND_MINIMAL if minimal else _LEVELS,
        keeps_thoughts=keeps_thoughts,
        **more,
    )


_ALL: Final = (
    _of_4("gemini-4-argon", "Gemini 4 Argon", implicit=6_144),
    _of_4("gemini-4-carbon", "Gemini 4 Carbon", implicit=4_096),
    _of_3("gemini-3.8-flash", "Gemini 3.8 Flash"),
    _of_3("gemini-3.7-flash", "Gemini 3.7 Flash", bad_signature_text="Invalid thought signature."),
    _of_3("gemini-3.6-flash", "Gemini 3.6 Flash"),
    _of_3("gemini-3.5-flash", "Gemini 3.5 Flash"),
    _of_3("gemini-3.5-flash-lite", "Gemini 3.5 Flash-Lite", explicit_minimum_tokens=1_024),
    _of_3(
        "gemini-3.1-pro-preview",
        "Gemini 3.1 Pro Preview",
        minimal=False,
        keeps_thoughts=False,
        budget_range=(128, 32_768),
    ),
    _of_3("gemini-3.1-flash-lite", "Gemini 3.1 Flash-Lite", keeps_thoughts=False, explicit_minimum_tokens=1_024),
    _of_3("gemini-3-flash-preview", "Gemini 3 Flash Preview", keeps_thoughts=False, explicit_minimum_tokens=1_024),
    _of_2_5("gemini-2.5-pro", "Gemini 2.5 Pro", budget=(128, 32_768), explicit=2_048),
    _of_2_5("gemini-2.5-flash", "Gemini 2.5 Flash", budget=(0, 24_576), explicit=1_024),
    _of_2_5("gemini-2.5-flash-lite", "Gemini 2.5 Flash-Lite", budget=(0, 24_576), explicit=1_024),
)
MODELS: Final[Mapping[str, Model]] = {model.id: model for model in _ALL}
_ALIASES: Final[Mapping[str, str]] = {
    "gemini-flash-latest": "gemini-3.8-flash",
    "gemini-flash-lite-latest": "gemini-3.5-flash-lite",
    "gemini-pro-latest": "gemini-4-carbon",
}


def find_model(name: str, version: str) -> Model | None:
    """Find a model by its id. The `-latest` aliases exist on v1beta only."""
    if version == "v1beta":
        name = _ALIASES.get(name, name)
    return MODELS.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The settings that change the emulator's response. Sampling settings never do."""

    thinks: bool = True
    shows_thoughts: bool = False
    max_output_tokens: int
    stop_sequences: Sequence[str] = ()
    answer_schema: Mapping[str, Any] | None = None
    """The JSON schema of the response; None for free text."""


def read_config(config: Mapping[str, Any], model: Model) -> GenerationConfig:
    """Read the settings. Raises `ApiError` for settings that the model does not support."""
    if config.get("candidate_count", 1) != 1:
        raise invalid("Multiple candidates is not enabled for this model")
    limit = int(config.get("max_output_tokens", model.output_limit_tokens))
    if not 0 < limit <= model.output_limit_tokens:
        raise invalid(
            f"Unable to submit request because it has a maxOutputTokens value of {limit} but the supported range is"
            f" from 1 (inclusive) to {model.output_limit_tokens + 1} (exclusive)."
        )
    thinking = config.get("thinking_config", {})
    _check_level(thinking, model)
    _check_budget(thinking, model)
    return GenerationConfig(
        thinks=thinking.get("thinking_budget") != 0,
        shows_thoughts=bool(thinking.get("include_thoughts")),
        max_output_tokens=limit,
        stop_sequences=config.get("stop_sequences", ()),
        answer_schema=_answer_schema(config),
    )


def _check_level(thinking: Mapping[str, Any], model: Model) -> None:
    level = str(thinking.get("thinking_level", _UNSPECIFIED)).upper()
    if level == _UNSPECIFIED:
        return
    if "thinking_budget" in thinking:
        raise invalid("You can only set only one of thinking budget and thinking level.")
    if not model.thinking_levels:
        raise invalid("Thinking level is not supported for this model.")
    if level not in model.thinking_levels:
        raise invalid(f"Thinking level {level} is not supported for this model.")


def _check_budget(thinking: Mapping[str, Any], model: Model) -> None:
    if "thinking_budget" not in thinking:
        return
    if not model.takes_budget:
        raise invalid("Thinking budget is not supported for this model.")
    budget = int(thinking["thinking_budget"])
    low, high = model.budget_range
    if budget == 0 and low > 0:
        raise invalid("Budget 0 is invalid. This model only works in thinking mode.")
    if budget != _DYNAMIC and not low <= budget <= high:
        raise invalid(f"The thinking budget {budget} is invalid. Please choose a value between {low} and {high}.")


def _answer_schema(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if config.get("response_mime_type") != "application/json":
        return None
    schema = config.get("response_schema") or config.get("response_json_schema")
    return schema if isinstance(schema, Mapping) else {}
