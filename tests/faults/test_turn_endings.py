"""A turn ends whatever goes wrong while it ends: a lost connection, a hanging library, an answer that cannot be stored.

The store, the providers and the folds are wrapped at their ports to bring each fault about at a known moment.
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
from tests.support.conversation_driver import asks, tells, until_asked
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
class Rig:
    """One process' turn service, on a store and providers of the test's making."""

    service: TurnService
    store: PostgresStore
    database: Database
    tools: TurnTools
    running_turns: RunningTurns
    metrics: Metrics
    tenant_id: str


class OpenRig:
    """Makes rigs on the test's database."""

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
    ) -> AsyncIterator[Rig]:
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
                yield Rig(
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
def open_rig(database: Database, tenant: Tenant, server_settings: Settings, emulated: EmulatedProviders) -> OpenRig:
    return OpenRig(database, tenant, server_settings, emulated)


async def _end_all_leases(rig: Rig) -> None:
    """As if their time had run out."""
    async with rig.database.connection() as connection:
        await connection.execute(
            "UPDATE conversations SET lease_expires_at = now() - interval '1 second' WHERE lease_token IS NOT NULL"
        )


async def _find_answer(rig: Rig, conversation_id: str, seq: int = 2) -> ModelResponseTurn:
    turn = await rig.store.load_turn(rig.tenant_id, conversation_id, seq)
    assert isinstance(turn, ModelResponseTurn)
    return turn


async def _goes_on(rig: Rig, conversation_id: str) -> None:
    ended = await say(rig.service, rig.tenant_id, user_task(conversation_id, "And then?"))
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

    async def test_while_a_turn_ends_does_not_make_it_immortal(
        self, open_rig: OpenRig, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release = asyncpg.Pool.release

        async def fail(pool: Any, *arguments: Any, **options: Any) -> None:
            task = asyncio.current_task()
            await release(pool, *arguments, **options)
            if task is not None and task.get_name() == "turn keeper" and task.cancelling():
                raise pg.InternalClientError("unexpected")

        monkeypatch.setattr(asyncpg.Pool, "release", fail)
        emulated["gemini"].says(tells("Once upon a time."))
        async with open_rig(store=WritingStore, wrap=Slow) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, "gemini")
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert ended.turn.state is TurnState.COMPLETE
            assert (await rig.store.load_conversation(rig.tenant_id, conversation.id)).state is ConversationState.IDLE

    async def test_a_checkpoint_that_swallows_its_cancellation_is_left_behind(
        self, open_rig: OpenRig, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(turn_keeper, "_STOP_SECONDS", 0.05)
        let_go = asyncio.Event()

        class DeafStore(PostgresStore):
            async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
                while not let_go.is_set():
                    with suppress(asyncio.CancelledError):
                        await let_go.wait()
                return await super().append_chunks(lease, chunks, lease_seconds=lease_seconds)

        emulated["gemini"].says(tells("Once upon a time."))
        async with open_rig(store=DeafStore, wrap=Slow) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, "gemini")
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert text_of(ended) == "Once upon a time."
            let_go.set()


class Slow:
    """A provider whose streams wait a little behind their last byte, so that a checkpoint is under way."""

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

    async def events(self) -> AsyncGenerator[ProviderEvent, None]:
        async with aclosing(self._stream.events()) as events:
            async for event in events:
                yield event
        await self._wait()


class Hanging(Slow):
    """A provider whose streams never return after their last byte."""

    async def _wait(self) -> None:
        await asyncio.Event().wait()


class TestATurnWithoutProgress:
    limits = replace(QUICK, ending_seconds=0.2)

    async def test_is_ended_by_the_server_with_what_the_provider_said(
        self, open_rig: OpenRig, emulated: EmulatedProviders
    ) -> None:
        emulated["gemini"].says(tells("Once upon a time."))
        async with open_rig(wrap=Hanging, limits=self.limits) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, "gemini")
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert (ended.turn.state, text_of(ended)) == (TurnState.COMPLETE, "Once upon a time.")
            assert b"strata_turns_stalled_total 1.0" in rig.metrics.render()

    async def test_that_cannot_be_cancelled_is_given_up_and_recovered(
        self, open_rig: OpenRig, emulated: EmulatedProviders
    ) -> None:
        let_go = asyncio.Event()

        class Deaf(Slow):
            async def _wait(self) -> None:
                while not let_go.is_set():
                    with suppress(asyncio.CancelledError):
                        await let_go.wait()

        emulated["gemini"].says(tells("Once upon a time."))
        async with open_rig(wrap=Deaf, limits=replace(self.limits, lease_seconds=1)) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, "gemini")
            handle = await rig.service.take_turn(rig.tenant_id, user_task(conversation.id))
            with pytest.raises(TurnStalled):
                await handle.wait()
            # Nothing renews the lease any more.
            while not await TurnRecovery(rig.tools).recover(conversation.id):  # noqa: ASYNC110  reason: nothing tells
                await asyncio.sleep(0.05)
            turn = await _find_answer(rig, conversation.id)
            assert turn.state in {TurnState.COMPLETE, TurnState.INTERRUPTED}
            let_go.set()

    async def test_whose_answer_cannot_be_written_wakes_its_listeners(
        self, open_rig: OpenRig, emulated: EmulatedProviders
    ) -> None:
        class Stuck(PostgresStore):
            async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
                if lease.owner == "test" and not recovering.is_set():
                    await asyncio.Event().wait()
                return await super().finish_turn(lease, answer)

        recovering = asyncio.Event()
        emulated["gemini"].says(tells("Once upon a time."))
        async with open_rig(store=Stuck, limits=self.limits) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, "gemini")
            handle = await rig.service.take_turn(rig.tenant_id, user_task(conversation.id))
            with pytest.raises(TurnStalled):
                await read_all(handle)
            recovering.set()
            await _end_all_leases(rig)
            await _goes_on(rig, conversation.id)


class Choosy(PostgresStore):
    """Refuses every answer with content, as a database does whose columns cannot hold it."""

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        if text_in(answer):
            raise pg.DataError("value out of int32 range")
        return await super().finish_turn(lease, answer)


def text_in(answer: NewAnswer) -> bool:
    return any("poison" in getattr(block, "text", "") for block in answer.blocks)


@pytest.mark.parametrize("provider", BOTH)
class TestAnAnswerThatCannotBeStored:
    async def test_ends_the_turn_and_keeps_every_byte(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        emulated[provider].says(tells("A poisoned apple."), tells("Better."))
        async with open_rig(store=Choosy) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, AnswerUnstorable.code)
            assert (ended.turn.blocks, ended.turn.cost_usd) == ((), None)
            call = await _only_call(rig, conversation.id)
            assert call.end is not None
            assert b"apple" in (call.end.raw_response or b"")
            assert call.end.error_code == AnswerUnstorable.code
            assert {"kind": AnswerUnstorable.code} in call.start.warnings
            await _goes_on(rig, conversation.id)
            assert (await verify(rig.database, [conversation.id])).mismatches == ()
            assert (await rig.store.erase_conversation(rig.tenant_id, conversation.id)).rows

    async def test_not_even_its_bytes_still_ends_the_turn(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Choosier(PostgresStore):
            async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
                if answer.end is not None and b"apple" in (answer.end.raw_response or b""):
                    raise pg.DataError("no")
                return await super().finish_turn(lease, answer)

        emulated[provider].says(tells("A poisoned apple."), tells("Better."))
        async with open_rig(store=Choosier) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, AnswerUnstorable.code)
            await _goes_on(rig, conversation.id)

    async def test_an_attempt_that_cannot_be_stored_does_not_keep_the_turn_from_ending(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Choosy(PostgresStore):
            async def end_call(self, lease: Lease, start: Any, end: Any) -> None:
                if end.headers:
                    raise pg.DataError("no")
                await super().end_call(lease, start, end)

        emulated[provider].fails(FaultKind.OVERLOADED)
        emulated[provider].says(tells("Better."))
        async with open_rig(store=Choosy) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert text_of(ended) == "Better."
            failed, _ = await rig.store.list_calls(rig.tenant_id, conversation.id, 2)
            assert failed.end is not None
            assert failed.end.raw_response

    async def test_a_fold_with_a_bug_ends_the_turn_as_internal(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Buggy(Slow):
            def open_stream(self, payload: Payload) -> "SlowStream":
                return BuggyStream(self._provider.open_stream(payload), self._wait)

        emulated[provider].says(tells("A poisoned apple."), tells("Better."))
        async with open_rig(wrap=Buggy) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            assert ended.turn.state is TurnState.FAILED
            assert ended.turn.error_code in {Internal.code, AnswerUnstorable.code}
            call = await _only_call(rig, conversation.id)
            assert call.end is not None
            assert call.end.raw_response

    async def test_a_turn_whose_counts_exceed_32_bits_is_stored_and_reported(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Generous(PostgresStore):
            async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
                assert answer.end is not None
                usage = replace(answer.usage, fresh_input_tokens=2**31, output_tokens=2**40)
                return await super().finish_turn(
                    lease, replace(answer, usage=usage, end=replace(answer.end, usage=usage))
                )

        emulated[provider].says(tells("Expensive."))
        async with open_rig(store=Generous) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            await say(rig.service, rig.tenant_id, user_task(conversation.id))
            turn = await _find_answer(rig, conversation.id)
            assert (turn.usage.fresh_input_tokens, turn.usage.output_tokens) == (2**31, 2**40)
            fork = await rig.store.fork_conversation(rig.tenant_id, conversation.id, 2)
            assert (await _find_answer(rig, fork.id)).usage == turn.usage


class BuggyStream(SlowStream):
    """A stream whose fold raises over its answer, whenever it is asked for it."""

    @property
    def answer(self) -> ProviderAnswer:
        raise RecursionError

    async def events(self) -> AsyncGenerator[ProviderEvent, None]:
        async with aclosing(self._stream.events()) as events:
            async for event in events:
                yield event
        raise RecursionError


async def _only_call(rig: Rig, conversation_id: str) -> Call:
    (call,) = await rig.store.list_calls(rig.tenant_id, conversation_id, 2)
    return call


class BuggyFold:
    """A fold that raises what no fold should."""

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
        """Returns when no checkpoint is under way any more."""
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


async def _kill(rig: Rig) -> None:
    """No heartbeat of the server comes any more, and the time of its leases has run out."""
    assert isinstance(rig.store, MortalStore)
    await rig.store.die()
    await _end_all_leases(rig)


@pytest.mark.parametrize("provider", BOTH)
class TestRecovery:
    async def _orphan(self, rig: Rig, emulated: EmulatedProviders, provider: str) -> str:
        """A conversation whose process died in the middle of an answer that it had begun to write down."""
        conversation = await open_conversation(rig.store, rig.tenant_id, provider)
        emulated[provider].fails(FaultKind.SILENCE, after_chunks=3)
        emulated[provider].says(tells("A poisoned apple, and a long story about it that never ends."))
        handle = await rig.service.take_turn(rig.tenant_id, user_task(conversation.id))
        while not await rig.store.list_chunks(rig.tenant_id, conversation.id, 2, attempt=1):  # noqa: ASYNC110  reason: nothing tells
            await asyncio.sleep(0.01)
        assert handle.seq == 2
        return conversation.id

    async def test_of_an_answer_that_cannot_be_read_keeps_its_bytes(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        folds = {**FOLDS, provider: _open_buggy}
        async with open_rig(store=MortalStore) as dying, open_rig(folds=folds) as rig:
            poisoned = await self._orphan(dying, emulated, provider)
            healthy = await self._orphan(dying, emulated, other)
            await _kill(dying)
            assert await TurnRecovery(rig.tools).recover() == 2
            turn = await _find_answer(rig, poisoned)
            assert (turn.state, turn.error_code) == (TurnState.INTERRUPTED, AnswerUnreadable.code)
            call = await _only_call(rig, poisoned)
            assert call.end is not None
            assert call.end.raw_response
            assert (await _find_answer(rig, healthy)).error_code == TurnInterrupted.code
            assert (await rig.store.erase_conversation(rig.tenant_id, poisoned)).rows

    async def test_of_a_turn_without_a_recorded_call_records_one_with_an_unknown_outcome(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        async with open_rig() as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            emulated[provider].says(tells("Hi."), tells("Better."))
            await say(rig.service, rig.tenant_id, user_task(conversation.id))
            # A process accepts the next turn, and dies.
            await accept(rig.store, rig.tenant_id, user_input(conversation.id))
            await _end_all_leases(rig)
            assert await TurnRecovery(rig.tools).recover() == 1
            (call,) = await rig.store.list_calls(rig.tenant_id, conversation.id, 4)
            assert call.end is not None
            assert (call.start.request_hash, call.end.cost_usd) == (b"", None)
            outcome = explain_outcome(call, await _find_answer(rig, conversation.id, 4), None)
            assert outcome.kind is OutcomeKind.UNKNOWN
            (note,) = call.start.warnings
            assert str(note["estimated_cost_usd"]) in outcome.explanation
            ended = await say(rig.service, rig.tenant_id, user_task(conversation.id, "And then?"))
            assert ended.turn.state is TurnState.COMPLETE
            assert (await verify(rig.database, [conversation.id])).mismatches == ()

    async def test_is_not_needed_to_erase_the_conversation(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        async with open_rig(store=MortalStore) as rig:
            orphan = await self._orphan(rig, emulated, provider)
            with pytest.raises(ConversationBusy):
                await rig.store.erase_conversation(rig.tenant_id, orphan)
            await _kill(rig)
            assert (await rig.store.erase_conversation(rig.tenant_id, orphan)).rows
            async with rig.database.connection() as connection:
                assert not await connection.fetch("SELECT FROM call_chunks")

    async def test_of_one_that_cannot_be_ended_does_not_hold_up_the_others(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        class Broken(PostgresStore):
            async def take_over_lease(self, lease: Lease, **options: Any) -> Lease:
                if lease.conversation_id == poisoned:
                    raise pg.DataError("no")
                return await super().take_over_lease(lease, **options)

        async with open_rig(store=MortalStore) as dying, open_rig(store=Broken) as rig:
            orphans = sorted([await self._orphan(dying, emulated, provider) for _ in range(3)])
            poisoned = orphans[0]
            await _kill(dying)
            assert await TurnRecovery(rig.tools).recover() == 2
            for conversation_id in orphans[1:]:
                assert (await _find_answer(rig, conversation_id)).state is TurnState.INTERRUPTED


async def _move(rig: Rig, conversation_id: str, provider: str) -> None:
    """The conversation goes on with a new version of its assistant, of another provider."""
    assistant_id = (await rig.store.load_conversation(rig.tenant_id, conversation_id)).assistant_id
    changed = definition(provider=provider, model=MODELS[provider], tools=(WEATHER,), settings={})
    version = (await rig.store.revise_assistant(rig.tenant_id, assistant_id, changed)).version
    await rig.store.change_conversation(rig.tenant_id, conversation_id, ConversationChange(assistant_version=version))


@pytest.mark.parametrize("provider", BOTH)
class TestATurnThatDiedBeforeItsCallWasRecorded:
    async def _die_asking(self, rig: Rig, emulated: EmulatedProviders, request: TurnRequest) -> int:
        for name in BOTH:
            emulated[name].fails(FaultKind.SILENCE)
        handle = await rig.service.take_turn(rig.tenant_id, request)
        await until_asked(emulated)
        return handle.seq

    async def _recover(self, rig: Rig, conversation_id: str, seq: int) -> tuple[ModelResponseTurn, Sequence[Call]]:
        await _kill(rig)
        assert await TurnRecovery(rig.tools).recover(conversation_id) == 1
        calls = await rig.store.list_calls(rig.tenant_id, conversation_id, seq)
        return await _find_answer(rig, conversation_id, seq), calls

    async def test_in_a_tool_loop_was_asked_of_the_provider_of_the_loop(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        emulated[provider].says(asks("Oslo"))
        async with open_rig(store=ForgetfulStore) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            asked = await say(rig.service, rig.tenant_id, user_task(conversation.id))
            await _move(rig, conversation.id, other)
            seq = await self._die_asking(rig, emulated, tool_results(conversation.id, calls_of(asked)))
            turn, (call,) = await self._recover(rig, conversation.id, seq)
            assert (turn.provider, turn.model) == (provider, MODELS[provider])
            assert (call.start.provider, call.start.model) == (provider, MODELS[provider])

    async def test_was_asked_of_the_provider_that_the_conversation_had_then(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        async with open_rig(store=ForgetfulStore) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            seq = await self._die_asking(rig, emulated, user_task(conversation.id))
            await _move(rig, conversation.id, other)
            turn, (call,) = await self._recover(rig, conversation.id, seq)
            assert (turn.provider, call.start.provider) == (provider, provider)

    async def test_before_its_epoch_began_was_asked_of_nobody(
        self, open_rig: OpenRig, emulated: EmulatedProviders, provider: str
    ) -> None:
        other = next(name for name in BOTH if name != provider)
        stuck = asyncio.Event()

        class Stuck(MortalStore):
            async def begin_epoch(self, *arguments: Any, **options: Any) -> None:
                if stuck.is_set():
                    await asyncio.Event().wait()
                await super().begin_epoch(*arguments, **options)

        emulated[provider].says(tells("Once upon a time."))
        async with open_rig(store=Stuck) as rig:
            conversation = await open_conversation(rig.store, rig.tenant_id, provider)
            await say(rig.service, rig.tenant_id, user_task(conversation.id))
            await _move(rig, conversation.id, other)
            stuck.set()
            handle = await rig.service.take_turn(rig.tenant_id, user_task(conversation.id, "And then?"))
            turn, calls = await self._recover(rig, conversation.id, handle.seq)
            assert (turn.provider, turn.cost_usd, len(calls)) == (other, Decimal(0), 0)
