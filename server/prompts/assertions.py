"""The checker of assertions that uses the confined workers.

All assertions of an answer go to a worker together, in one round trip. If they exceed the limits, each is evaluated by
itself, so that one of them does not fail the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.errors import ValidationFailed
from server.prompts.worker_pool import WorkerPool
from server.replay.rerun.assertions import (
    EVALUATION_FAILED,
    EVALUATION_TIMED_OUT,
    EVALUATION_TOO_LARGE,
    NOT_EVALUATED,
    Subject,
    describe_subject,
    fail_assertion,
)
from server.replay.rerun.json_codec import to_json
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import AssertionResult

_MAX_EXCEEDED: Final = 3
"""Assertions of one answer that may exceed the limits. After that the others are not evaluated: a replay has many
answers.
"""
_MEBIBYTE: Final = 1024 * 1024


class ConfinedAssertions:
    """Implements `server.replay.rerun.assertions.AssertionChecker`."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def read(self, tenant_id: str, assertions: Sequence[Assertion]) -> None:
        """Check that the assertions can be evaluated. Raises `ValidationFailed` and `TemplateWorkersBusy`."""
        if not assertions:
            return
        answer = await self._pool.ask(tenant_id, {"task": "read_assertions", "assertions": to_json(assertions)})
        if "failure" in answer:
            raise _refuse("assertions", self._describe(answer["failure"])[0])
        if "fault" in answer:
            position, message = answer["fault"]
            raise _refuse(f"assertions.{position}", message)

    async def check(
        self, tenant_id: str, assertions: Sequence[Assertion], subject: Subject
    ) -> tuple[AssertionResult, ...]:
        """Evaluate the assertions and return their results."""
        if subject.facts.error_code is not None:
            message = f"There is no answer: {subject.facts.error_code}."
            return tuple(fail_assertion(assertion, message) for assertion in assertions)
        values = describe_subject(subject)
        found = await self._evaluate(tenant_id, assertions, values)
        if not isinstance(found, AssertionResult):
            return found
        if len(assertions) == 1:
            return (found,)
        return tuple(await self._check_each(tenant_id, assertions, values))

    async def _check_each(
        self, tenant_id: str, assertions: Sequence[Assertion], values: Mapping[str, Any]
    ) -> list[AssertionResult]:
        results: list[AssertionResult] = []
        exceeded = 0
        for assertion in assertions:
            if exceeded == _MAX_EXCEEDED:
                message = f"It was not evaluated: {_MAX_EXCEEDED} others had exceeded the limits for this answer."
                results.append(fail_assertion(assertion, message, NOT_EVALUATED))
                continue
            found = await self._evaluate(tenant_id, [assertion], values)
            if isinstance(found, AssertionResult):
                exceeded += 1
                results.append(found)
            else:
                results += found
        return results

    async def _evaluate(
        self, tenant_id: str, assertions: Sequence[Assertion], values: Mapping[str, Any]
    ) -> tuple[AssertionResult, ...] | AssertionResult:
        """Return the results, or the result of the first assertion if evaluating them together exceeded the limits."""
        request = {"task": "check_assertions", "assertions": to_json(assertions), "values": values}
        answer = await self._pool.ask(tenant_id, request, has_wait_limit=False)
        if "failure" in answer:
            return fail_assertion(assertions[0], *self._describe(answer["failure"]))
        return tuple(
            AssertionResult(name=assertion.name, passed=passed, message=message, error_code=error_code)
            for assertion, (passed, message, error_code) in zip(assertions, answer["results"], strict=True)
        )

    def _describe(self, failure: Mapping[str, Any]) -> tuple[str, str]:
        """Return a message and an error code."""
        limits = self._pool.limits
        match failure["kind"]:
            case "too_long":
                return f"It took more than {limits.seconds:g} seconds of processor time.", EVALUATION_TIMED_OUT
            case "too_large":
                return f"It took more than {limits.memory_bytes // _MEBIBYTE} MiB of memory.", EVALUATION_TOO_LARGE
            case _:
                return "It ended the process that evaluated it.", EVALUATION_FAILED


def _refuse(path: str, message: str) -> ValidationFailed:
    return ValidationFailed(f"{path}: {message}", errors=[{"path": path, "source": "body", "message": message}])
