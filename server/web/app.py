"""The application: the routes, the edge around them, and what they are given."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.plugins.pydantic import PydanticPlugin
from litestar.types import ControllerRouterHandler

from server.compactor import Compactor
from server.job_report import JobReports
from server.key_ring import KeyRing
from server.rate_limit import RateLimiter
from server.readiness import Probe
from server.renderer import Renderer
from server.running_turns import RunningTurns
from server.store import Store
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing
from server.turn_service import TurnService
from server.usage_report import UsageReports
from server.web import assistants, compactions, conversations, images, jobs, keys, operations, turns, usage
from server.web.assistants import ProviderNames
from server.web.auth import KEY_RING, RATE_LIMITER, provide_caller
from server.web.edge import Edge
from server.web.errors import answer_exception
from server.web.headers import provide_turn_headers
from server.web.readiness import Readiness
from server.web.request import StrataRequest
from server.web.schema import build_openapi, note_security
from server.web.turns import TurnOptions

ROUTES: Final[Sequence[ControllerRouterHandler]] = (
    operations.check_health,
    operations.check_readiness,
    operations.show_metrics,
    assistants.create_assistant,
    assistants.list_assistants,
    assistants.show_assistant,
    assistants.revise_assistant,
    conversations.create_conversation,
    conversations.list_conversations,
    conversations.show_conversation,
    conversations.change_conversation,
    conversations.erase_conversation,
    conversations.replace_context,
    conversations.fork_conversation,
    compactions.compact_conversation,
    compactions.list_compactions,
    compactions.undo_compaction,
    images.show_image,
    turns.take_turn,
    turns.list_turns,
    turns.show_turn,
    turns.follow_turn,
    turns.cancel_turn,
    keys.show_own_key,
    keys.list_keys,
    keys.show_key,
    keys.revoke_key,
    usage.report_usage,
    jobs.report_jobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebParts:
    """All that the application needs from outside."""

    key_ring: KeyRing
    store: Store
    turn_service: TurnService
    compactor: Compactor
    renderer: Renderer
    rate_limiter: RateLimiter
    usage_reports: UsageReports
    job_reports: JobReports
    default_provider: str | None
    provider_names: Collection[str]
    probes: Sequence[Probe]
    running_turns: RunningTurns
    metrics: Metrics
    tracing: Tracing
    body_limit_bytes: int
    image_limit_bytes: int
    keep_alive_seconds: float
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
            "turn_headers": Provide(provide_turn_headers),
            **{name: _provide(value) for name, value in _values(parts).items()},
            "readiness": _provide(readiness),
        },
        # Litestar's own would be lenient, whatever a model says: "3" would be a number.
        plugins=[PydanticPlugin(validate_strict=True)],
        exception_handlers={Exception: answer_exception},
        request_max_body_size=parts.body_limit_bytes,
        cors_config=_build_cors(parts.cors_origins),
        openapi_config=build_openapi(parts.version),
        lifespan=list(parts.lifespan),
        state=State({KEY_RING: parts.key_ring, RATE_LIMITER: parts.rate_limiter}),
        # Off, also where an environment variable of Litestar's asks for it: both answer with the server's insides.
        debug=False,
        pdb_on_exception=False,
        logging_config=None,
    )
    note_security(litestar)
    return Edge(litestar, metrics=parts.metrics, tracing=parts.tracing)


def _values(parts: WebParts) -> dict[str, object]:
    """What handlers are given, by the names of their parameters."""
    return {
        "key_ring": parts.key_ring,
        "metrics": parts.metrics,
        "store": parts.store,
        "turn_service": parts.turn_service,
        "compactor": parts.compactor,
        "renderer": parts.renderer,
        "usage_reports": parts.usage_reports,
        "job_reports": parts.job_reports,
        "provider_names": ProviderNames(default=parts.default_provider, known=parts.provider_names),
        "turn_options": TurnOptions(
            image_limit_bytes=parts.image_limit_bytes, keep_alive_seconds=parts.keep_alive_seconds
        ),
    }


def _provide(value: object) -> Provide:
    return Provide(lambda: value, sync_to_thread=False)


def _build_cors(origins: Sequence[str]) -> CORSConfig | None:
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=[
            "authorization",
            "content-type",
            "idempotency-key",
            "if-match",
            "if-none-match",
            "last-event-id",
            "prefer",
            "x-stainless-retry-count",
        ],
        expose_headers=[
            "etag",
            "idempotency-replayed",
            "location",
            "preference-applied",
            "retry-after",
            "x-request-id",
            "x-should-retry",
        ],
    )
