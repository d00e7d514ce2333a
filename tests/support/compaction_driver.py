"""Drives a conversation until its window is full, and builds a compactor for it."""

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
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import EmulatedProviders
from tests.support.fakes.compaction_observer import Observed

NARROW = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1, "window_share": 0.0015}}
"""Moves all but the newest exchange at once, and treats a window of some 1,500 tokens as full."""
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
    used = renderer or program.compactor._renderer  # noqa: SLF001  reason: a second renderer is not needed
    return Compactor(
        store=store or program.store,
        renderer=used,
        summariser=Summariser(calls or build_calls(program), used, limit_tokens=limit_tokens),
        observer=observer,
        texts=StaticTextCache(),
        estimate=TokenEstimate(),
        full_share=full_share,
    )


async def drive_to_full_window(
    server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any
) -> ConversationDriver:
    """A conversation that has nearly filled its window."""
    driver = await start_driver(server.program, server.tenant.id, emulated, provider, **{"settings": NARROW} | changes)
    compactor = build_compactor(server.program, Observed())
    for number in range(1, 5):
        await driver.task(f"Task {number}. {STORY}", tool_reply("Oslo"), text_reply(f"Answer {number}. {STORY}"))
        if number < 4:
            await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    return driver
