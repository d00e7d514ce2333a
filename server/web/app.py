"""The application: the routes, the edge around them, and what they are given."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ControllerRouterHandler

from server.key_ring import KeyRing
from server.readiness import Probe
from server.running_turns import RunningTurns
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing
from server.web import keys, operations
from server.web.auth import KEY_RING, provide_caller
from server.web.edge import Edge
from server.web.errors import answer_exception
from server.web.readiness import Readiness
from server.web.request import StrataRequest
from server.web.schema import build_openapi, note_security

ROUTES: Final[Sequence[ControllerRouterHandler]] = (
    operations.check_health,
    operations.check_readiness,
    operations.show_metrics,
    keys.show_own_key,
    keys.list_keys,
    keys.show_key,
    keys.revoke_key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebParts:
    """All that the application needs from outside."""

    key_ring: KeyRing
    probes: Sequence[Probe]
    running_turns: RunningTurns
    metrics: Metrics
    tracing: Tracing
    body_limit_bytes: int
    cors_origins: Sequence[str]
    lifespan: Sequence[Callable[[Litestar], AbstractAsyncContextManager[None]]] = ()
    version: str


def build_app(parts: WebParts) -> Edge:
    """The ASGI application. Its `litestar` is the framework's part, inside the edge."""
    return assemble(parts, ROUTES)


def assemble(parts: WebParts, routes: Sequence[ControllerRouterHandler]) -> Edge:
    """The application with these routes."""
    readiness = Readiness(parts.probes, parts.running_turns)
    parts.metrics.gauge_callback("strata_turns_running", "Turns running now.", lambda: parts.running_turns.count)
    litestar = Litestar(
        route_handlers=list(routes),
        request_class=StrataRequest,
        dependencies={
            "caller": Provide(provide_caller),
            "key_ring": Provide(lambda: parts.key_ring, sync_to_thread=False),
            "metrics": Provide(lambda: parts.metrics, sync_to_thread=False),
            "readiness": Provide(lambda: readiness, sync_to_thread=False),
        },
        exception_handlers={Exception: answer_exception},
        request_max_body_size=parts.body_limit_bytes,
        cors_config=_build_cors(parts.cors_origins),
        openapi_config=build_openapi(parts.version),
        lifespan=list(parts.lifespan),
        state=State({KEY_RING: parts.key_ring}),
        # Off, also where an environment variable of Litestar's asks for it: both answer with the server's insides.
        debug=False,
        pdb_on_exception=False,
        logging_config=None,
    )
    note_security(litestar)
    return Edge(litestar, metrics=parts.metrics, tracing=parts.tracing)


def _build_cors(origins: Sequence[str]) -> CORSConfig | None:
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["authorization", "content-type", "idempotency-key", "last-event-id", "prefer"],
        expose_headers=["x-request-id", "retry-after"],
    )
