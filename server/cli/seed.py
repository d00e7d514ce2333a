"""`strata seed`: fill a database with generated conversations.

A plan says what happens in each conversation. A sample of them is taken through the whole program, with emulators as
providers; the others are copies of the sample.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from time import perf_counter
from typing import Final

import click
from rich.progress import Progress, TaskID

from server.app.settings import Settings
from server.app.wiring import Program
from server.archive.seed_plan import Happening, SeedConversation, SeedExchange, SeedPlan, plan_seed
from server.cli.emulated import open_emulated_program
from server.cli.run import begin_quietly, run
from server.cli.tenants import find_or_create_tenant
from server.cli.terminal import open_bar
from server.conversation.block import Blob, Block, ImageBlock, TextBlock, ToolResultBlock
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import TenantNotEmpty
from server.conversation.event import TurnEnded
from server.conversation.turn import TurnKind
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall, Turn
from server.emulator.script import Script
from server.emulator.state import EmulatorState, build_state
from server.postgres.archive.seeder import Copies, count_tenant_conversations, load_originals, renew_statistics
from server.postgres.engine import Database
from server.turns.request import TurnRequest

_BATCH_TURNS: Final = 2_000
_MAX_TURNS: Final = 100_000_000
_CANCEL_WAIT_SECONDS: Final = 30.0
_EVENTS_BEFORE_CANCEL: Final = 3
_FAULTS: Final = {
    Happening.RETRIED: Fault(kind=FaultKind.RATE_LIMITED, retry_after_seconds=0.01),
    Happening.REFUSED: Fault(kind=FaultKind.REFUSAL),
    Happening.LENGTH: Fault(kind=FaultKind.MAX_TOKENS, after_chunks=6),
    Happening.CUT: Fault(kind=FaultKind.CUT, after_chunks=6),
    Happening.OVERLOADED: Fault(kind=FaultKind.OVERLOADED_MID_STREAM, after_chunks=4),
    Happening.UNAUTHENTICATED: Fault(kind=FaultKind.BAD_AUTH),
    Happening.EMPTY: Fault(kind=FaultKind.EMPTY_STOP),
    Happening.CANCELLED: Fault(kind=FaultKind.SILENCE, after_chunks=8),
}


@click.command()
@click.option(
    "--turns",
    "turn_count",
    type=click.IntRange(1, _MAX_TURNS),
    default=10_000,
    show_default=True,
    help="Minimum number of turns.",
)
@click.option("--seed", "seed_", type=int, default=1, show_default=True, help="The same seed gives the same data.")
@click.option("--tenant", default="seed", show_default=True, help="Owner of the conversations; created if necessary.")
@click.option("--days", type=click.IntRange(1, 3650), default=180, show_default=True, help="Number of days to fill.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="Day after the last day, in UTC.  [today]")
@click.option("--force", is_flag=True, help="Add to a tenant that already has conversations.")
def seed(turn_count: int, seed_: int, tenant: str, days: int, until: datetime | None, *, force: bool) -> None:
    """Fill the database with generated conversations, to try Strata with a large amount of data.

    Up to 240 distinct conversations are taken with emulators through the same program that serves: with tools, images,
    errors, cancelled turns and compactions, on several models. The others are copies of these with their own ids and
    times. Every request can therefore be rebuilt byte for byte, but texts, tokens and costs repeat.
    """
    end = (until or datetime.now(UTC)).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
    started = perf_counter()
    # Warnings are not logged: the plan contains failing calls.
    settings = begin_quietly("error")
    created = run(_seed(settings, tenant, turn_count, seed=seed_, days=days, until=end, force=force))
    seconds = perf_counter() - started
    click.echo(
        f"Created {created:,} turns for tenant {tenant} in {seconds:.1f} s ({created / seconds:,.0f} per second)."
    )


async def _seed(
    settings: Settings, tenant: str, turn_count: int, *, seed: int, days: int, until: datetime, force: bool
) -> int:
    """Return the number of turns that were created."""
    async with _open_stage(settings) as stage:
        database = stage.program.database
        tenant_id = (await find_or_create_tenant(stage.program.key_ring, tenant)).id
        existing = await count_tenant_conversations(database, tenant_id)
        if existing and not force:
            raise TenantNotEmpty(f"The tenant {tenant} already has {existing} conversations.")
        # Another tenant, or another run for the same tenant, gets other ids.
        random = Random(f"{seed}:{tenant}:{existing}")  # noqa: S311  reason: the data must be predictable
        with open_bar() as progress:
            task = progress.add_task("taking turns", total=turn_count)
            conversation_ids = await _take_sample(
                stage,
                tenant_id,
                plan_seed(random, turn_count),
                max_turns=turn_count,
                on_turns=lambda count: progress.advance(task, count),
            )
            originals = await load_originals(database, conversation_ids)
            sample_turns = sum(original.turn_count for original in originals)
            progress.update(task, description="copying")
            copies = Copies(originals, random, until=until, days=days)
            await _copy(database, copies, turn_count - sample_turns, progress, task)
        await renew_statistics(database)
    return sample_turns + copies.turn_count


async def _copy(database: Database, copies: Copies, wanted: int, progress: Progress, task: TaskID) -> None:
    written = 0
    while copies.turn_count < wanted:
        while copies.turn_count < min(wanted, written + _BATCH_TURNS):
            copies.add()
        await copies.write(database)
        progress.advance(task, copies.turn_count - written)
        written = copies.turn_count


class _QueuedScript(Script):
    """A script whose next turns are set before each exchange."""

    def __init__(self) -> None:
        super().__init__(())
        self.turns: deque[Turn] = deque()

    def take(self, request_number: int, prompt: str, *, after_tools: bool) -> Turn | None:  # noqa: ARG002  reason: the signature of `Script`
        return self.turns.popleft() if self.turns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The program with emulated providers, and the control of what these answer."""

    program: Program
    scripts: Sequence[_QueuedScript]
    states: Sequence[EmulatorState]

    def prepare(self, turns: Sequence[Turn], fault: Fault | None) -> None:
        """Set the next answers and the next fault of both emulators: the assistant decides which one is called."""
        for script in self.scripts:
            script.turns.clear()
            script.turns.extend(turns)
        for state in self.states:
            state.faults.clear()
            if fault is not None:
                state.faults.arm(fault)


@asynccontextmanager
async def _open_stage(settings: Settings) -> AsyncIterator[_Stage]:
    """Open the program on the database of the settings, without background work."""
    scripts = (_QueuedScript(), _QueuedScript())
    gemini, anthropic = (build_state(script=script) for script in scripts)
    own_settings = settings.model_copy(
        update={
            "worker_inside": False,
            "turn_attempts": 2,
            # The caches of an emulator end with it.
            "cache_storage_usd_per_hour": 0.0,
        }
    )
    async with open_emulated_program(own_settings, gemini=gemini, anthropic=anthropic) as program:
        yield _Stage(program=program, scripts=scripts, states=(gemini, anthropic))


async def _take_sample(
    stage: _Stage, tenant_id: str, plan: SeedPlan, *, max_turns: int, on_turns: Callable[[int], None]
) -> list[str]:
    """Take the conversations of a plan until there are `max_turns` turns. Returns their ids."""
    store = stage.program.store
    assistants = [await store.create_assistant(tenant_id, definition) for definition in plan.assistants]
    conversation_ids: list[str] = []
    turn_count = 0
    for planned in plan.sample:
        if turn_count >= max_turns:
            break
        conversation = await store.create_conversation(
            tenant_id,
            ConversationDraft(
                assistant_id=assistants[planned.assistant].id, identifier=planned.identifier, source="seed"
            ),
        )
        taken = await _take_conversation(stage, tenant_id, conversation.id, planned)
        turn_count += taken
        on_turns(taken)
        conversation_ids.append(conversation.id)
    return conversation_ids


async def _take_conversation(stage: _Stage, tenant_id: str, conversation_id: str, planned: SeedConversation) -> int:
    """Return the number of turns of the conversation."""
    turn_count = 0
    for exchange in planned.exchanges:
        ended = await _take_exchange(stage, tenant_id, conversation_id, exchange, planned.language)
        turn_count = ended.turn.seq
        if exchange.compacts:
            stage.prepare((Reply(text="What was said before, in short."),), None)
            await stage.program.compactor.compact(tenant_id, conversation_id, force=True)
    return turn_count


async def _take_exchange(
    stage: _Stage, tenant_id: str, conversation_id: str, exchange: SeedExchange, language: str | None
) -> TurnEnded:
    answer = Reply(thinking=exchange.thinking, text=exchange.reply)
    calls = tuple(ToolCall(name=name, arguments={"query": exchange.task[:40]}) for name in exchange.tool_names)
    replies = (Reply(thinking=exchange.thinking, tool_calls=calls), answer) if calls else (answer,)
    stage.prepare(replies, _FAULTS.get(exchange.happening))
    service = stage.program.turn_service
    handle = await service.take_turn(tenant_id, _build_task(conversation_id, exchange, language))
    if exchange.happening is Happening.CANCELLED:
        reader = handle.read()
        event_count = 0
        while event_count < _EVENTS_BEFORE_CANCEL and (events := await reader.next(_CANCEL_WAIT_SECONDS)):
            event_count += len(events)
        reader.close()
        await service.cancel_turn(tenant_id, conversation_id)
    ended = await handle.wait()
    while ended.conversation.pending_calls:
        ids = tuple(call.id for call in ended.conversation.pending_calls)
        ended = await (await service.take_turn(tenant_id, _build_results(conversation_id, ids, exchange))).wait()
    return ended


def _build_task(conversation_id: str, exchange: SeedExchange, language: str | None) -> TurnRequest:
    blocks: tuple[Block, ...] = (TextBlock(text=exchange.task),)
    blobs: tuple[Blob, ...] = ()
    if exchange.picture is not None:
        digest = hashlib.sha256(exchange.picture)
        blobs = (Blob(sha256=digest.digest(), media_type="image/png", data=exchange.picture),)
        size = len(exchange.picture)
        blocks += (ImageBlock(media_type="image/png", sha256=digest.hexdigest(), size_bytes=size),)
    return TurnRequest(
        conversation_id=conversation_id,
        kind=TurnKind.USER_TASK,
        blocks=blocks,
        blobs=blobs,
        body_hash=hashlib.sha256(exchange.task.encode()).digest(),
        language=language,
        abandons_calls=True,
    )


def _build_results(conversation_id: str, call_ids: tuple[str, ...], exchange: SeedExchange) -> TurnRequest:
    return TurnRequest(
        conversation_id=conversation_id,
        kind=TurnKind.TOOL_RESPONSE,
        blocks=tuple(
            ToolResultBlock(tool_call_id=call_id, output={"found": exchange.reply[:80]}) for call_id in call_ids
        ),
        answers=call_ids,
        body_hash=hashlib.sha256(repr(call_ids).encode()).digest(),
    )
