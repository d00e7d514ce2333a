"""Rules by model: thinking types, effort levels, forced tools, token limits."""

from collections.abc import Mapping
from typing import Any, Final

from server.emulator.anthropic.caller import Caller
from server.emulator.anthropic.errors import ApiProblem, Refused, invalid
from server.emulator.anthropic.models import Model, find_model
from server.emulator.anthropic.prompt import find_open_turn

_EFFORT_ORDER: Final = ("low", "medium", "high", "xhigh", "max")
INTERLEAVED: Final = "interleaved-thinking-2025-05-14"
_OUTPUT_300K: Final = "output-300k-2026-03-24"


def load_model(name: str) -> Model:
    """Raises `Refused` with a 404."""
    model = find_model(name)
    if model is None:
        raise Refused(ApiProblem(type="not_found_error", message=f"model: {name}"))
    return model


def thinking_type(body: Mapping[str, Any], model: Model) -> str:
    """The thinking type of this request: as requested, else the model's default."""
    stated = body.get("thinking", {}).get("type")
    if stated is None and body.get("tool_choice", {}).get("type") in {"any", "tool"}:
        return "disabled"  # a forced call begins at once
    return str(stated or ("adaptive" if model.thinks_by_default else "disabled"))


def effort_of(body: Mapping[str, Any], model: Model) -> str:
    return str(body.get("output_config", {}).get("effort") or model.default_effort)


def check_model_rules(body: Mapping[str, Any], model: Model, caller: Caller) -> None:
    """Raises `Refused`."""
    _check_max_tokens(body, model, caller)
    _check_thinking_type(body, model)
    _check_budget(body, caller)
    _check_effort(body, model)
    _check_tool_choice(body, model)
    if thinking_type(body, model) == "enabled":
        _check_manual_start(body)


def _check_max_tokens(body: Mapping[str, Any], model: Model, caller: Caller) -> None:
    limit = 300_000 if caller.has_beta(_OUTPUT_300K) else model.max_tokens
    if body.get("max_tokens", 0) > limit:
        raise invalid(
            f"max_tokens: {body['max_tokens']} > {limit}, which is the maximum allowed number of output tokens for "
            f"{body['model']}"
        )


def _check_thinking_type(body: Mapping[str, Any], model: Model) -> None:
    kind = body.get("thinking", {}).get("type")
    if kind is None or kind in model.thinking_types:
        return
    if kind == "adaptive":
        raise invalid("adaptive thinking is not supported on this model")
    if kind == "between_tools":
        raise invalid('"thinking.type.between_tools" is not supported for this model.')
    raise invalid(
        f'"thinking.type.{kind}" is not supported for this model. Use "thinking.type.adaptive" and '
        '"output_config.effort" to control thinking behavior.'
    )


def _check_budget(body: Mapping[str, Any], caller: Caller) -> None:
    budget = body.get("thinking", {}).get("budget_tokens")
    if budget is None or "max_tokens" not in body or caller.has_beta(INTERLEAVED):
        return
    if budget >= body["max_tokens"]:
        raise invalid(
            "`max_tokens` must be greater than `thinking.budget_tokens`. Please consult our documentation at "
            "https://docs.claude.com/en/docs/build-with-claude/extended-thinking#max-tokens-and-context-window-size"
        )


def _check_effort(body: Mapping[str, Any], model: Model) -> None:
    effort = body.get("output_config", {}).get("effort")
    if effort is None:
        return
    if not model.effort_levels:
        raise invalid("This model does not support the effort parameter.")
    if effort not in model.effort_levels:
        raise invalid(f"output_config.effort '{effort}' is not supported on this model.")
    highest = model.highest_effort_without_thinking
    if thinking_type(body, model) != "disabled" or highest is None:
        return
    if _EFFORT_ORDER.index(effort) > _EFFORT_ORDER.index(highest):
        raise invalid(
            f"output_config.effort '{effort}' is not supported when thinking is disabled on this model. Use effort "
            f"'{highest}' or below, or enable thinking."
        )


def _check_tool_choice(body: Mapping[str, Any], model: Model) -> None:
    choice = body.get("tool_choice")
    if choice is None:
        return
    tools = {tool.get("name") for tool in body.get("tools", [])}
    if not tools:
        raise invalid("tool_choice may only be specified while providing tools")
    if choice["type"] not in {"any", "tool"}:
        return
    if not model.takes_forced_tools:
        raise invalid('tool_choice: type "tool" and "any" are not supported for this model.')
    if choice["type"] == "tool" and choice["name"] not in tools:
        raise invalid(f"Tool '{choice['name']}' not found in provided tools")
    if body.get("thinking", {}).get("type") in {"adaptive", "enabled"}:
        raise invalid("Thinking may not be enabled when tool_choice forces tool use.")


def _check_manual_start(body: Mapping[str, Any]) -> None:
    turn = find_open_turn(body["messages"])
    if turn is None or not turn.blocks or turn.blocks[0].is_thinking:
        return
    first = turn.blocks[0]
    raise invalid(
        f"{first.path}.type: Expected 'thinking' or 'redacted_thinking', but found '{first.block['type']}'. When "
        "'thinking' is enabled, a final 'assistant' message must start with a thinking block (preceeding the lastmost "
        "set of 'tool_use' and 'tool_result' blocks). To avoid this requirement, disable 'thinking'."
    )
