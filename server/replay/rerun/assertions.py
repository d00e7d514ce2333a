"""Assertions: conditions that each answer of a candidate must fulfil.

An expression or a schema may take any amount of time and memory. The assertions of a tenant are therefore evaluated in
a confined process only (`assertion_evaluation`), which the rest of the program reaches through `AssertionChecker`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from server.conversation.block import JsonValue
from server.payload.arguments import clone
from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import AnswerFacts, AssertionResult

EVALUATION_FAILED: Final = "evaluation_failed"
"""The error code of an assertion that raised an error on the values of an answer."""
EVALUATION_TIMED_OUT: Final = "evaluation_timed_out"
EVALUATION_TOO_LARGE: Final = "evaluation_too_large"
NOT_EVALUATED: Final = "not_evaluated"
"""Other assertions of the same answer had exceeded the limits."""
_MAX_MESSAGE_CHARS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The answer that assertions are evaluated on."""

    candidate: AnswerContent
    recorded: AnswerContent | None
    similarity: float | None
    facts: AnswerFacts


class AssertionChecker(Protocol):
    """Reads and evaluates assertions within limits of time and memory.

    Implemented by `server.prompts.assertions`, which is above this room and starts the confined processes.
    """

    async def read(self, tenant_id: str, assertions: Sequence[Assertion]) -> None:
        """Check that the assertions can be evaluated.

        Raises `ValidationFailed` with the field of the first that cannot, and `TemplateWorkersBusy`.
        """
        ...

    async def check(
        self, tenant_id: str, assertions: Sequence[Assertion], subject: Subject
    ) -> tuple[AssertionResult, ...]:
        """Evaluate the assertions and return their results in the same order.

        No assertion passes for an answer that failed. An assertion that cannot be evaluated, or not within the limits,
        does not pass and has an error code.
        """
        ...


def describe_subject(subject: Subject) -> dict[str, JsonValue]:
    """Build the values that expressions can use, by name, as plain JSON.

    | name                  | value                                                                     |
    |-----------------------|---------------------------------------------------------------------------|
    | `text`                | the text of the candidate's answer                                        |
    | `tool_calls`          | its tool calls: objects of `name` and `arguments`                         |
    | `stop_reason`         | its stop reason; None if it has none                                      |
    | `recorded_text`, …    | the same of the recorded answer; empty and None if there is none          |
    | `similarity`          | of the two texts, 0 to 1; None if they were not compared                  |
    | `input_tokens`, …     | `output_tokens` and `reasoning_tokens` of the candidate's calls           |
    | `cost_usd`            | a number; None if the price is not known                                  |
    | `latency_ms`          | from the request to the last byte                                         |
    """
    recorded, facts = subject.recorded, subject.facts
    usage = facts.usage
    return {
        "text": subject.candidate.text,
        "tool_calls": _calls(subject.candidate),
        "stop_reason": subject.candidate.stop_reason,
        "recorded_text": "" if recorded is None else recorded.text,
        "recorded_tool_calls": [] if recorded is None else _calls(recorded),
        "recorded_stop_reason": None if recorded is None else recorded.stop_reason,
        "similarity": subject.similarity,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost_usd": None if facts.cost_usd is None else float(facts.cost_usd),
        "latency_ms": facts.latency_ms,
    }


def fail_assertion(assertion: Assertion, message: str, error_code: str | None = None) -> AssertionResult:
    """Build the result of an assertion that did not pass."""
    return AssertionResult(
        name=assertion.name, passed=False, message=message[:_MAX_MESSAGE_CHARS], error_code=error_code
    )


def _calls(answer: AnswerContent) -> list[dict[str, JsonValue]]:
    return [{"name": call.name, "arguments": clone(call.arguments)} for call in answer.calls]
