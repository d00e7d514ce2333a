"""Health, readiness and metrics. These routes need no API key and reveal nothing about tenants."""

import asyncio
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from litestar import HttpMethod, MediaType, Response, get, route
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from pydantic import BaseModel, ConfigDict, Field

from server.conversation.errors import (
    CheckTimedOut,
    DatabaseUnavailable,
    Internal,
    KeyRejected,
    SchemaAhead,
    SchemaBehind,
    ShuttingDown,
    StrataError,
)
from server.conversation.readiness import Probe
from server.telemetry.metrics import CONTENT_TYPE, Metrics
from server.turns.running import RunningTurns
from server.web.auth import bearer_token
from server.web.errors import answer_headers, build_problem, document_errors
from server.web.problem import PROBLEM_MEDIA_TYPE
from server.web.request import PROBLEM_CODE, StrataRequest, request_id_of

_log = logging.getLogger("strata.web")

_CHECK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one probe."""

    name: str
    error: StrataError | None


class Readiness:
    """Runs the probes concurrently, each with a time limit.

    Concurrent callers share one run: `/readyz` needs no key, and a flood of requests to it must not become a flood of
    connections to the database.
    """

    def __init__(self, probes: Sequence[Probe], running_turns: RunningTurns) -> None:
        self._probes = tuple(probes)
        self._running_turns = running_turns
        self._round: asyncio.Task[tuple[Check, ...]] | None = None
        self._was_ready = True

    async def check(self) -> tuple[Check, ...]:
        """Return one check per probe, in their order; while the process shuts down, one check that says so."""
        if self._running_turns.draining:
            return (Check(name="process", error=ShuttingDown()),)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._run_probes(), name="readiness")
        return await asyncio.shield(self._round)

    async def _run_probes(self) -> tuple[Check, ...]:
        checks = tuple(await asyncio.gather(*map(_run_probe, self._probes)))
        ready = all(check.error is None for check in checks)
        if ready != self._was_ready:
            self._was_ready = ready
            _log_change(checks)
        return checks


async def _run_probe(probe: Probe) -> Check:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            await probe.check()
    except StrataError as error:
        return Check(name=probe.name, error=error)
    except TimeoutError:
        return Check(name=probe.name, error=CheckTimedOut(f"The check did not end within {_CHECK_SECONDS:g} s."))
    return Check(name=probe.name, error=None)


def _log_change(checks: Sequence[Check]) -> None:
    failing = {check.name: check.error.code for check in checks if check.error}
    if failing:
        _log.warning("readiness.lost", extra={"failing": failing})
    else:
        _log.info("readiness.regained")


class HealthView(BaseModel):
    """The process is alive."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ok"] = Field(default="ok", examples=["ok"])


class CheckView(BaseModel):
    """A dependency of the server and whether it is usable."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(examples=["database"])
    status: Literal["ok", "failing"] = Field(examples=["ok"])
    code: str | None = Field(default=None, description="The error code, for programs.", examples=[None])
    detail: str | None = Field(default=None, description="The error message, for people.", examples=[None])


class ReadyView(BaseModel):
    """The server is ready."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ready"] = Field(default="ready", examples=["ready"])
    checks: list[CheckView] = Field(examples=[[{"name": "database", "status": "ok"}]])


@route(
    "/healthz",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    status_code=200,
    summary="Whether the process is alive",
    response_description="The process is alive.",
    description="Checks nothing outside the process. `/readyz` checks whether the server can serve.",
    tags=["operations"],
    responses=document_errors(),
)
async def check_health() -> HealthView:
    return HealthView()


@route(
    "/readyz",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    status_code=200,
    summary="Whether the server can serve now",
    response_description="The server is ready.",
    description="Checks the dependencies of the server. An answer of 503 names those that fail in `checks`; the server "
    "keeps running and answers 200 again when the cause is gone.",
    tags=["operations"],
    responses=document_errors(DatabaseUnavailable, SchemaBehind, SchemaAhead, ShuttingDown),
)
async def check_readiness(
    request: StrataRequest, readiness: NamedDependency[SkipValidation[Readiness]]
) -> Response[ReadyView]:
    """Answer 200 or 503, with the checks."""
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
    description="In the text format of Prometheus. Labels have values of closed sets and contain no content, and no "
    "ids except those of assistants if the operator enables them. If STRATA_METRICS_TOKEN is set, it is required as "
    "bearer token.",
    tags=["operations"],
    responses=document_errors(KeyRejected),
)
async def show_metrics(
    request: StrataRequest,
    metrics: NamedDependency[SkipValidation[Metrics]],
    metrics_token: NamedDependency[SkipValidation[str | None]],
) -> Response[bytes]:
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
    """Return the first failure with a known cause, else the first one."""
    failures = [check.error for check in checks if check.error is not None]
    return next((error for error in failures if not isinstance(error, Internal)), failures[0] if failures else None)
