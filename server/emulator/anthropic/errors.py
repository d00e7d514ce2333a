"""Errors: a type, a message, and for some causes a machine-readable code."""

from dataclasses import dataclass
from typing import Any, Final

STATUS_BY_TYPE: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProblem:
    """The body of an error response. `status` overrides the usual status of its type."""

    type: str
    message: str
    error_code: str | None = None
    status: int | None = None
    retry_after_seconds: float | None = None

    @property
    def http_status(self) -> int:
        return self.status or STATUS_BY_TYPE[self.type]

    def render(self, request_id: str) -> dict[str, Any]:
        error: dict[str, Any] = {"type": self.type, "message": self.message}
        if self.error_code is not None:
            error["details"] = {"error_code": self.error_code}
        return {"type": "error", "error": error, "request_id": request_id}


class Refused(Exception):
    """The request is rejected with this problem."""

    def __init__(self, problem: ApiProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def invalid(message: str, *, error_code: str | None = None) -> Refused:
    """A 400: the request is invalid, and retrying does not help."""
    return Refused(ApiProblem(type="invalid_request_error", message=message, error_code=error_code))


def extra_input(path: str) -> Refused:
    """A 400 about a field that does not exist, or not without its beta header."""
    return invalid(f"{path}: Extra inputs are not permitted")
