"""Faults, as this API shows them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from server.emulator.gemini.errors import ApiError, key_rejected, rate_limited
from server.emulator.gemini.models import Model
from server.emulator.gemini.rendering import Answer
from server.emulator.reply import Fault, FaultKind

_DEFAULT_DELAY_SECONDS: Final = 3.0
_QUOTA: Final = (
    "You exceeded your current quota, please check your plan and billing details. For more information on this error,"
    " head to: https://ai.google.dev/gemini-api/docs/rate-limits."
)
_INTERNAL: Final = "An internal error has occurred. Please retry or report in https://developers.generativeai.google/guide/troubleshooting"
_NO_CREDIT: Final = "Your prepayment credits are depleted. Please go to AI Studio to manage your project and billing."
_OVERLOADED: Final = "The model is overloaded. Please try again later."
_DEADLINE: Final = "The request timed out. Please try again."
_SAFETY_RATINGS: Final = [{"category": "HARM_CATEGORY_DANGEROUS_CONTENT", "probability": "HIGH", "blocked": True}]
_ERRORS: Final[Mapping[FaultKind, tuple[int, str]]] = {
    FaultKind.SIGNATURE_REJECTED: (400, "Corrupted thought signature."),
    FaultKind.INTERNAL: (500, _INTERNAL),
    FaultKind.UNAVAILABLE: (503, "The service is currently unavailable."),
    FaultKind.OVERLOADED: (503, _OVERLOADED),
    FaultKind.GATEWAY_TIMEOUT: (504, _DEADLINE),
    FaultKind.ERROR_MID_STREAM: (500, _INTERNAL),
    FaultKind.OVERLOADED_MID_STREAM: (503, _OVERLOADED),
}
_MID_STREAM: Final = frozenset({FaultKind.ERROR_MID_STREAM, FaultKind.OVERLOADED_MID_STREAM})


def error_before_answer(fault: Fault | None, model: Model) -> ApiError | None:
    """The error that replaces the response, for faults that prevent one."""
    if fault is None or fault.kind in _MID_STREAM:
        return None
    match fault.kind:
        case FaultKind.RATE_LIMITED:
            delay = _DEFAULT_DELAY_SECONDS if fault.retry_after_seconds is None else fault.retry_after_seconds
            text = fault.message or f"{_QUOTA}\nPlease retry in {delay:g}s."
            return rate_limited(text, model.id, delay)
        case FaultKind.RATE_LIMITED_NO_DELAY:
            return rate_limited(fault.message or _QUOTA, model.id, None)
        case FaultKind.NO_CREDIT:
            return rate_limited(fault.message or _NO_CREDIT, model.id, None)
        case FaultKind.BAD_AUTH:
            return key_rejected(401, fault.message or "API key not valid. Please pass a valid API key.")
        case FaultKind.CONTEXT_EXCEEDED:
            return ApiError(400, fault.message or window_exceeded(model.input_limit_tokens + 1, model))
        case _:
            return _plain_error(fault)


def error_mid_stream(fault: Fault | None) -> ApiError | None:
    """The error inside a running stream."""
    return _plain_error(fault) if fault is not None and fault.kind in _MID_STREAM else None


def window_exceeded(tokens: int, model: Model) -> str:
    return (
        f"The input token count ({tokens}) exceeds the maximum number of tokens allowed ({model.input_limit_tokens})."
    )


def shape(answer: Answer, fault: Fault | None) -> Answer:
    """The answer, ended by the fault after the given number of chunks, with a finish reason."""
    if fault is None:
        return answer
    begun = answer.chunks[: fault.after_chunks]
    match fault.kind:
        case FaultKind.REFUSAL:
            more: dict[str, Any] = {"safetyRatings": _SAFETY_RATINGS}
            if fault.message:
                more["finishMessage"] = fault.message
            return replace(answer, chunks=begun, finish_reason="SAFETY", candidate_fields=more)
        case FaultKind.MAX_TOKENS:
            return replace(answer, chunks=begun, finish_reason="MAX_TOKENS")
        case FaultKind.EMPTY_STOP:
            thoughts = [chunk for chunk in answer.chunks if chunk.candidates_tokens == 0]
            return replace(answer, chunks=thoughts)
        case _:
            return answer


def _plain_error(fault: Fault) -> ApiError | None:
    if fault.kind not in _ERRORS:
        return None
    code, text = _ERRORS[fault.kind]
    return ApiError(code, fault.message or text)


def blocked_prompt(fault: Fault) -> dict[str, Any]:
    """The feedback that replaces all candidates."""
    feedback: dict[str, Any] = {"blockReason": "PROHIBITED_CONTENT"}
    return {**feedback, "blockReasonMessage": fault.message} if fault.message else feedback


def with_unknown_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The response as a later version of the API might send it: one more part, and one more field on every level.

    Requests may contain `futureContent` and `futureHint` of a part again, as the real API accepts what it returned.
    """
    candidates = []
    for candidate in document["candidates"]:
        content = candidate["content"]
        parts = [{**part, "futureHint": {"weight": 1}} for part in content.get("parts", ())]
        parts.insert(0, {"futureContent": {"kind": "hologram", "data": "aG9sb2dyYW0="}})
        candidates.append({**candidate, "content": {**content, "parts": parts}, "futureScore": 0.5})
    return {**document, "candidates": candidates, "futureMetadata": {"revision": 7}}
