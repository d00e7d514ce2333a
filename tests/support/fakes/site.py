"""The real application with fakes, served by uvicorn on a free port of this machine, as in production."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import httpx2
import uvicorn
from litestar.types import ControllerRouterHandler

from server.conversation.api_key import Scope, Tenant
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing, open_tracing
from server.turns.running import RunningTurns
from server.web.app import ROUTES, WebParts, assemble
from server.web.middleware import RequestMiddleware
from tests.support.fakes.key_ring import InMemoryKeyRing
from tests.support.fakes.probe import SwitchableProbe
from tests.support.fakes.rate_limiter import CountedRate
from tests.support.fakes.untouched import untouched

BODY_LIMIT = 4096
IMAGE_LIMIT = 1024
VERSION = "9.8.7"


@dataclass(slots=True, kw_only=True)
class Site:
    """A running server, its fakes, and a client for it."""

    app: RequestMiddleware
    client: httpx2.AsyncClient
    port: int
    key_ring: InMemoryKeyRing
    tenant: Tenant
    client_key: str
    admin_key: str
    probe: SwitchableProbe
    rate_limiter: CountedRate
    running_turns: RunningTurns
    metrics: Metrics
    log: StringIO = field(default_factory=StringIO)

    async def get(self, path: str, *, key: str | None = None, **options: Any) -> httpx2.Response:
        """Send a GET request, with the key if there is one."""
        if key is not None:
            options["headers"] = {**options.get("headers", {}), "authorization": f"Bearer {key}"}
        return await self.client.get(path, **options)

    def events(self, name: str) -> list[dict[str, Any]]:
        """All log lines with this event, as they were written."""
        lines = (json.loads(line) for line in self.log.getvalue().splitlines())
        return [line for line in lines if line["event"] == name]


@asynccontextmanager
async def serve(app: RequestMiddleware) -> AsyncIterator[int]:
    """Serve on a free port until the block ends. The socket is created as in production."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, access_log=False, server_header=False, ws="none", lifespan="on"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the server ended before it started")
            await asyncio.sleep(0.005)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def open_site(
    *,
    log: StringIO | None = None,
    more_routes: Sequence[ControllerRouterHandler] = (),
    cors_origins: Sequence[str] = (),
    tracing: Tracing | None = None,
    metrics_token: str | None = None,
) -> AsyncIterator[Site]:
    """A running site with one tenant and a key of each scope."""
    key_ring, probe, running_turns, rate_limiter = InMemoryKeyRing(), SwitchableProbe(), RunningTurns(), CountedRate()
    tenant = await key_ring.create_tenant("acme")
    _, client_key = await key_ring.create_key(
        tenant_id=tenant.id, name="client", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    _, admin_key = await key_ring.create_key(
        tenant_id=tenant.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    metrics = Metrics(version=VERSION)
    parts = WebParts(
        metrics_token=metrics_token,
        key_ring=key_ring,
        store=untouched("the store"),
        turn_service=untouched("the turn service"),
        compactor=untouched("the compactor"),
        renderer=untouched("the renderer"),
        rate_limiter=rate_limiter,
        inspector=untouched("the inspector"),
        call_inspector=untouched("the call inspector"),
        saved_views=untouched("the saved views"),
        replay_service=untouched("the replays"),
        replay_calls=untouched("the calls of replays"),
        archives=untouched("the archives"),
        assistant_editor=untouched("the editor of assistants"),
        admin_sessions=untouched("the sessions of operators"),
        audit_log=untouched("the audit log"),
        default_provider="gemini",
        provider_names=("gemini",),
        image_limit_bytes=IMAGE_LIMIT,
        keep_alive_seconds=10,
        probes=[probe],
        running_turns=running_turns,
        metrics=metrics,
        tracing=tracing or open_tracing(None, None, "strata", VERSION),
        body_limit_bytes=BODY_LIMIT,
        cors_origins=cors_origins,
        version=VERSION,
    )
    app = assemble(parts, [*ROUTES, *more_routes])
    async with serve(app) as port, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield Site(
            app=app,
            client=client,
            port=port,
            key_ring=key_ring,
            tenant=tenant,
            client_key=client_key,
            admin_key=admin_key,
            probe=probe,
            rate_limiter=rate_limiter,
            running_turns=running_turns,
            metrics=metrics,
            log=log or StringIO(),
        )
