"""Evaluation of assertions. Called in a confined process only: see `server.prompts.worker`.

A schema applies to the text of an answer, parsed as JSON, or to the arguments of every call of one tool. It is a subset
of JSON Schema 2020-12, validated by `jsonschema`. The subset has no `$ref`, `pattern`, `format` or `uniqueItems`:
nothing is fetched, and no regular expression runs. A schema with a keyword outside the subset is refused when the
assertion is created. The specification would ignore the keyword, and the assertion would check less than it says.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import create

from server.conversation.block import JsonValue
from server.replay.rerun.assertions import EVALUATION_FAILED, fail_assertion
from server.replay.rerun.expression import ExpressionFailed, ExpressionRefused, evaluate, read_expression
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import AssertionResult

NAMES: Final = frozenset(
    {
        "text",
        "tool_calls",
        "stop_reason",
        "recorded_text",
        "recorded_tool_calls",
        "recorded_stop_reason",
        "similarity",
        "input_tokens",
        "output_tokens",
        "reasoning_tokens",
        "cost_usd",
        "latency_ms",
    }
)
"""The names that `describe_subject` gives values to."""

_SCHEMA: Final = {"$ref": "#"}
_SCHEMAS: Final = {"type": "array", "items": _SCHEMA, "minItems": 1}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TYPE: Final = {"enum": ["null", "boolean", "integer", "number", "string", "array", "object"]}
_KEYWORDS: Final[Mapping[str, Any]] = {
    "type": {"if": {"type": "array"}, "then": {"items": _TYPE}, "else": _TYPE},
    "enum": {"type": "array"},
    "const": True,
    "properties": {"type": "object", "additionalProperties": _SCHEMA},
    "required": {"type": "array", "items": {"type": "string"}},
    "additionalProperties": _SCHEMA,
    "items": _SCHEMA,
    "not": _SCHEMA,
    **dict.fromkeys(("anyOf", "allOf", "oneOf"), _SCHEMAS),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
}
_ANNOTATIONS: Final = ("$id", "$comment", "title", "description", "default", "examples")
_META_SCHEMA: Final[Mapping[str, Any]] = {
    "type": ["object", "boolean"],
    "properties": {**_KEYWORDS, **dict.fromkeys(_ANNOTATIONS, True)},
    "additionalProperties": False,
}
_META_VALIDATOR: Final = Draft202012Validator(_META_SCHEMA)
_Validator: Final = create(
    meta_schema=_META_SCHEMA,
    validators={keyword: Draft202012Validator.VALIDATORS[keyword] for keyword in _KEYWORDS},
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


def find_fault(assertions: Sequence[Assertion]) -> tuple[int, str] | None:
    """Return the index of the first assertion that cannot be evaluated, and the reason."""
    names: set[str] = set()
    for index, assertion in enumerate(assertions):
        fault = "Another assertion has this name." if assertion.name in names else _find_fault(assertion)
        names.add(assertion.name)
        if fault is not None:
            return index, fault
    return None


def check_assertions(assertions: Sequence[Assertion], values: Mapping[str, Any]) -> tuple[AssertionResult, ...]:
    """Evaluate assertions on the values that `describe_subject` built."""
    return tuple(_check(assertion, values) for assertion in assertions)


def find_schema_fault(schema: Any) -> str | None:
    """Return why a schema cannot be used, or None."""
    try:
        error = best_match(_META_VALIDATOR.iter_errors(_without_dialect(schema)))
    except RecursionError:
        return "The schema is nested too deeply."
    if error is None:
        return None
    if error.validator == "additionalProperties" and isinstance(error.instance, Mapping):
        unknown = min(keyword for keyword in error.instance if keyword not in _META_SCHEMA["properties"])
        return f"{error.json_path}: `{unknown}` is not supported. Supported keywords: {', '.join(sorted(_KEYWORDS))}."
    return f"{error.json_path}: {error.message}"


def check_value(schema: Any, value: Any) -> str | None:
    """Return why a value does not match a schema without faults, or None if it does."""
    error = best_match(_Validator(_without_dialect(schema)).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"


def _find_fault(assertion: Assertion) -> str | None:
    if (assertion.expression is None) is (assertion.schema is None):
        return "An assertion has either an expression or a schema."
    if assertion.expression is None:
        return find_schema_fault(assertion.schema)
    if assertion.tool_name is not None:
        return "`tool_name` requires a schema."
    try:
        read_expression(assertion.expression, NAMES)
    except ExpressionRefused as error:
        return str(error)
    return None


def _check(assertion: Assertion, values: Mapping[str, Any]) -> AssertionResult:
    try:
        if assertion.expression is not None:
            holds = evaluate(read_expression(assertion.expression, NAMES), values)
            fault = None if holds else "The expression is false."
        elif assertion.tool_name is not None:
            fault = _check_arguments(assertion.schema, assertion.tool_name, values)
        else:
            fault = _check_text(assertion.schema, values["text"])
    except (ExpressionRefused, ExpressionFailed, RecursionError) as error:
        return fail_assertion(assertion, str(error), EVALUATION_FAILED)
    return AssertionResult(name=assertion.name, passed=True) if fault is None else fail_assertion(assertion, fault)


def _check_text(schema: JsonValue, text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "The text is not JSON."
    return check_value(schema, value)


def _check_arguments(schema: JsonValue, tool_name: str, values: Mapping[str, Any]) -> str | None:
    """Return the fault of the first call with one. Without calls of the tool there is none."""
    for call in values["tool_calls"]:
        fault = check_value(schema, call["arguments"]) if call["name"] == tool_name else None
        if fault is not None:
            return f"Arguments of {tool_name}, {fault}"
    return None


def _without_dialect(schema: Any) -> Any:
    """Drop `$schema`, which would make `jsonschema` switch to the validator of another draft."""
    return {key: value for key, value in schema.items() if key != "$schema"} if isinstance(schema, Mapping) else schema
