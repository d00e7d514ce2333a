"""Running a verification: conversations in batches to worker processes, and what came of them back in order.

Batches end in any order; what they found is added in the order of the conversations, so that a place in that order says
what has been counted.
"""

import asyncio
import heapq
import multiprocessing
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Final

from server.app.settings import Settings
from server.cli.verify_state import CannotWrite, VerifyState, save_state
from server.cli.verify_worker import begin_worker, verify_batch
from server.conversation.errors import DatabaseUnavailable, Internal
from server.postgres.engine import Database
from server.postgres.replay.conversation_choice import ChosenConversation, find_named, list_choice, measure_choice
from server.replay.verify.verification import Verified, join_verified
from server.replay.verify.verifier import VerifyOptions

_BATCH_TURNS: Final = 400
_BATCH_CONVERSATIONS: Final = 50
_BATCHES_AHEAD: Final = 8
"""For each worker: so that a long conversation at the head of the queue keeps nobody else waiting."""
_SAVE_SECONDS: Final = 1.0
_GO_ON: Final = "--resume goes on from where it was."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Conversations for one worker."""

    ids: tuple[str, ...]
    last_id: str
    """The last that was looked at, chosen or not."""
    turn_count: int
    """Of all that were looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run."""

    workers: int
    mismatch_limit: int
    file: Path
    on_turns: Callable[[int], None]
    """Told how many turns have been passed since it was told last."""


async def draw_sample(database: Database, state: VerifyState, count: int, seed: int) -> tuple[str, ...]:
    """So many of the chosen conversations, the same ones for the same seed as long as there are no others."""

    def weigh(chosen: ChosenConversation) -> bytes:
        return sha256(f"{seed}:{chosen.id}".encode()).digest()

    drawn: list[tuple[bytes, str]] = []
    async for chosen in list_choice(database, state.choice):
        if chosen.is_chosen:
            # The heap holds those that weigh least, the heaviest of them first.
            weight = bytes(255 - byte for byte in weigh(chosen))
            if len(drawn) < count:
                heapq.heappush(drawn, (weight, chosen.id))
            else:
                heapq.heappushpop(drawn, (weight, chosen.id))
    return tuple(sorted(conversation_id for _, conversation_id in drawn))


async def measure_run(database: Database, state: VerifyState) -> int:
    """How many turns the run will pass, those included that it has passed."""
    if state.named is None:
        return await measure_choice(database, state.choice)
    named = await find_named(database, state.named, tenant_id=state.choice.tenant_id)
    return sum(chosen.turn_count for chosen in named)


async def run_verification(
    database: Database, settings: Settings, state: VerifyState, options: RunOptions
) -> VerifyState:
    """Goes on from the state to the end. The file has the state whenever this is left, whatever the reason."""
    keeper = _Keeper(state, options)
    # Before hours of work: a place that cannot be written to is found out now.
    keeper.save()
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    order = VerifyOptions(
        wanted=state.choice.calls,
        requests=state.requests,
        answers=state.answers,
        mismatch_limit=options.mismatch_limit,
    )
    pool = ProcessPoolExecutor(
        options.workers,
        mp_context=context,
        initializer=begin_worker,
        initargs=(told, settings, database.options, order, state.choice.tenant_id),
    )
    saving = asyncio.create_task(keeper.save_often())
    try:
        await _hand_out(pool, _batches(database, state), keeper, options.workers * _BATCHES_AHEAD)
    except BrokenProcessPool as error:
        raise Internal("A worker process has died.", hint=_GO_ON) from error
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(error.message, hint=_GO_ON) from error
    finally:
        saving.cancel()
        # In this order: workers that are in the middle of something leave it.
        telling.close()
        pool.shutdown(wait=True, cancel_futures=True)
        keeper.save()
    return keeper.state


class _Keeper:
    """Adds what came back, and writes it down now and then."""

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

    async def save_often(self) -> None:
        """Until it is cancelled. A disk that is full for a while is no reason to stop: the last time it has to work."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            with suppress(CannotWrite):
                self.save()


async def _hand_out(pool: ProcessPoolExecutor, batches: AsyncIterator[_Batch], keeper: _Keeper, ahead: int) -> None:
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[_Batch, asyncio.Future[Verified]]] = deque()
    async for batch in batches:
        given = loop.run_in_executor(pool, verify_batch, batch.ids)
        # What ends the run is told once, by the first that fails.
        given.add_done_callback(_hear)
        waiting.append((batch, given))
        while waiting and (len(waiting) >= ahead or waiting[0][1].done()):
            first, running = waiting.popleft()
            keeper.add(first, await running)
    for last, running in waiting:
        keeper.add(last, await running)


def _hear(ended: asyncio.Future[Verified]) -> None:
    """So that nobody complains that nobody has asked."""
    if not ended.cancelled():
        ended.exception()


async def _batches(database: Database, state: VerifyState) -> AsyncIterator[_Batch]:
    """Of conversations in the order of their ids; one that is long is a batch by itself."""
    ids: list[str] = []
    turn_count, last_id = 0, ""
    async for chosen in _list(database, state):
        ids += [chosen.id] if chosen.is_chosen else []
        turn_count += chosen.turn_count
        last_id = chosen.id
        if turn_count >= _BATCH_TURNS or len(ids) >= _BATCH_CONVERSATIONS:
            yield _Batch(ids=tuple(ids), last_id=last_id, turn_count=turn_count)
            ids, turn_count = [], 0
    if turn_count or ids:
        yield _Batch(ids=tuple(ids), last_id=last_id, turn_count=turn_count)


async def _list(database: Database, state: VerifyState) -> AsyncIterator[ChosenConversation]:
    if state.named is None:
        async for chosen in list_choice(database, state.choice, after_id=state.place):
            yield chosen
        return
    for chosen in await find_named(database, state.named, tenant_id=state.choice.tenant_id):
        # Ids sort as the UUIDs that they stand for.
        if state.place is None or chosen.id > state.place:
            yield chosen
