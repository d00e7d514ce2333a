"""Evaluation of assertions. Called in a confined process only: see `server.prompts.worker`.

A schema applies to the text of an answer, parsed as JSON, or to the arguments of every call of one tool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.block import JsonValue
from server.replay.rerun.assertions import EVALUATION_FAILED, fail_assertion
from server.replay.rerun.expression import ExpressionFailed, ExpressionRefused, evaluate, read_expression
from server.replay.rerun.json_schema import check_value, find_schema_fault
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
