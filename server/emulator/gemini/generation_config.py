"""Generation settings and their limits by model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.gemini.errors import invalid
from server.emulator.gemini.models import Model

_DYNAMIC: Final = -1
_UNSPECIFIED: Final = "THINKING_LEVEL_UNSPECIFIED"


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
