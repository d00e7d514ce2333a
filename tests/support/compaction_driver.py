"""A conversation that outgrows its window, and a compactor for it."""

from typing import Any

from server.app.wiring import Program
from server.compaction.background_call import BackgroundCalls
from server.compaction.compactor import Compactor
from server.compaction.summary import Summariser
from server.conversation.store import Store
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticTextCache
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from tests.conftest import StrataServer
from tests.support.conversation_driver import Walk, asks, begin_walk, tells
from tests.support.emulators import EmulatedProviders
from tests.support.fakes.compaction_observer import Observed

NARROW = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1, "window_share": 0.0015}}
"""All but the newest exchange is moved at once, and a window of some 1,500 tokens is taken for full."""
STORY = "The quick brown fox jumps over the lazy dog. " * 12


def build_calls(program: Program, *, keyless: bool = False, attempts: int = 1) -> BackgroundCalls:
    policy = RetryPolicy(attempts=attempts, first_delay_seconds=0.001)
    return BackgroundCalls(program.store, {} if keyless else program.providers.by_name, retry_policy=policy)


def build_compactor(
    program: Program,
    observer: Observed,
    *,
    calls: BackgroundCalls | None = None,
    renderer: Renderer | None = None,
    store: Store | None = None,
    limit_tokens: int = 100,
    full_share: float = 0.95,
) -> Compactor:
    used = renderer or program.compactor._renderer  # noqa: SLF001  reason: there is no need for a second one
    return Compactor(
        store=store or program.store,
        renderer=used,
        summariser=Summariser(calls or build_calls(program), used, limit_tokens=limit_tokens),
        observer=observer,
        texts=StaticTextCache(),
        estimate=TokenEstimate(),
        full_share=full_share,
    )


async def walk_far(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> Walk:
    """A conversation that has nearly outgrown its window."""
    walk = await begin_walk(server.program, server.tenant.id, emulated, provider, **{"settings": NARROW} | changes)
    compactor = build_compactor(server.program, Observed())
    for number in range(1, 5):
        await walk.task(f"Task {number}. {STORY}", asks("Oslo"), tells(f"Answer {number}. {STORY}"))
        if number < 4:
            await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    return walk
