"""The table from error codes to HTTP statuses, and the answers to exceptions.

No other module knows the statuses of errors. An exception that is not a `StrataError` is answered as `internal`, with
the request id and without details; the middleware logs its traceback.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Example

from server.conversation import errors
from server.conversation.errors import Internal, StrataError
from server.web.json_text import encode_json
from server.web.problem import PROBLEM_MEDIA_TYPE, Problem
from server.web.request import FAILURE, PROBLEM_CODE, StrataRequest, request_id_of
from server.web.validation import read_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The status and headers of one error code."""

    status: int
    retry_after_seconds: int | None = None
    """Sent if waiting helps, unless the error has a detail `retry_after_seconds`."""
    should_retry: bool | None = None
    """False is sent as `x-should-retry`, because client libraries repeat 409 and 5xx by default."""
    headers: tuple[tuple[str, str], ...] = ()


_FINAL_CONFLICT: Final = Row(status=409, should_retry=False)
_NOT_FOUND: Final = Row(status=404)
_UNAVAILABLE: Final = Row(status=503, retry_after_seconds=5)
_BAD_GATEWAY: Final = Row(status=502)
_FINAL_UNAVAILABLE: Final = Row(status=503, should_retry=False)

ANSWERS: Final[Mapping[type[StrataError], Row]] = {
    errors.ValidationFailed: Row(status=422),
    errors.RequestMalformed: Row(status=400),
    errors.RequestHeadTooLarge: Row(status=431),
    errors.RequestHeadTimedOut: Row(status=408),
    errors.BodyMalformed: Row(status=400),
    errors.BodyTooLarge: Row(status=413),
    # The rest of the body would follow the answer, so the connection cannot be used again.
    errors.BodyTimedOut: Row(status=408, headers=(("connection", "close"),)),
    errors.MediaTypeUnsupported: Row(status=415),
    errors.MethodNotAllowed: Row(status=405),
    errors.CursorInvalid: Row(status=400),
    errors.HistoryRuleBroken: Row(status=422),
    errors.TemplateInvalid: Row(status=422),
    errors.ArchiveInvalid: Row(status=422),
    errors.PriceUnknown: Row(status=422),
    errors.KeyRejected: Row(status=401, headers=(("www-authenticate", "Bearer"),)),
    errors.ScopeMissing: Row(status=403),
    errors.OtherTenantReadOnly: Row(status=403),
    errors.RateLimited: Row(status=429, retry_after_seconds=1),
    errors.SessionEnded: Row(status=401, headers=(("www-authenticate", "Bearer"),)),
    # The error always has a detail `retry_after_seconds`.
    errors.LoginLocked: Row(status=429),
    errors.RequestForged: Row(status=403),
    errors.RouteNotFound: _NOT_FOUND,
    errors.TenantNotFound: _NOT_FOUND,
    errors.ApiKeyNotFound: _NOT_FOUND,
    errors.AssistantNotFound: _NOT_FOUND,
    errors.ConversationNotFound: _NOT_FOUND,
    errors.TurnNotFound: _NOT_FOUND,
    errors.CallNotFound: _NOT_FOUND,
    errors.RawBytesRemoved: _NOT_FOUND,
    errors.ImageNotFound: _NOT_FOUND,
    errors.CompactionNotFound: _NOT_FOUND,
    errors.ViewNotFound: _NOT_FOUND,
    errors.ReplayNotFound: _NOT_FOUND,
    errors.ConversationBusy: Row(status=409, retry_after_seconds=1),
    errors.QueueFull: Row(status=409, retry_after_seconds=5),
    errors.TurnNotRunning: _FINAL_CONFLICT,
    errors.RevisionMismatch: _FINAL_CONFLICT,
    errors.AssistantRevised: _FINAL_CONFLICT,
    errors.IdempotencyKeyReused: _FINAL_CONFLICT,
    errors.EpochMoved: _FINAL_CONFLICT,
    errors.LeaseLost: _FINAL_CONFLICT,
    errors.TenantExists: _FINAL_CONFLICT,
    errors.TenantNotEmpty: _FINAL_CONFLICT,
    errors.ConversationExists: _FINAL_CONFLICT,
    errors.AssistantExists: _FINAL_CONFLICT,
    errors.ViewExists: _FINAL_CONFLICT,
    errors.ViewLimitReached: _FINAL_CONFLICT,
    errors.ReplayEnded: _FINAL_CONFLICT,
    errors.ReplayBusy: _FINAL_CONFLICT,
    errors.DatabaseUnavailable: Row(status=503, retry_after_seconds=2),
    errors.SchemaBehind: _UNAVAILABLE,
    errors.SchemaAhead: _UNAVAILABLE,
    errors.CheckTimedOut: _UNAVAILABLE,
    errors.SummaryUnavailable: _UNAVAILABLE,
    errors.TemplateWorkersBusy: _UNAVAILABLE,
    # The turn has ended; the same request again would return it, or begin another turn.
    errors.TurnInterrupted: _FINAL_UNAVAILABLE,
    errors.TurnStalled: _FINAL_UNAVAILABLE,
    errors.AnswerUnstorable: _FINAL_UNAVAILABLE,
    errors.AnswerUnreadable: _FINAL_UNAVAILABLE,
    errors.BodyBudgetExhausted: Row(status=503, retry_after_seconds=2),
    errors.ConnectionLimitReached: Row(status=503, retry_after_seconds=1),
    errors.ShuttingDown: Row(status=503, retry_after_seconds=1),
    # Start-up errors end a process before it listens; over HTTP they only occur in /readyz.
    errors.SettingsInvalid: _UNAVAILABLE,
    errors.DatabaseUnsupported: _UNAVAILABLE,
    errors.DataDirectoryForbidden: _UNAVAILABLE,
    errors.DataDirectoryIncompatible: _UNAVAILABLE,
    errors.DiskFull: _UNAVAILABLE,
    errors.EmbeddedStartFailed: _UNAVAILABLE,
    errors.MigrationFailed: _UNAVAILABLE,
    errors.AddressInUse: _UNAVAILABLE,
    errors.ProviderNotConfigured: _FINAL_UNAVAILABLE,
    errors.ProviderRateLimited: Row(status=429),
    errors.ProviderQuotaExceeded: _BAD_GATEWAY,
    errors.ProviderOverloaded: Row(status=503, retry_after_seconds=5),
    errors.ProviderUnavailable: Row(status=503, retry_after_seconds=5),
    errors.ProviderTimedOut: Row(status=504),
    errors.ProviderDisconnected: _BAD_GATEWAY,
    errors.ProviderEndedEarly: _BAD_GATEWAY,
    errors.ProviderEmpty: _BAD_GATEWAY,
    errors.ProviderMalformed: _BAD_GATEWAY,
    errors.ProviderCallMalformed: _BAD_GATEWAY,
    errors.ProviderRejected: _BAD_GATEWAY,
    errors.ProviderAuthentication: _BAD_GATEWAY,
    errors.ContextTooLong: Row(status=422),
    errors.SignatureRejected: _BAD_GATEWAY,
    errors.AnswerRejected: _BAD_GATEWAY,
    errors.PrefixMismatch: _BAD_GATEWAY,
    errors.SummaryRejected: _BAD_GATEWAY,
    errors.CallLimitReached: Row(status=503, retry_after_seconds=5),
    errors.CacheGone: _BAD_GATEWAY,
    errors.Internal: Row(status=500),
}

_FRAMEWORK_ERRORS: Final[Mapping[int, type[StrataError]]] = {
    401: errors.KeyRejected,
    403: errors.ScopeMissing,
    404: errors.RouteNotFound,
    405: errors.MethodNotAllowed,
    413: errors.BodyTooLarge,
    415: errors.MediaTypeUnsupported,
}
_FRAMEWORK_HEADERS: Final = ("allow",)
_CLIENT_ERRORS: Final = range(400, 500)
_RESERVED: Final = frozenset(Problem.model_fields) - {"errors"}


def answer_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer any exception with a problem."""
    known = translate(request, error)
    if isinstance(known, Internal):
        request.scope["state"][FAILURE] = error
    request.scope["state"][PROBLEM_CODE] = known.code
    kept = {
        name: value
        for name, value in (getattr(error, "headers", None) or {}).items()
        if name.lower() in _FRAMEWORK_HEADERS
    }
    return build_answer(known, request_id_of(request.scope), kept)


def translate(request: Request[Any, Any, Any], error: Exception) -> StrataError:
    """Return the `StrataError` for an exception. An unknown exception becomes `Internal`, without its text."""
    match error:
        case StrataError() if type(error) in ANSWERS:
            return error
        case ValidationException():
            body = request.decoded_body if isinstance(request, StrataRequest) else None
            return errors.ValidationFailed(errors=[fault.model_dump() for fault in read_faults(error, body)])
        case HTTPException() if error.status_code in _FRAMEWORK_ERRORS:
            return _FRAMEWORK_ERRORS[error.status_code]()
        case HTTPException() if error.status_code in _CLIENT_ERRORS:
            # What is left here is a header that cannot be read; Litestar's text would repeat it.
            return errors.ValidationFailed("A header of the request is malformed.", hint="Correct it and send again.")
        case _:
            return Internal()


_OWN_PROVIDER_ERRORS: Final = (errors.ProviderNotConfigured, errors.CallLimitReached)
"""Errors of a provider call that was not made."""


def source_of(kind: type[StrataError] | None) -> Literal["provider", "strata"]:
    """Return where an error occurred: a 429 may come from the provider or from this server."""
    if kind is None or not issubclass(kind, errors.ProviderFailed) or issubclass(kind, _OWN_PROVIDER_ERRORS):
        return "strata"
    return "provider"


def build_problem(error: StrataError, request_id: str) -> Problem:
    """Build the body of the answer. A detail never replaces a member of the format itself."""
    status = ANSWERS[type(error)].status
    details = {} if isinstance(error, Internal) else {k: v for k, v in error.details.items() if k not in _RESERVED}
    if status == HTTPStatus.TOO_MANY_REQUESTS or isinstance(error, errors.ProviderFailed):
        details["source"] = source_of(type(error))
    return Problem(
        **details,  # type: ignore[arg-type]  # reason: extra members, validated by the model
        type=f"urn:strata:error:{error.code}",
        title=HTTPStatus(status).phrase,
        status=status,
        code=error.code,
        detail=Internal().message if isinstance(error, Internal) else error.message,
        hint=error.advice or None,
        request_id=request_id,
    )


def build_answer(error: StrataError, request_id: str, headers: Mapping[str, str] | None = None) -> Response[bytes]:
    """Build the answer: status, headers, body."""
    row = ANSWERS[type(error)]
    return Response(
        content=encode_problem(error, request_id),
        status_code=row.status,
        headers={**(headers or {}), **answer_headers(error)},
        media_type=PROBLEM_MEDIA_TYPE,
    )


def encode_problem(error: StrataError, request_id: str) -> bytes:
    """Encode the body of the answer. Absent members are left out rather than null."""
    return encode_json(build_problem(error, request_id).model_dump(exclude_none=True))


def answer_headers(error: StrataError) -> dict[str, str]:
    """Return the headers of an error, without the content type."""
    row = ANSWERS[type(error)]
    headers = dict(row.headers)
    retry_after = error.details.get("retry_after_seconds", row.retry_after_seconds)
    if isinstance(retry_after, int | float):
        headers["retry-after"] = str(math.ceil(retry_after))
    if row.should_retry is not None:
        headers["x-should-retry"] = str(row.should_retry).lower()
    return headers


def document_errors(*kinds: type[StrataError]) -> dict[int, ResponseSpec]:
    """Build the `responses` of a route for the OpenAPI document. `internal` is always included."""
    by_status: dict[int, list[type[StrataError]]] = {}
    for kind in (*kinds, Internal):
        by_status.setdefault(ANSWERS[kind].status, []).append(kind)
    return {
        status: ResponseSpec(
            data_container=Problem,
            generate_examples=False,
            media_type=PROBLEM_MEDIA_TYPE,
            description=" ".join(f"`{kind.code}`: {kind().message}" for kind in kinds_of_status),
            examples=[_example(kind) for kind in kinds_of_status],
        )
        for status, kinds_of_status in by_status.items()
    }


_READING: Final = (
    errors.BodyMalformed,
    errors.BodyTooLarge,
    errors.BodyTimedOut,
    errors.BodyBudgetExhausted,
    errors.MediaTypeUnsupported,
)


def document_client_errors(*kinds: type[StrataError], body: bool = False) -> dict[int, ResponseSpec]:
    """Document the errors of a route under `/v1`, including those that all of these share. `body`: it reads one."""
    return document_admin_errors(errors.RateLimited, *kinds, body=body)


def document_admin_errors(*kinds: type[StrataError], body: bool = False) -> dict[int, ResponseSpec]:
    """Document the errors of a route under `/admin/api`, which has no rate limit."""
    shared = (errors.ValidationFailed, errors.KeyRejected, errors.ScopeMissing, errors.DatabaseUnavailable)
    return document_errors(*dict.fromkeys((*shared, *(_READING if body else ()), *kinds)))


_EXAMPLE_DETAILS: Final[Mapping[type[StrataError], Mapping[str, Any]]] = {
    errors.ValidationFailed: {
        "errors": [
            {"path": "input.0.text", "source": "body", "message": "String should have at most 100000 characters"}
        ]
    },
    errors.ScopeMissing: {"scope": "admin"},
    errors.RateLimited: {"retry_after_seconds": 1},
}


def _example(kind: type[StrataError]) -> Example:
    problem = build_problem(kind("", **_EXAMPLE_DETAILS.get(kind, {})), "req_5f0c1d9e8b7a46352413f2e1d0c9b8a7")
    return Example(id=kind.code, summary=kind().message, value=problem.model_dump(mode="json", exclude_none=True))
