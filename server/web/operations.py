"""What orchestrators and dashboards ask for. These routes need no API key and tell nothing about tenants."""

import hmac
from typing import Any, Literal

from litestar import HttpMethod, MediaType, Response, get, route
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from pydantic import BaseModel, ConfigDict, Field

from server.conversation.errors import (
    DatabaseUnavailable,
    Internal,
    KeyRejected,
    SchemaAhead,
    SchemaBehind,
    ShuttingDown,
    StrataError,
)
from server.telemetry.metrics import CONTENT_TYPE, Metrics
from server.web.auth import bearer_token
from server.web.errors import answer_headers, build_problem, document_errors
from server.web.problem import PROBLEM_MEDIA_TYPE
from server.web.readiness import Check, Readiness
from server.web.request import PROBLEM_CODE, StrataRequest, request_id_of


class HealthView(BaseModel):
    """The process answers."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ok"] = Field(default="ok", examples=["ok"])


class CheckView(BaseModel):
    """One thing that the server depends on, and whether it is usable."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(examples=["database"])
    status: Literal["ok", "failing"] = Field(examples=["ok"])
    code: str | None = Field(default=None, description="Why it is failing, for programs.", examples=[None])
    detail: str | None = Field(default=None, description="Why it is failing, for people.", examples=[None])


class ReadyView(BaseModel):
    """The server can serve now."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ready"] = Field(default="ready", examples=["ready"])
    checks: list[CheckView] = Field(examples=[[{"name": "database", "status": "ok"}]])


@route(
    "/healthz",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    status_code=200,
    summary="Whether the process is alive",
    response_description="It is.",
    description="Touches nothing outside the process. For whether it can serve, ask /readyz.",
    tags=["operations"],
    responses=document_errors(),
)
async def check_health() -> HealthView:
    """Always the same."""
    return HealthView()


@route(
    "/readyz",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    status_code=200,
    summary="Whether the server can serve now",
    response_description="It can.",
    description="Looks at everything that the server depends on. 503 names each thing that is failing, in `checks`; "
    "the server keeps running and answers 200 again by itself once the cause is gone.",
    tags=["operations"],
    responses=document_errors(DatabaseUnavailable, SchemaBehind, SchemaAhead, ShuttingDown),
)
async def check_readiness(
    request: StrataRequest, readiness: NamedDependency[SkipValidation[Readiness]]
) -> Response[ReadyView]:
    """200 with the checks, or a problem with the checks."""
    checks = await readiness.check()
    views = [_view(check) for check in checks]
    cause = _worst(checks)
    if cause is None:
        return _answer(ReadyView(checks=views), 200, MediaType.JSON)
    request.scope["state"][PROBLEM_CODE] = cause.code
    problem = build_problem(cause, request_id_of(request.scope))
    unready = problem.model_copy(update={"status": 503, "title": "Service Unavailable", "checks": views})
    return _answer(unready, 503, PROBLEM_MEDIA_TYPE, {"retry-after": "5", **answer_headers(cause)})


@get(
    "/metrics",
    media_type=MediaType.TEXT,
    summary="Metrics of this process",
    response_description="All metrics.",
    description="Prometheus' text format. Labels come from closed sets and hold no content, and no ids unless the "
    "operator has switched those of assistants on. With STRATA_METRICS_TOKEN it takes that token as a bearer token.",
    tags=["operations"],
    responses=document_errors(KeyRejected),
)
async def show_metrics(
    request: StrataRequest,
    metrics: NamedDependency[SkipValidation[Metrics]],
    metrics_token: NamedDependency[SkipValidation[str | None]],
) -> Response[bytes]:
    """Everything that the registry holds."""
    if metrics_token is not None and not hmac.compare_digest(bearer_token(request).encode(), metrics_token.encode()):
        raise KeyRejected(
            "The metrics of this server require the token of STRATA_METRICS_TOKEN.",
            hint="Send `Authorization: Bearer <token>` with that token. API keys are not accepted here.",
        )
    return Response(content=metrics.render(), headers={"content-type": CONTENT_TYPE})


def _answer(body: BaseModel, status: int, media_type: str, headers: dict[str, str] | None = None) -> Response[Any]:
    encoded = body.model_dump_json(exclude_none=True).encode()
    return Response(content=encoded, status_code=status, media_type=media_type, headers=headers)


def _view(check: Check) -> CheckView:
    if check.error is None:
        return CheckView(name=check.name, status="ok")
    return CheckView(name=check.name, status="failing", code=check.error.code, detail=check.error.message)


def _worst(checks: tuple[Check, ...]) -> StrataError | None:
    """The first failure that says what is wrong, else the first one."""
    failures = [check.error for check in checks if check.error is not None]
    return next((error for error in failures if not isinstance(error, Internal)), failures[0] if failures else None)
