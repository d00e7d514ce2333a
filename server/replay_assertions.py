"""Assertions: what has to hold for each answer of a candidate.

| name                  | in an expression                                                                          |
|-----------------------|-------------------------------------------------------------------------------------------|
| `text`                | what the candidate says                                                                   |
| `tool_calls`          | its calls: objects of `name` and `arguments`                                              |
| `stop_reason`         | why it stopped; None where it did not                                                     |
| `recorded_text`, …    | the same of the recorded answer; empty and None where there is none                       |
| `similarity`          | of the two texts, 0 to 1; None where they were not compared                               |
| `input_tokens`, …     | `output_tokens` and `reasoning_tokens` of the candidate's calls                           |
| `cost_usd`            | a number; None where the price is not known                                               |
| `latency_ms`          | from the request to the last byte                                                         |

A schema is for the text, read as JSON, or for the arguments of every call of a tool.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.block import JsonValue
from server.errors import ValidationFailed
from server.prompt_arguments import clone
from server.replay import Assertion
from server.replay_comparison import Said
from server.replay_expression import ExpressionFailed, ExpressionRefused, evaluate, read_expression
from server.replay_result import AnswerFacts, AssertionResult
from server.replay_schema import check_value, find_schema_fault

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
_LONGEST_MESSAGE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An answer, for those who judge it."""

    candidate: Said
    recorded: Said | None
    similarity: float | None
    facts: AnswerFacts


def read_assertions(assertions: Sequence[Assertion]) -> None:
    """That they can be checked, for the time when a replay is made. Raises `ValidationFailed` with the field."""
    names: set[str] = set()
    for place, assertion in enumerate(assertions):
        fault = "Another assertion has this name." if assertion.name in names else _find_fault(assertion)
        names.add(assertion.name)
        if fault is not None:
            path = f"assertions.{place}"
            errors = [{"path": path, "source": "body", "message": fault}]
            raise ValidationFailed(f"{path}: {fault}", errors=errors)


def check_assertions(assertions: Sequence[Assertion], subject: Subject) -> tuple[AssertionResult, ...]:
    """All of them, each with why it failed. Nothing holds for an answer that did not come."""
    return tuple(_check(assertion, subject) for assertion in assertions)


def _find_fault(assertion: Assertion) -> str | None:
    if (assertion.expression is None) is (assertion.schema is None):
        return "An assertion has an expression or a schema, and not both."
    if assertion.expression is None:
        return find_schema_fault(assertion.schema)
    if assertion.tool_name is not None:
        return "`tool_name` goes with a schema."
    try:
        read_expression(assertion.expression, NAMES)
    except ExpressionRefused as error:
        return str(error)
    return None


def _check(assertion: Assertion, subject: Subject) -> AssertionResult:
    if subject.facts.error_code is not None:
        fault: str | None = f"There is no answer: {subject.facts.error_code}."
    elif assertion.expression is not None:
        fault = _check_expression(assertion.expression, subject)
    elif assertion.tool_name is not None:
        fault = _check_arguments(assertion.schema, assertion.tool_name, subject)
    else:
        fault = _check_text(assertion.schema, subject.candidate.text)
    return AssertionResult(name=assertion.name, passed=fault is None, message=(fault or "")[:_LONGEST_MESSAGE])


def _check_expression(source: str, subject: Subject) -> str | None:
    try:
        holds = evaluate(read_expression(source, NAMES), _values(subject))
    except (ExpressionRefused, ExpressionFailed) as error:
        return str(error)
    return None if holds else "It does not hold."


def _check_text(schema: JsonValue, text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "The text is no JSON."
    return check_value(schema, value)


def _check_arguments(schema: JsonValue, tool_name: str, subject: Subject) -> str | None:
    """Nothing is wrong with calls that are not made."""
    faults = [
        check_value(schema, clone(call.arguments), tool_name)
        for call in subject.candidate.calls
        if call.name == tool_name
    ]
    return next((fault for fault in faults if fault is not None), None)


def _values(subject: Subject) -> Mapping[str, Any]:
    recorded, facts = subject.recorded, subject.facts
    usage = facts.usage
    return {
        "text": subject.candidate.text,
        "tool_calls": _calls(subject.candidate),
        "stop_reason": _word(subject.candidate),
        "recorded_text": "" if recorded is None else recorded.text,
        "recorded_tool_calls": [] if recorded is None else _calls(recorded),
        "recorded_stop_reason": None if recorded is None else _word(recorded),
        "similarity": subject.similarity,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost_usd": None if facts.cost_usd is None else float(facts.cost_usd),
        "latency_ms": facts.latency_ms,
    }


def _calls(said: Said) -> list[dict[str, JsonValue]]:
    return [{"name": call.name, "arguments": clone(call.arguments)} for call in said.calls]


def _word(said: Said) -> str | None:
    return None if said.stop_reason is None else said.stop_reason.value
