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

An expression or a schema may take any amount of time and memory. `find_fault` and `check_assertions` are therefore
called in a confined process only; `AssertionChecker` is how the rest of the program reaches them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from server.conversation.block import JsonValue
from server.payload.arguments import clone
from server.replay.rerun.comparison import Said
from server.replay.rerun.expression import ExpressionFailed, ExpressionRefused, evaluate, read_expression
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import AnswerFacts, AssertionResult
from server.replay.rerun.schema import check_value, find_schema_fault

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
EVALUATION_FAILED: Final = "evaluation_failed"
"""The error code of an assertion that went wrong over the values of an answer."""
EVALUATION_TIMED_OUT: Final = "evaluation_timed_out"
EVALUATION_TOO_LARGE: Final = "evaluation_too_large"
NOT_EVALUATED: Final = "not_evaluated"
"""Others of the same answer had used up their limits."""
_LONGEST_MESSAGE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An answer, for those who judge it."""

    candidate: Said
    recorded: Said | None
    similarity: float | None
    facts: AnswerFacts


class AssertionChecker(Protocol):
    """Reads and checks assertions within limits of time and memory."""

    async def read(self, tenant_id: str, assertions: Sequence[Assertion]) -> None:
        """Checks that they can be checked, before a replay is made.

        Raises `ValidationFailed` with the field of one that cannot, and `TemplateWorkersBusy`.
        """
        ...

    async def check(
        self, tenant_id: str, assertions: Sequence[Assertion], subject: Subject
    ) -> tuple[AssertionResult, ...]:
        """How each went, in their order. None passes for an answer that did not come.

        An assertion that cannot be evaluated, or not within the limits, did not pass and has an error code.
        """
        ...


def find_fault(assertions: Sequence[Assertion]) -> tuple[int, str] | None:
    """The first assertion that cannot be checked, by its position, and why."""
    names: set[str] = set()
    for position, assertion in enumerate(assertions):
        fault = "Another assertion has this name." if assertion.name in names else _find_fault(assertion)
        names.add(assertion.name)
        if fault is not None:
            return position, fault
    return None


def check_assertions(assertions: Sequence[Assertion], values: Mapping[str, Any]) -> tuple[AssertionResult, ...]:
    """How each went. `values` as `describe_subject` gives them."""
    return tuple(_check(assertion, values) for assertion in assertions)


def describe_subject(subject: Subject) -> dict[str, JsonValue]:
    """What expressions can name, by name; plain JSON."""
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


def fail_assertion(assertion: Assertion, message: str, error_code: str | None = None) -> AssertionResult:
    """The result of an assertion that did not pass."""
    return AssertionResult(name=assertion.name, passed=False, message=message[:_LONGEST_MESSAGE], error_code=error_code)


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


def _check(assertion: Assertion, values: Mapping[str, Any]) -> AssertionResult:
    try:
        if assertion.expression is not None:
            fault = _check_expression(assertion.expression, values)
        elif assertion.tool_name is not None:
            fault = _check_arguments(assertion.schema, assertion.tool_name, values)
        else:
            fault = _check_text(assertion.schema, values["text"])
    except (ExpressionRefused, ExpressionFailed, RecursionError) as error:
        return fail_assertion(assertion, str(error), EVALUATION_FAILED)
    return AssertionResult(name=assertion.name, passed=True) if fault is None else fail_assertion(assertion, fault)


def _check_expression(source: str, values: Mapping[str, Any]) -> str | None:
    return None if evaluate(read_expression(source, NAMES), values) else "It does not hold."


def _check_text(schema: JsonValue, text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "The text is no JSON."
    return check_value(schema, value)


def _check_arguments(schema: JsonValue, tool_name: str, values: Mapping[str, Any]) -> str | None:
    """Nothing is wrong with calls that are not made."""
    faults = (
        check_value(schema, call["arguments"], tool_name) for call in values["tool_calls"] if call["name"] == tool_name
    )
    return next((fault for fault in faults if fault is not None), None)


def _calls(said: Said) -> list[dict[str, JsonValue]]:
    return [{"name": call.name, "arguments": clone(call.arguments)} for call in said.calls]


def _word(said: Said) -> str | None:
    return None if said.stop_reason is None else said.stop_reason.value
