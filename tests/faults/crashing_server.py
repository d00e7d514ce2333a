"""Starts real servers that die by SIGKILL at a named point of a turn: `python -m tests.faults.crashing_server`.

Each line of input is an order in JSON, and each order starts a server in a separate process:

-> {"settings": {…}, "crash_at": "after_accept", "nth": 1, "after_bytes": "fox"} <- {"pid": 7, "url": "http://…"} <-
{"pid": 7, "ended": -9}

With `"works": true` it is a worker instead, which has no URL. Without `crash_at` it does not crash. All of them are
forks of this process, which has imported everything once and does nothing else: importing takes seconds, forking does
not. When the input ends, all servers end.

The server has no hook for this. The store, the providers, the renderer and the job are wrapped here, at their ports.
"""

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn
from uuid import UUID

import uvloop

import server.providers.anthropic.provider
import server.providers.gemini.provider  # noqa: F401  reason: SDKs are imported when they are needed, here once before all forks
from server.app import replays as replay_wiring
from server.app import services, wiring
from server.app.asgi import serve
from server.app.http_server import bind, url_of
from server.app.providers import Providers, open_providers
from server.app.settings import Settings
from server.conversation.block import Block
from server.conversation.call import Call, CallEnd, CallStart, Chunk
from server.conversation.conversation import Lease
from server.conversation.event import ProviderEvent
from server.conversation.payload import Payload
from server.conversation.store import AcceptOutcome, Finished, History, NewAnswer, NewInput, PayloadSource
from server.jobs.compaction import Compact, compaction_job
from server.jobs.job import Job
from server.jobs.queue import JobSender
from server.jobs.worker import WorkerOptions
from server.payload.transcript import TranscriptTurn
from server.postgres.replay.replays import PostgresReplays
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.providers.choice import GEMINI, KEY_VARIABLES, ProviderChoice
from server.providers.provider import Provider, ProviderStream
from server.replay.rerun.replay import CallPermission, CallSpending, ClaimedItem, ItemLease
from server.replay.rerun.result import TurnResult
from server.telemetry.logs import configure_logs

STORE_POINTS = (
    "before_accept",
    "after_accept",
    "after_ticket",
    "after_load",
    "before_epoch",
    "after_epoch",
    "after_begin_call",
    "after_end_call",
    "after_flush",
    "before_finish",
    "after_finish",
    "after_take_over",
    "before_look",
    "after_look",
    "after_question",
    "after_answer",
)
PROVIDER_POINTS = ("before_call", "after_first_event", "after_last_byte", "after_last_byte_flushed")
JOB_POINTS = ("before_job", "after_job", "after_rendering")
REPLAY_POINTS = ("after_claim", "after_reserve", "after_settle", "after_result")
POINTS = (*STORE_POINTS, *PROVIDER_POINTS, *JOB_POINTS, *REPLAY_POINTS)
_LOOK_SECONDS = 0.05


class Fate:
    """When this process has to die."""

    def __init__(self, crash_at: str | None, nth: int, after_bytes: str) -> None:
        if crash_at is not None and crash_at not in POINTS:
            raise ValueError(f"There is no point {crash_at}.")
        self.crash_at = crash_at
        self._left = nth
        self._after_bytes = after_bytes.encode()
        self.flushed = bytearray()
        """The durable part of the answers of this process."""

    def reach(self, point: str) -> None:
        if point != self.crash_at:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def flush(self, chunks: Sequence[Chunk]) -> None:
        """A flush counts when it has made durable what the order requires."""
        for chunk in chunks:
            self.flushed += chunk.data
        if chunks and self._after_bytes in self.flushed:
            self.reach("after_flush")


class CrashingStore(PostgresStore):
    """The store, with a point before or after each step of a turn."""

    fate: Fate

    async def accept_turn(self, tenant_id: str, turn: NewInput) -> AcceptOutcome:
        self.fate.reach("before_accept")
        outcome = await super().accept_turn(tenant_id, turn)
        self.fate.reach("after_accept")
        return outcome

    async def enter_queue(self, tenant_id: str, conversation_id: str, **options: Any) -> int:
        ticket = await super().enter_queue(tenant_id, conversation_id, **options)
        self.fate.reach("after_ticket")
        return ticket

    async def load_payload_source(self, tenant_id: str, conversation_id: str, **options: Any) -> PayloadSource:
        source = await super().load_payload_source(tenant_id, conversation_id, **options)
        self.fate.reach("after_load")
        return source

    async def begin_epoch(self, *arguments: Any, **options: Any) -> None:
        self.fate.reach("before_epoch")
        await super().begin_epoch(*arguments, **options)
        self.fate.reach("after_epoch")

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        await super().begin_call(lease, start)
        self.fate.reach("after_begin_call")

    async def end_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        await super().end_call(lease, start, end)
        self.fate.reach("after_end_call")

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        stop_wanted = await super().append_chunks(lease, chunks, lease_seconds=lease_seconds)
        self.fate.flush(chunks)
        return stop_wanted

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        self.fate.reach("before_finish")
        finished = await super().finish_turn(lease, answer)
        self.fate.reach("after_finish")
        return finished

    async def take_over_lease(self, lease: Lease, **options: Any) -> Lease:
        mine = await super().take_over_lease(lease, **options)
        self.fate.reach("after_take_over")
        return mine

    async def load_history(self, tenant_id: str, conversation_id: str, **options: Any) -> History:
        self.fate.reach("before_look")
        history = await super().load_history(tenant_id, conversation_id, **options)
        self.fate.reach("after_look")
        return history

    async def record_call(self, tenant_id: str, conversation_id: str, call: Call, **options: Any) -> bool:
        recorded = await super().record_call(tenant_id, conversation_id, call, **options)
        self.fate.reach("after_question" if call.end is None else "after_answer")
        return recorded


class CrashingReplays(PostgresReplays):
    """The replays, with a point after each write while an item runs."""

    fate: Fate

    async def claim_item(self, replay_id: str, **options: Any) -> ClaimedItem | None:
        claimed = await super().claim_item(replay_id, **options)
        if claimed is not None:
            self.fate.reach("after_claim")
        return claimed

    async def reserve_call(self, lease: ItemLease, reservation: UUID, **options: Any) -> CallPermission:
        permission = await super().reserve_call(lease, reservation, **options)
        self.fate.reach("after_reserve")
        return permission

    async def settle_call(self, lease: ItemLease, reservation: UUID, spending: CallSpending) -> None:
        await super().settle_call(lease, reservation, spending)
        self.fate.reach("after_settle")

    async def record_result(self, lease: ItemLease, result: TurnResult, blocks: Sequence[Block]) -> None:
        await super().record_result(lease, result, blocks)
        self.fate.reach("after_result")


class CrashingRenderer(JinjaRenderer):
    """The renderer, with a point after each segment."""

    fate: Fate

    async def render_segment(self, tenant_id: str, turns: Sequence[TranscriptTurn]) -> str:
        text = await super().render_segment(tenant_id, turns)
        self.fate.reach("after_rendering")
        return text


class CrashingProvider:
    """A provider, with a point before each call."""

    def __init__(self, provider: Provider, fate: Fate) -> None:
        self._provider = provider
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def open_stream(self, payload: Payload) -> "CrashingStream":
        self._fate.reach("before_call")
        return CrashingStream(self._provider.open_stream(payload), self._fate)


class CrashingStream:
    """A call, with points at its first event and after its last byte."""

    def __init__(self, stream: ProviderStream, fate: Fate) -> None:
        self._stream = stream
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def event_batches(self) -> AsyncGenerator[Sequence[ProviderEvent], None]:
        async with aclosing(self._stream.event_batches()) as batches:
            async for batch in batches:
                self._fate.reach("after_first_event")
                yield batch
        self._fate.reach("after_last_byte")
        if self._fate.crash_at == "after_last_byte_flushed":
            while len(self._fate.flushed) < len(self._stream.record.body):  # noqa: ASYNC110  reason: there is no event to wait for
                await asyncio.sleep(_LOOK_SECONDS)
            self._fate.reach("after_last_byte_flushed")


@asynccontextmanager
async def open_crashing_providers(settings: Settings, fate: Fate) -> AsyncIterator[Providers]:
    keys = {names[0]: "test" for names in KEY_VARIABLES.values()}
    async with open_providers(settings, ProviderChoice(provider=GEMINI, api_key="test"), keys) as providers:
        yield replace(providers, by_name={name: _wrap(one, fate) for name, one in providers.by_name.items()})


def _wrap(provider: Provider, fate: Fate) -> Provider:
    wrapped: Any = CrashingProvider(provider, fate)
    return wrapped  # type: ignore[no-any-return]  # reason: it is one by delegation


def crashing_compaction_job(compact: Compact, sender: JobSender) -> Job:
    """The job, with points before it and between its end and its acknowledgement."""
    job, fate = compaction_job(compact, sender), CrashingStore.fate

    async def run(payload: bytes) -> None:
        fate.reach("before_job")
        await job.run(payload)
        fate.reach("after_job")

    return replace(job, run=run)


def set_fate(order: dict[str, Any]) -> Fate:
    """Replace the real parts by the crashing ones, in this process."""
    fate = Fate(order.get("crash_at"), order.get("nth", 1), order.get("after_bytes", ""))
    CrashingStore.fate = CrashingRenderer.fate = CrashingReplays.fate = fate
    replay_wiring.PostgresReplays = CrashingReplays  # type: ignore[attr-defined]  # reason: the seam
    for module in (services, replay_wiring):
        module.PostgresStore = CrashingStore  # type: ignore[attr-defined]  # reason: the seam
    services.JinjaRenderer = CrashingRenderer  # type: ignore[attr-defined]  # reason: as above
    services.compaction_job = crashing_compaction_job  # type: ignore[attr-defined]  # reason: as above
    return fate


async def run_server(order: dict[str, Any]) -> None:
    """The whole program, until it is stopped or has to die."""
    settings = Settings(**order["settings"])
    fate = set_fate(order)
    listener = bind("127.0.0.1", 0)
    async with (
        open_crashing_providers(settings, fate) as providers,
        wiring.open_program(settings, providers=providers) as program,
    ):
        _report({"pid": os.getpid(), "url": url_of(listener)})
        await serve(program, listener)


async def run_crashing_worker(order: dict[str, Any]) -> None:
    """The same for what `strata worker` runs."""
    settings = Settings(**order["settings"])
    fate = set_fate(order)
    async with (
        open_crashing_providers(settings, fate) as providers,
        wiring.open_worker(settings, providers=providers, options=WorkerOptions(**order.get("options", {}))) as worker,
    ):
        _report({"pid": os.getpid(), "url": ""})
        await worker.run_until_signal()


def main() -> None:
    """Read orders and start servers until the input ends."""
    running: set[int] = set()
    _report({"ready": True})
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if readable:
            line = _read_line()
            if not line:
                break
            running.add(_fork(json.loads(line)))
        _bury(running)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _read_line() -> bytes:
    """Read byte by byte: what is read ahead would be hidden from `select`."""
    line = b""
    while (byte := os.read(0, 1)) not in {b"", b"\n"}:
        line += byte
    return line


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    return pid or _live(order)


def _live(order: dict[str, Any]) -> NoReturn:
    """Run a server in the fork."""
    code = 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            settings = Settings(**order["settings"])
            configure_logs(settings.log_level, settings.log_format)
            runner.run(run_crashing_worker(order) if order.get("works") else run_server(order))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _bury(running: set[int]) -> None:
    """Report the processes that have ended."""
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.discard(pid)
            _report({"pid": pid, "ended": os.waitstatus_to_exitcode(status)})


def _report(message: dict[str, Any]) -> None:
    """In one write, so that the lines of several processes do not mix."""
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
