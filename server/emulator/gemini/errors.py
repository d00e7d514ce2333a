"""Errors in the wording of the API: `{"error": {"code", "message", "status", "details"}}`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_STATUS_NAMES: Final[Mapping[int, str]] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_RPC: Final = "type.googleapis.com/google.rpc."


class ApiError(Exception):
    """An error response of the API."""

    def __init__(self, code: int, message: str, *, details: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def render(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.code, "message": self.message, "status": _STATUS_NAMES[self.code]}
        if self.details:
            error["details"] = list(self.details)
        return {"error": error}


def invalid(message: str) -> ApiError:
    """400: the request breaks a rule."""
    return ApiError(400, message)


def unreadable(violations: Sequence[tuple[str, str]]) -> ApiError:
    """400: unknown fields or wrong values, each with its path and a description."""
    fields = [
        {"field": path, "description": description} if path else {"description": description}
        for path, description in violations
    ]
    return ApiError(
        400,
        "\n".join(description for _, description in violations),
        details=[{"@type": f"{_RPC}BadRequest", "fieldViolations": fields}],
    )


def key_missing() -> ApiError:
    return ApiError(
        403,
        "Method doesn't allow unregistered callers (callers without established identity). Please use API Key or other"
        " form of API consumer identity to call this API.",
    )


def key_rejected(code: int, message: str) -> ApiError:
    details = {
        "@type": f"{_RPC}ErrorInfo",
        "reason": "API_KEY_INVALID",
        "domain": "googleapis.com",
        "metadata": {"service": "generativelanguage.googleapis.com"},
    }
    return ApiError(code, message, details=[details])


def model_unknown(name: str, version: str, method: str) -> ApiError:
    return ApiError(
        404,
        f"models/{name} is not found for API version {version}, or is not supported for {method}. Call ListModels to"
        " see the list of available models and their supported methods.",
    )


def rate_limited(message: str, model: str, delay_seconds: float | None) -> ApiError:
    """429, with RetryInfo if there is a delay."""
    details: list[Mapping[str, Any]] = [
        {
            "@type": f"{_RPC}QuotaFailure",
            "violations": [
                {
                    "quotaMetric": "generativelanguage.googleapis.com/generate_requests_per_model",
                    "quotaId": "GenerateRequestsPerMinutePerProjectPerModel",
                    "quotaDimensions": {"location": "global", "model": model},
                    "quotaValue": "10",
                }
            ],
        },
        {
            "@type": f"{_RPC}Help",
            "links": [
                {
                    "description": "Learn more about Gemini API quotas",
                    "url": "https://ai.google.dev/gemini-api/docs/rate-limits",
                }
            ],
        },
    ]
    if delay_seconds is not None:
        details.append({"@type": f"{_RPC}RetryInfo", "retryDelay": f"{delay_seconds:g}s"})
    return ApiError(429, message, details=details)
