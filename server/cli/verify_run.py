"""Run a verification in worker processes.

Conversations are verified in batches. Batches end in any order, but their results are added in the order of the
conversations, so that the id of one conversation says what has been counted.

A worker process has its own event loop, database connection and offline providers. It ends with the command, however
that ends: only the command holds the other end of a pipe that the worker watches.
"""

import asyncio
import heapq
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Final

import uvloop

from server.app.settings import Settings
from server.cli.verify_state import CannotWrite, VerifyState, save_state
from server.conversation.errors import DatabaseUnavailable, Internal
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.replay.conversation_choice import ChosenConversation, find_named, list_choice, measure_choice
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.replay.verify.verification import Verified, join_verified
from server.replay.verify.verifier import Verifier, VerifyOptions
from server.telemetry.logs import configure_logs

_BATCH_TURNS: Final = 400
_BATCH_CONVERSATIONS: Final = 50
_BATCHES_AHEAD: Final = 8
"""Batches per worker that are submitted ahead, so that one long conversation does not block the other workers."""
_SAVE_SECONDS: Final = 1.0
_RESUME_HINT: Final = "Use --resume to continue."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Conversations for one worker process."""

    ids: tuple[str, ...]
    last_id: str
    """The last conversation that was listed, whether or not it is chosen."""
    turn_count: int
    """Turns of all conversations that were listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options that do not change the result."""

    workers: int
    mismatch_limit: int
    file: Path
    on_turns: Callable[[int], None]
    """Called with the number of turns that were passed since the last call."""


async def draw_sample(database: Database, state: VerifyState, count: int, seed: int) -> tuple[str, ...]:
    """Draw `count` of the chosen conversations at random. The same seed and conversations give the same sample."""

    def weigh(chosen: ChosenConversation) -> bytes:
        return sha256(f"{seed}:{chosen.id}".encode()).digest()

    drawn: list[tuple[bytes, str]] = []
    async for chosen in list_choice(database, state.choice):
        if chosen.is_chosen:
            # The heap holds the conversations with the smallest weights, the largest of them first.
            weight = bytes(255 - byte for byte in weigh(chosen))
            if len(drawn) < count:
                heapq.heappush(drawn, (weight, chosen.id))
            else:
                heapq.heappushpop(drawn, (weight, chosen.id))
    return tuple(sorted(conversation_id for _, conversation_id in drawn))


async def measure_run(database: Database, state: VerifyState) -> int:
    """Return the number of turns of the run, including those that were passed before."""
    if state.named is None:
        return await measure_choice(database, state.choice)
    named = await find_named(database, state.named, tenant_id=state.choice.tenant_id)
    return sum(chosen.turn_count for chosen in named)


async def run_verification(
    database: Database, settings: Settings, state: VerifyState, options: RunOptions
) -> VerifyState:
    """Run from the given state to the end. The state file is up to date whenever this returns or raises."""
    progress = _Progress(state, options)
    # A file that cannot be written is reported now and not after hours of work.
    progress.save()
    context = multiprocessing.get_context("spawn")
    watched, held = context.Pipe(duplex=False)
    verify_options = VerifyOptions(
        wanted=state.choice.calls,
        requests=state.requests,
        answers=state.answers,
        mismatch_limit=options.mismatch_limit,
    )
    pool = ProcessPoolExecutor(
        options.workers,
        mp_context=context,
        initializer=_begin_worker,
        initargs=(watched, settings, database.options, verify_options, state.choice.tenant_id),
    )
    saving = asyncio.create_task(progress.save_repeatedly())
    try:
        await _run_batches(pool, _batches(database, state), progress, options.workers * _BATCHES_AHEAD)
    except BrokenProcessPool as error:
        raise Internal("A worker process ended unexpectedly.", hint=_RESUME_HINT) from error
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(error.message, hint=_RESUME_HINT) from error
    finally:
        saving.cancel()
        # Closing the pipe first ends the workers in the middle of their batches.
        held.close()
        pool.shutdown(wait=True, cancel_futures=True)
        progress.save()
    return progress.state


class _Progress:
    """Adds the results of batches to the state, and saves it."""

    def __init__(self, state: VerifyState, options: RunOptions) -> None:
        self._began = monotonic() - state.seconds
        self._options = options
        self.state = state

    def add(self, batch: _Batch, found: Verified) -> None:
        state = self.state
        self.state = replace(
            state,
            place=batch.last_id,
            turns_passed=state.turns_passed + batch.turn_count,
            seconds=monotonic() - self._began,
            verified=join_verified(state.verified, found, limit=self._options.mismatch_limit),
        )
        self._options.on_turns(batch.turn_count)

    def save(self) -> None:
        save_state(self._options.file, self.state)

    async def save_repeatedly(self) -> None:
        """Save every second until cancelled. Errors are ignored here; the save at the end of the run raises them."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            with suppress(CannotWrite):
                self.save()


async def _run_batches(
    pool: ProcessPoolExecutor, batches: AsyncIterator[_Batch], progress: _Progress, ahead: int
) -> None:
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[_Batch, asyncio.Future[Verified]]] = deque()
    async for batch in batches:
        running = loop.run_in_executor(pool, _verify_batch, batch.ids)
        # The first failed batch ends the run; the exceptions of the others are ignored.
        running.add_done_callback(_retrieve_exception)
        waiting.append((batch, running))
        while waiting and (len(waiting) >= ahead or waiting[0][1].done()):
            first, result = waiting.popleft()
            progress.add(first, await result)
    for last, result in waiting:
        progress.add(last, await result)


def _retrieve_exception(ended: asyncio.Future[Verified]) -> None:
    """Retrieve the exception of a future, so that asyncio does not log it as never retrieved."""
    if not ended.cancelled():
        ended.exception()


async def _batches(database: Database, state: VerifyState) -> AsyncIterator[_Batch]:
    """Yield batches of conversations in the order of their ids. A long conversation is a batch of its own."""
    ids: list[str] = []
    turn_count, last_id = 0, ""
    async for chosen in _list_conversations(database, state):
        ids += [chosen.id] if chosen.is_chosen else []
        turn_count += chosen.turn_count
        last_id = chosen.id
        if turn_count >= _BATCH_TURNS or len(ids) >= _BATCH_CONVERSATIONS:
            yield _Batch(ids=tuple(ids), last_id=last_id, turn_count=turn_count)
            ids, turn_count = [], 0
    if turn_count or ids:
        yield _Batch(ids=tuple(ids), last_id=last_id, turn_count=turn_count)


async def _list_conversations(database: Database, state: VerifyState) -> AsyncIterator[ChosenConversation]:
    if state.named is None:
        async for chosen in list_choice(database, state.choice, after_id=state.place):
            yield chosen
        return
    for chosen in await find_named(database, state.named, tenant_id=state.choice.tenant_id):
        # Ids sort in the same order as the UUIDs that they encode.
        if state.place is None or chosen.id > state.place:
            yield chosen


class _Worker:
    """What a worker process keeps between its batches."""

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
        # The SDKs take seconds to load, and only worker processes need them.
        from server.app.providers import open_offline_providers  # noqa: PLC0415  reason: see above

        database = Database(replace(options, pool_size=1))
        self._stack.push_async_callback(database.close)
        offline_providers = await self._stack.enter_async_context(open_offline_providers(settings))
        return Verifier(PostgresRecordedCalls(database, tenant_id=tenant_id), offline_providers, verify_options)


_worker: _Worker | None = None


def _begin_worker(
    watched: Connection,
    settings: Settings,
    options: DatabaseOptions,
    verify_options: VerifyOptions,
    tenant_id: str | None,
) -> None:
    """Initialize a worker process, before its first batch."""
    global _worker  # noqa: PLW0603  reason: an initializer of a pool has no other place to keep its result
    # Ctrl-C is handled by the command, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_command, args=(watched,), daemon=True).start()
    configure_logs("warning", settings.log_format)
    _worker = _Worker(settings, options, verify_options, tenant_id)


def _verify_batch(conversation_ids: Sequence[str]) -> Verified:
    """Verify conversations in a worker process."""
    if _worker is None:
        raise RuntimeError
    return _worker.verify(conversation_ids)


def _exit_with_command(watched: Connection) -> None:
    """Exit when the command ends. Nothing is ever sent over the pipe, so it becomes readable only at its end."""
    watched.poll(None)
    os._exit(0)
