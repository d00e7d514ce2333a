"""The application: its routes, its middleware, and the dependencies of its handlers."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Final

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.di import Provide
from litestar.handlers import HTTPRouteHandler
from litestar.plugins.pydantic import PydanticPlugin
from litestar.types import ControllerRouterHandler, Scope

from server.compaction.compactor import Compactor
from server.conversation.api_key import KeyRing, RateLimiter
from server.conversation.audit import AuditLog
from server.conversation.readiness import Probe
from server.conversation.store import Store
from server.inspection.actions import Archives
from server.inspection.admin_sessions import AdminSessions
from server.inspection.assistant_editor import AssistantEditor
from server.inspection.calls import CallInspector
from server.inspection.conversation_list import SavedViews
from server.inspection.port import Inspector
from server.payload.renderer import Renderer
from server.replay.rerun.calls import ReplayCalls
from server.replay.rerun.service import ReplayService
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing
from server.turns.running import RunningTurns
from server.turns.service import TurnService
from server.web import operations
from server.web.admin.page_errors import answer_any_exception
from server.web.admin.sessions import BrowserSessions
from server.web.admin.site import build_pages
from server.web.api import (
    actions,
    assistant_inspection,
    assistants,
    audit,
    conversations,
    images,
    inspection,
    jobs,
    keys,
    overview,
    replay_calls,
    replays,
    saved_views,
    turns,
    usage,
)
from server.web.api.assistants import ProviderNames
from server.web.api.turns import TurnOptions
from server.web.auth import KeyGuard, provide_actor, provide_caller
from server.web.body_budget import BodyBudget
from server.web.forwarded import TrustedProxies
from server.web.headers import provide_turn_headers
from server.web.middleware import RequestMiddleware
from server.web.openapi import build_openapi, note_security
from server.web.operations import Readiness
from server.web.request import StrataRequest, part_of
from server.web.sse import StreamOptions
from server.web.tenant_boundary import TenantBoundary

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
    conversations.replace_context,
    *actions.ROUTES,
    images.show_image,
    turns.take_turn,
    turns.list_turns,
    turns.show_turn,
    turns.follow_turn,
    keys.show_own_key,
    keys.list_keys,
    keys.show_key,
    keys.revoke_key,
    usage.report_usage,
    *inspection.ROUTES,
    overview.show_overview,
    saved_views.list_views,
    saved_views.save_view,
    saved_views.delete_view,
    audit.list_audit_entries,
    assistant_inspection.inspect_assistants,
    assistant_inspection.inspect_assistant,
    assistant_inspection.list_versions,
    assistant_inspection.inspect_version,
    assistant_inspection.render_prompt,
    assistant_inspection.check_instructions,
    replays.create_replay,
    replays.list_replays,
    replays.show_replay,
    replays.report_replay,
    replays.list_replay_items,
    replays.list_replay_results,
    replays.export_replay,
    replay_calls.show_replayed_conversation,
    replay_calls.inspect_replayed_call,
    replay_calls.show_replayed_response,
    replay_calls.show_replayed_request,
    replays.pause_replay,
    replays.continue_replay,
    replays.cancel_replay,
    replays.erase_replay,
    jobs.report_jobs,
)

_MAX_LITESTARS: Final = 4
"""A server builds one; tests of the middleware build more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebParts:
    """The collaborators and settings of the application. Handlers get them as dependencies, by the same names."""

    key_ring: KeyRing
    store: Store
    turn_service: TurnService
    compactor: Compactor
    renderer: Renderer
    rate_limiter: RateLimiter
    inspector: Inspector
    call_inspector: CallInspector
    saved_views: SavedViews
    replay_service: ReplayService
    replay_calls: ReplayCalls
    archives: Archives
    assistant_editor: AssistantEditor
    admin_sessions: AdminSessions
    audit_log: AuditLog
    default_provider: str | None
    provider_names: Collection[str]
    probes: Sequence[Probe]
    running_turns: RunningTurns
    metrics: Metrics
    tracing: Tracing
    body_limit_bytes: int
    bodies: BodyBudget = field(default_factory=BodyBudget)
    image_limit_bytes: int
    keep_alive_seconds: float
    stall_seconds: float = 30.0
    cors_origins: Sequence[str]
    metrics_token: str | None = None
    trusted_proxies: TrustedProxies = field(default_factory=TrustedProxies)
    version: str


def list_routes() -> Iterator[tuple[str, str, str, str]]:
    """Method, path, required scope and summary of every route, for the reference page."""
    for handler in ROUTES:
        if not isinstance(handler, HTTPRouteHandler):
            raise TypeError(handler)
        guard = next((guard for guard in handler.guards or () if isinstance(guard, KeyGuard)), None)
        scope = "" if guard is None else "any" if guard.scope is None else guard.scope.value
        for path in handler.paths:
            for method in sorted(str(method) for method in handler.http_methods):
                if method != "HEAD":
                    yield method, re.sub(r":\w+}", "}", path), scope, handler.summary or ""
    yield "GET", "/schema", "", "OpenAPI document"


def build_app(parts: WebParts) -> RequestMiddleware:
    """Build the ASGI application."""
    return assemble(parts, ROUTES)


def assemble(parts: WebParts, routes: Sequence[ControllerRouterHandler]) -> RequestMiddleware:
    """Build the application with these routes."""
    parts.metrics.gauge_callback("strata_turns_running", "Turns running now.", lambda: parts.running_turns.count)
    values = _values(parts)
    litestar = _build_litestar(
        tuple(routes), frozenset(values), parts.body_limit_bytes, tuple(parts.cors_origins), parts.version
    )
    return RequestMiddleware(litestar, values, bodies=parts.bodies, metrics=parts.metrics, tracing=parts.tracing)


@lru_cache(maxsize=_MAX_LITESTARS)
def _build_litestar(
    routes: tuple[ControllerRouterHandler, ...],
    part_names: frozenset[str],
    body_limit_bytes: int,
    cors_origins: tuple[str, ...],
    version: str,
) -> Litestar:
    """Build the Litestar application, which is shared by all programs of a process: building it is slow."""
    litestar = Litestar(
        route_handlers=[*routes, build_pages()],
        request_class=StrataRequest,
        dependencies={
            "caller": Provide(provide_caller),
            "actor": Provide(provide_actor),
            "turn_headers": Provide(provide_turn_headers),
            **{name: _provide(name) for name in part_names},
        },
        # Without this Litestar validates leniently: "3" would be accepted as a number.
        plugins=[PydanticPlugin(validate_strict=True)],
        exception_handlers={Exception: answer_any_exception},
        request_max_body_size=body_limit_bytes,
        cors_config=_build_cors(cors_origins),
        openapi_config=build_openapi(version),
        # Off even if an environment variable of Litestar turns them on: both expose internals in answers.
        debug=False,
        pdb_on_exception=False,
        logging_config=None,
    )
    note_security(litestar)
    return litestar


def _values(parts: WebParts) -> dict[str, object]:
    """Return the dependencies of handlers and guards by parameter name: the parts, and what is built from them."""
    return {
        # `version` is a path parameter of some routes, so it cannot be a dependency.
        **{part.name: getattr(parts, part.name) for part in fields(parts) if part.name != "version"},
        "readiness": Readiness(parts.probes, parts.running_turns),
        "browser_sessions": BrowserSessions(sessions=parts.admin_sessions, proxies=parts.trusted_proxies),
        "tenant_boundary": TenantBoundary(
            inspector=parts.inspector, replay_service=parts.replay_service, audit_log=parts.audit_log
        ),
        "provider_names": ProviderNames(default=parts.default_provider, known=parts.provider_names),
        "turn_options": TurnOptions(
            image_limit_bytes=parts.image_limit_bytes,
            stream=StreamOptions(
                keep_alive_seconds=parts.keep_alive_seconds,
                stall_seconds=parts.stall_seconds,
                count_stalled=parts.metrics.reader_stalled,
            ),
        ),
    }


def _provide(name: str) -> Provide:
    def find(scope: Scope) -> object:
        return part_of(scope, name)

    return Provide(find, sync_to_thread=False)


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
