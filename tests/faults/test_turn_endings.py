"""A turn ends in spite of any failure at its end: a lost connection, a hanging library, an answer that cannot be
stored.

The store, the providers and the folds are wrapped at their ports to inject each fault at a known moment.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import asyncpg
import pytest
from asyncpg import exceptions as pg

from server.app.providers import FOLDS
from server.app.settings import Settings
from server.conversation.api_key import Tenant
from server.conversation.call import Call, CallStart, Chunk
from server.conversation.conversation import ConversationState, Lease
from server.conversation.errors import (
    AnswerUnreadable,
    AnswerUnstorable,
    ConversationBusy,
    DatabaseUnavailable,
    Internal,
    TurnInterrupted,
    TurnStalled,
)
from server.conversation.event import ProviderEvent
from server.conversation.payload import Payload
from server.conversation.store import ConversationChange, Finished, NewAnswer
from server.conversation.turn import ModelResponseTurn, TurnState
from server.emulator.reply import FaultKind
from server.inspection.call_explanation import OutcomeKind, explain_outcome
from server.payload.preparation import PayloadPreparation
from server.postgres.engine import Database
from server.postgres.notifications import PostgresNotifications
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from server.providers.provider import Fold, Provider, ProviderAnswer, ProviderStream
from server.telemetry.metrics import Metrics
from server.telemetry.spans import open_tracing
from server.telemetry.turns import TurnTelemetry
from server.turns import checkpointer as turn_keeper
from server.turns.recovery import TurnRecovery
from server.turns.request import TurnRequest
from server.turns.running import RunningTurns
from server.turns.service import TurnService
from server.turns.stored import OpenFold
from server.turns.tools import TurnLimits, TurnTools
from tests.support.builders import accept, definition, user_input
from tests.support.conversation_driver import text_reply, tool_reply, until_asked
from tests.support.emulators import BOTH, MODELS, EmulatedProviders
from tests.support.turn_service_driver import (
    WEATHER,
    calls_of,
    open_conversation,
    read_all,
    say,
    text_of,
    tool_results,
    user_task,
)
from tests.support.verifying import verify

LONG = 3600.0
QUICK = TurnLimits(lease_seconds=LONG, flush_seconds=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHarness:
    """The turn service of one process, on a store and providers of the test."""

    service: TurnService
    store: PostgresStore
    database: Database
    tools: TurnTools
    running_turns: RunningTurns
    metrics: Metrics
    tenant_id: str


class OpenHarness:
    """Opens harnesses on the database of the test."""

    def __init__(self, database: Database, tenant: Tenant, settings: Settings, emulated: EmulatedProviders) -> None:
        self._database = database
        self._tenant = tenant
        self._settings = settings
        self._emulated = emulated

    @asynccontextmanager
    async def __call__(
        self,
        *,
        store: type[PostgresStore] = PostgresStore,
        limits: TurnLimits = QUICK,
        wrap: Callable[[Provider], Any] = lambda provider: provider,
        folds: Mapping[str, OpenFold] = FOLDS,
    ) -> AsyncIterator[TurnHarness]:
        renderer = JinjaRenderer(load_templates(None), RenderLimits())
        tracing = open_tracing(None, None, "test", "1")
        metrics = Metrics(version="1")
        running_turns = RunningTurns()
        async with (
            self._emulated.open(self._settings) as providers,
            PostgresNotifications(self._database.options) as notifications,
        ):
            opened = store(self._database)
            by_name = {name: wrap(provider) for name, provider in providers.by_name.items()}
            tools = TurnTools(
                owner="test",
                store=opened,
                preparation=PayloadPreparation(opened, renderer, by_name),
                notifications=notifications,
                observer=TurnTelemetry(metrics, tracing),
                folds=folds,
                limits=limits,
            )
            try:
                yield TurnHarness(
                    service=TurnService(tools, running_turns),
                    store=opened,
                    database=self._database,
                    tools=tools,
                    running_turns=running_turns,
                    metrics=metrics,
                    tenant_id=self._tenant.id,
                )
            finally:
                await running_turns.drain(0.1)
        await renderer.close()
        tracing.shutdown()


@pytest.fixture
def open_harness(
    database: Database, tenant: Tenant, server_settings: Settings, emulated: EmulatedProviders
) -> OpenHarness:
    return OpenHarness(database, tenant, server_settings, emulated)


async def _end_all_leases(harness: TurnHarness) -> None:
    """Expire all leases."""
    async with harness.database.connection() as connection:
        await connection.execute(
            "UPDATE conversations SET lease_expires_at = now() - interval '1 second' WHERE lease_token IS NOT NULL"
        )


async def _find_answer(harness: TurnHarness, conversation_id: str, seq: int = 2) -> ModelResponseTurn:
    turn = await harness.store.load_turn(harness.tenant_id, conversation_id, seq)
    assert isinstance(turn, ModelResponseTurn)
    return turn


async def _goes_on(harness: TurnHarness, conversation_id: str) -> None:
    ended = await say(harness.service, harness.tenant_id, user_task(conversation_id, "And then?"))
    assert (ended.turn.seq, ended.turn.state) == (4, TurnState.COMPLETE)


class WritingStore(PostgresStore):
    """Is always in the middle of a statement when the turn ends."""

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        stop_wanted = await super().append_chunks(lease, chunks, lease_seconds=lease_seconds)
        async with self._database.connection() as connection:
            await connection.execute("SELECT pg_sleep(60)")
        return stop_wanted


class TestALostConnection:
    async def test_a_failing_release_does_not_replace_a_cancellation(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release = asyncpg.Pool.release

        async def fail(pool: Any, *arguments: Any, **options: Any) -> None:
            await release(pool, *arguments, **options)
            raise pg.InternalClientError("unexpected")

        entered = asyncio.Event()

        async def work() -> None:
            async with database.connection() as connection:
                entered.set()
                await connection.execute("SELECT pg_sleep(60)")

        async with database.connection():
            pass
        monkeypatch.setattr(asyncpg.Pool, "release", fail)
        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        async with database.connection() as connection:
            assert await connection.fetchval("SELECT 1") == 1

    async def test_while_a_turn_ends_does_not_keep_it_running(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release = asyncpg.Pool.release

        async def fail(pool: Any, *arguments: Any, **options: Any) -> None:
            task = asyncio.current_task()
            await release(pool, *arguments, **options)
            if task is not None and task.get_name() == "turn keeper" and task.cancelling():
                raise pg.InternalClientError("unexpected")

        monkeypatch.setattr(asyncpg.Pool, "release", fail)
        emulated["gemini"].queue_replies(text_reply("Once upon a time."))
        async with open_harness(store=WritingStore, wrap=Slow) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, "gemini")
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert ended.turn.state is TurnState.COMPLETE
            assert (
                await harness.store.load_conversation(harness.tenant_id, conversation.id)
            ).state is ConversationState.IDLE

    async def test_a_checkpoint_that_swallows_its_cancellation_is_abandoned(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(turn_keeper, "_STOP_SECONDS", 0.05)
        let_go = asyncio.Event()

        class DeafStore(PostgresStore):
            async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
                while not let_go.is_set():
                    with suppress(asyncio.CancelledError):
                        await let_go.wait()
                return await super().append_chunks(lease, chunks, lease_seconds=lease_seconds)

        emulated["gemini"].queue_replies(text_reply("Once upon a time."))
        async with open_harness(store=DeafStore, wrap=Slow) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, "gemini")
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert text_of(ended) == "Once upon a time."
            let_go.set()


class Slow:
    """A provider whose streams pause after their last byte, so that a checkpoint is running."""

    def __init__(self, provider: Provider, seconds: float = 0.2) -> None:
        self._provider = provider
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def open_stream(self, payload: Payload) -> "SlowStream":
        return SlowStream(self._provider.open_stream(payload), self._wait)

    async def _wait(self) -> None:
        await asyncio.sleep(self._seconds)


class SlowStream:
    def __init__(self, stream: ProviderStream, wait: Callable[[], Any]) -> None:
        self._stream = stream
        self._wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def event_batches(self) -> AsyncGenerator[Sequence[ProviderEvent], None]:
        async with aclosing(self._stream.event_batches()) as batches:
            async for batch in batches:
                yield batch
        await self._wait()


class Hanging(Slow):
    """A provider whose streams never return after their last byte."""

    async def _wait(self) -> None:
        await asyncio.Event().wait()


class TestATurnWithoutProgress:
    limits = replace(QUICK, ending_seconds=0.2)

    async def test_is_ended_by_the_server_with_what_had_arrived(
        self, open_harness: OpenHarness, emulated: EmulatedProviders
    ) -> None:
        emulated["gemini"].queue_replies(text_reply("Once upon a time."))
        async with open_harness(wrap=Hanging, limits=self.limits) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, "gemini")
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert (ended.turn.state, text_of(ended)) == (TurnState.COMPLETE, "Once upon a time.")
            assert b"strata_turns_stalled_total 1.0" in harness.metrics.render()

    async def test_that_cannot_be_cancelled_is_abandoned_and_recovered(
        self, open_harness: OpenHarness, emulated: EmulatedProviders
    ) -> None:
        let_go = asyncio.Event()

        class Deaf(Slow):
            async def _wait(self) -> None:
                while not let_go.is_set():
                    with suppress(asyncio.CancelledError):
                        await let_go.wait()

        emulated["gemini"].queue_replies(text_reply("Once upon a time."))
        async with open_harness(wrap=Deaf, limits=replace(self.limits, lease_seconds=1)) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, "gemini")
            handle = await harness.service.take_turn(harness.tenant_id, user_task(conversation.id))
            with pytest.raises(TurnStalled):
                await handle.wait()
            # Nothing renews the lease any more.
            while not await TurnRecovery(harness.tools).recover(conversation.id):  # noqa: ASYNC110  reason: nothing tells
                await asyncio.sleep(0.05)
            turn = await _find_answer(harness, conversation.id)
            assert turn.state in {TurnState.COMPLETE, TurnState.INTERRUPTED}
            let_go.set()

    async def test_whose_answer_cannot_be_written_wakes_its_listeners(
        self, open_harness: OpenHarness, emulated: EmulatedProviders
    ) -> None:
        class Stuck(PostgresStore):
            async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
                if lease.owner == "test" and not recovering.is_set():
                    await asyncio.Event().wait()
                return await super().finish_turn(lease, answer)

        recovering = asyncio.Event()
        emulated["gemini"].queue_replies(text_reply("Once upon a time."))
        async with open_harness(store=Stuck, limits=self.limits) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, "gemini")
            handle = await harness.service.take_turn(harness.tenant_id, user_task(conversation.id))
            with pytest.raises(TurnStalled):
                await read_all(handle)
            recovering.set()
            await _end_all_leases(harness)
            await _goes_on(harness, conversation.id)


class Choosy(PostgresStore):
    """Refuses every answer with content, like a database whose columns cannot store it."""

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        if text_in(answer):
            raise pg.DataError("value out of int32 range")
        return await super().finish_turn(lease, answer)


def text_in(answer: NewAnswer) -> bool:
    return any("poison" in getattr(block, "text", "") for block in answer.blocks)


@pytest.mark.parametrize("provider", BOTH)
class TestAnAnswerThatCannotBeStored:
    async def test_ends_the_turn_and_keeps_every_byte(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        emulated[provider].queue_replies(text_reply("A poisoned apple."), text_reply("Better."))
        async with open_harness(store=Choosy) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, AnswerUnstorable.code)
            assert (ended.turn.blocks, ended.turn.cost_usd) == ((), None)
            call = await _only_call(harness, conversation.id)
            assert call.end is not None
            assert b"apple" in (call.end.raw_response or b"")
            assert call.end.error_code == AnswerUnstorable.code
            assert {"kind": AnswerUnstorable.code} in call.start.warnings
            await _goes_on(harness, conversation.id)
            assert (await verify(harness.database, [conversation.id])).mismatches == ()
            assert (await harness.store.erase_conversation(harness.tenant_id, conversation.id)).rows

    async def test_not_even_its_bytes_still_ends_the_turn(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Choosier(PostgresStore):
            async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
                if answer.end is not None and b"apple" in (answer.end.raw_response or b""):
                    raise pg.DataError("no")
                return await super().finish_turn(lease, answer)

        emulated[provider].queue_replies(text_reply("A poisoned apple."), text_reply("Better."))
        async with open_harness(store=Choosier) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, AnswerUnstorable.code)
            await _goes_on(harness, conversation.id)

    async def test_an_attempt_that_cannot_be_stored_does_not_prevent_the_turn_from_ending(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Choosy(PostgresStore):
            async def end_call(self, lease: Lease, start: Any, end: Any) -> None:
                if end.headers:
                    raise pg.DataError("no")
                await super().end_call(lease, start, end)

        emulated[provider].inject_fault(FaultKind.OVERLOADED)
        emulated[provider].queue_replies(text_reply("Better."))
        async with open_harness(store=Choosy) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert text_of(ended) == "Better."
            failed, _ = await harness.store.list_calls(harness.tenant_id, conversation.id, 2)
            assert failed.end is not None
            assert failed.end.raw_response

    async def test_a_fold_with_a_bug_ends_the_turn_as_internal(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Buggy(Slow):
            def open_stream(self, payload: Payload) -> "SlowStream":
                return BuggyStream(self._provider.open_stream(payload), self._wait)

        emulated[provider].queue_replies(text_reply("A poisoned apple."), text_reply("Better."))
        async with open_harness(wrap=Buggy) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            assert ended.turn.state is TurnState.FAILED
            assert ended.turn.error_code in {Internal.code, AnswerUnstorable.code}
            call = await _only_call(harness, conversation.id)
            assert call.end is not None
            assert call.end.raw_response

    async def test_a_turn_whose_counts_exceed_32_bits_is_stored_and_reported(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Generous(PostgresStore):
            async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
                assert answer.end is not None
                usage = replace(answer.usage, fresh_input_tokens=2**31, output_tokens=2**40)
                return await super().finish_turn(
                    lease, replace(answer, usage=usage, end=replace(answer.end, usage=usage))
                )

        emulated[provider].queue_replies(text_reply("Expensive."))
        async with open_harness(store=Generous) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            await say(harness.service, harness.tenant_id, user_task(conversation.id))
            turn = await _find_answer(harness, conversation.id)
            assert (turn.usage.fresh_input_tokens, turn.usage.output_tokens) == (2**31, 2**40)
            fork = await harness.store.fork_conversation(harness.tenant_id, conversation.id, 2)
            assert (await _find_answer(harness, fork.id)).usage == turn.usage


class BuggyStream(SlowStream):
    """A stream whose fold raises when its answer is read."""

    @property
    def answer(self) -> ProviderAnswer:
        raise RecursionError

    async def event_batches(self) -> AsyncGenerator[Sequence[ProviderEvent], None]:
        async with aclosing(self._stream.event_batches()) as batches:
            async for batch in batches:
                yield batch
        raise RecursionError


async def _only_call(harness: TurnHarness, conversation_id: str) -> Call:
    (call,) = await harness.store.list_calls(harness.tenant_id, conversation_id, 2)
    return call


class BuggyFold:
    """A fold that raises an unexpected error."""

    @property
    def answer(self) -> ProviderAnswer:
        raise RecursionError

    def feed(self, piece: bytes) -> Iterable[ProviderEvent]:
        raise RecursionError

    def finish(self) -> None:
        raise RecursionError

    def continue_answer(self) -> None:
        raise RecursionError


def _open_buggy() -> Fold:
    return BuggyFold()


class MortalStore(PostgresStore):
    """The store of a server that can be killed: after that, nothing is written for its turns."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._checkpoint = asyncio.Lock()
        self._dead = False

    async def die(self) -> None:
        """Return when no checkpoint is running."""
        async with self._checkpoint:
            self._dead = True

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        async with self._checkpoint:
            if self._dead:
                raise DatabaseUnavailable
            return await super().append_chunks(lease, chunks, lease_seconds=lease_seconds)


class ForgetfulStore(MortalStore):
    """The store of a server that dies before it has recorded a call."""

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        raise DatabaseUnavailable


async def _kill(harness: TurnHarness) -> None:
    """Stop the heartbeat of the server and expire its leases."""
    assert isinstance(harness.store, MortalStore)
    await harness.store.die()
    await _end_all_leases(harness)


@pytest.mark.parametrize("provider", BOTH)
class TestRecovery:
    async def _orphan(self, harness: TurnHarness, emulated: EmulatedProviders, provider: str) -> str:
        """A conversation whose process died in the middle of an answer that was partly checkpointed."""
        conversation = await open_conversation(harness.store, harness.tenant_id, provider)
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=3)
        emulated[provider].queue_replies(text_reply("A poisoned apple, and a long story about it that never ends."))
        handle = await harness.service.take_turn(harness.tenant_id, user_task(conversation.id))
        while not await harness.store.list_chunks(harness.tenant_id, conversation.id, 2, attempt=1):  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.01)
        assert handle.seq == 2
        return conversation.id

    async def test_of_an_answer_that_cannot_be_read_keeps_its_bytes(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        folds = {**FOLDS, provider: _open_buggy}
        async with open_harness(store=MortalStore) as dying, open_harness(folds=folds) as harness:
            poisoned = await self._orphan(dying, emulated, provider)
            healthy = await self._orphan(dying, emulated, other)
            await _kill(dying)
            assert await TurnRecovery(harness.tools).recover() == 2
            turn = await _find_answer(harness, poisoned)
            assert (turn.state, turn.error_code) == (TurnState.INTERRUPTED, AnswerUnreadable.code)
            call = await _only_call(harness, poisoned)
            assert call.end is not None
            assert call.end.raw_response
            assert (await _find_answer(harness, healthy)).error_code == TurnInterrupted.code
            assert (await harness.store.erase_conversation(harness.tenant_id, poisoned)).rows

    async def test_of_a_turn_without_a_recorded_call_records_one_with_an_unknown_outcome(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        async with open_harness() as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            emulated[provider].queue_replies(text_reply("Hi."), text_reply("Better."))
            await say(harness.service, harness.tenant_id, user_task(conversation.id))
            # A process accepts the next turn, and dies.
            await accept(harness.store, harness.tenant_id, user_input(conversation.id))
            await _end_all_leases(harness)
            assert await TurnRecovery(harness.tools).recover() == 1
            (call,) = await harness.store.list_calls(harness.tenant_id, conversation.id, 4)
            assert call.end is not None
            assert (call.start.request_hash, call.end.cost_usd) == (b"", None)
            outcome = explain_outcome(call, await _find_answer(harness, conversation.id, 4), None)
            assert outcome.kind is OutcomeKind.UNKNOWN
            (note,) = call.start.warnings
            assert str(note["estimated_cost_usd"]) in outcome.explanation
            ended = await say(harness.service, harness.tenant_id, user_task(conversation.id, "And then?"))
            assert ended.turn.state is TurnState.COMPLETE
            assert (await verify(harness.database, [conversation.id])).mismatches == ()

    async def test_is_not_needed_to_erase_the_conversation(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        async with open_harness(store=MortalStore) as harness:
            orphan = await self._orphan(harness, emulated, provider)
            with pytest.raises(ConversationBusy):
                await harness.store.erase_conversation(harness.tenant_id, orphan)
            await _kill(harness)
            assert (await harness.store.erase_conversation(harness.tenant_id, orphan)).rows
            async with harness.database.connection() as connection:
                assert not await connection.fetch("SELECT FROM call_chunks")

    async def test_of_a_turn_that_cannot_be_ended_does_not_block_the_others(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Broken(PostgresStore):
            async def take_over_lease(self, lease: Lease, **options: Any) -> Lease:
                if lease.conversation_id == poisoned:
                    raise pg.DataError("no")
                return await super().take_over_lease(lease, **options)

        async with open_harness(store=MortalStore) as dying, open_harness(store=Broken) as harness:
            orphans = sorted([await self._orphan(dying, emulated, provider) for _ in range(3)])
            poisoned = orphans[0]
            await _kill(dying)
            assert await TurnRecovery(harness.tools).recover() == 2
            for conversation_id in orphans[1:]:
                assert (await _find_answer(harness, conversation_id)).state is TurnState.INTERRUPTED


async def _move(harness: TurnHarness, conversation_id: str, provider: str) -> None:
    """The conversation continues with a new version of its assistant, of another provider."""
    assistant_id = (await harness.store.load_conversation(harness.tenant_id, conversation_id)).assistant_id
    changed = definition(provider=provider, model=MODELS[provider], tools=(WEATHER,), settings={})
    version = (await harness.store.revise_assistant(harness.tenant_id, assistant_id, changed)).version
    await harness.store.change_conversation(
        harness.tenant_id, conversation_id, ConversationChange(assistant_version=version)
    )


@pytest.mark.parametrize("provider", BOTH)
class TestATurnThatDiedBeforeItsCallWasRecorded:
    async def _die_asking(self, harness: TurnHarness, emulated: EmulatedProviders, request: TurnRequest) -> int:
        for name in BOTH:
            emulated[name].inject_fault(FaultKind.SILENCE)
        handle = await harness.service.take_turn(harness.tenant_id, request)
        await until_asked(emulated)
        return handle.seq

    async def _recover(
        self, harness: TurnHarness, conversation_id: str, seq: int
    ) -> tuple[ModelResponseTurn, Sequence[Call]]:
        await _kill(harness)
        assert await TurnRecovery(harness.tools).recover(conversation_id) == 1
        calls = await harness.store.list_calls(harness.tenant_id, conversation_id, seq)
        return await _find_answer(harness, conversation_id, seq), calls

    async def test_in_a_tool_loop_was_sent_to_the_provider_of_the_loop(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        emulated[provider].queue_replies(tool_reply("Oslo"))
        async with open_harness(store=ForgetfulStore) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            asked = await say(harness.service, harness.tenant_id, user_task(conversation.id))
            await _move(harness, conversation.id, other)
            seq = await self._die_asking(harness, emulated, tool_results(conversation.id, calls_of(asked)))
            turn, (call,) = await self._recover(harness, conversation.id, seq)
            assert (turn.provider, turn.model) == (provider, MODELS[provider])
            assert (call.start.provider, call.start.model) == (provider, MODELS[provider])

    async def test_was_sent_to_the_provider_that_the_conversation_had_then(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        async with open_harness(store=ForgetfulStore) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            seq = await self._die_asking(harness, emulated, user_task(conversation.id))
            await _move(harness, conversation.id, other)
            turn, (call,) = await self._recover(harness, conversation.id, seq)
            assert (turn.provider, call.start.provider) == (provider, provider)

    async def test_before_its_epoch_began_was_sent_to_no_provider(
        self, open_harness: OpenHarness, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        stuck = asyncio.Event()

        class Stuck(MortalStore):
            async def begin_epoch(self, *arguments: Any, **options: Any) -> None:
                if stuck.is_set():
                    await asyncio.Event().wait()
                await super().begin_epoch(*arguments, **options)

        emulated[provider].queue_replies(text_reply("Once upon a time."))
        async with open_harness(store=Stuck) as harness:
            conversation = await open_conversation(harness.store, harness.tenant_id, provider)
            await say(harness.service, harness.tenant_id, user_task(conversation.id))
            await _move(harness, conversation.id, other)
            stuck.set()
            handle = await harness.service.take_turn(harness.tenant_id, user_task(conversation.id, "And then?"))
            turn, calls = await self._recover(harness, conversation.id, handle.seq)
            assert (turn.provider, turn.cost_usd, len(calls)) == (other, Decimal(0), 0)
