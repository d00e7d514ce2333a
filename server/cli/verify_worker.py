"""A worker process of `strata replay verify`: it has a loop, a connection and offline providers of its own.

It ends with the command, however that ends: a pipe that only the command holds the other end of tells it.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

import uvloop

from server.app.settings import Settings
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.replay.verify.verification import Verified
from server.replay.verify.verifier import Verifier, VerifyOptions
from server.telemetry.logs import configure_logs


class _Worker:
    """What a process keeps between its batches."""

    def __init__(
        self, settings: Settings, options: DatabaseOptions, verify_options: VerifyOptions, tenant_id: str | None
    ) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        self._verifier = self._runner.run(self._open(settings, options, verify_options, tenant_id))

    def verify(self, conversation_ids: Sequence[str]) -> Verified:
        return self._runner.run(self._verifier.verify(conversation_ids))

    async def _open(
        self, settings: Settings, options: DatabaseOptions, verify_options: VerifyOptions, tenant_id: str | None
    ) -> Verifier:
        # The SDKs take seconds to load, and the command itself, which imports this module, needs none of them.
        from server.app.providers import open_offline_providers  # noqa: PLC0415  reason: see above

        database = Database(replace(options, pool_size=1))
        self._stack.push_async_callback(database.close)
        offline_providers = await self._stack.enter_async_context(open_offline_providers(settings))
        return Verifier(PostgresRecordedCalls(database, tenant_id=tenant_id), offline_providers, verify_options)


_worker: _Worker | None = None


def begin_worker(
    told: Connection, settings: Settings, options: DatabaseOptions, verify_options: VerifyOptions, tenant_id: str | None
) -> None:
    """Once for each process, before its first batch."""
    global _worker  # noqa: PLW0603  reason: what an initializer makes can be kept nowhere else
    # Whoever presses Ctrl-C means the command, which tells the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(told,), daemon=True).start()
    configure_logs("warning", settings.log_format)
    _worker = _Worker(settings, options, verify_options, tenant_id)


def verify_batch(conversation_ids: Sequence[str]) -> Verified:
    """What came of these conversations."""
    if _worker is None:
        raise RuntimeError
    return _worker.verify(conversation_ids)


def _leave_with(told: Connection) -> None:
    """Nothing is ever said: the pipe's end is the command's."""
    told.poll(None)
    os._exit(0)
