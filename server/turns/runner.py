"""One turn from its accepted input to its durable answer: prepare, call, stream, finish.

Live turns and turns of replays run here. A live turn always ends in one place: its answer is stored, complete or not,
before its last event is sent. A turn of a replay follows `BatchRules`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Final

from server.caching.maintainer import CacheObservation
from server.conversation.assistant import AssistantDefinition
from server.conversation.block import JsonValue
from server.conversation.call import CallEnd
from server.conversation.conversation import Lease
from server.conversation.errors import (
    AnswerUnstorable,
    CacheGone,
    DatabaseUnavailable,
    Internal,
    LeaseLost,
    ProviderFailed,
    StrataError,
    TurnInterrupted,
    TurnStalled,
)
from server.conversation.event import build_turn_ended
from server.conversation.outages import retry_while_unavailable
from server.conversation.payload import Payload
from server.conversation.shutdown import run_to_completion
from server.conversation.store import Finished, NewAnswer, PayloadSource
from server.conversation.turn import (
    ModelResponseTurn,
    Native,
    StopReason,
    TurnState,
    describe_failure,
    describe_stop,
    open_call_ids,
)
from server.conversation.usage import Usage, add_usages
from server.payload.call_records import add_costs, build_bare_call_end, build_call_end
from server.payload.preparation import PreparedPayload
from server.providers.calls import REJECTIONS, Admission, Attempt, CallHooks, RetryingCall
from server.providers.continuation import fold_earlier, fold_events
from server.turns.checkpointer import TurnCheckpointer
from server.turns.live import LiveTurn
from server.turns.observer import TurnTimes
from server.turns.tools import TurnTools

_log = logging.getLogger("strata.turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How a turn ended, before it is written."""

    state: TurnState
    stop_reason: StopReason | None
    error_code: str | None = None
    ending: Mapping[str, JsonValue] = field(default_factory=dict)
    """See `server.conversation.turn`."""


_CANCELLED: Final = _Outcome(state=TurnState.CANCELLED, stop_reason=StopReason.ABORTED)
_INTERRUPTED: Final = _Outcome(
    state=TurnState.INTERRUPTED, stop_reason=StopReason.ABORTED, error_code=TurnInterrupted.code
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How a turn that no client waits for differs from a live one.

    Each call has to be admitted, and is recorded before it is sent. An attempt that broke off can be followed by
    another one. If the turn is interrupted, or fails for another reason than the provider, it stays open: no answer is
    stored, the error is raised, and the next process that runs the turn makes further attempts.
    """

    admission: Admission
    substitute: Callable[[PreparedPayload, NewAnswer], NewAnswer]
    """Returns the answer that is stored in place of the model's own."""
    first_attempt: Callable[[PreparedPayload], int]
    """The number of the first attempt."""
    earlier_ends: Sequence[CallEnd] = ()
    """Of the calls that other processes have made for the turn."""


class TurnRunner:
    """Runs one turn, once."""

    def __init__(
        self,
        tools: TurnTools,
        tenant_id: str,
        lease: Lease,
        live: LiveTurn,
        *,
        began: float,
        batch: BatchRules | None = None,
    ) -> None:
        """`began`: when the request came in, by the monotonic clock. `batch`: None for a live turn."""
        self._batch = batch
        self._tools = tools
        self._tenant_id = tenant_id
        self._lease = lease
        self._live = live
        self._began = began
        self._times = TurnTimes(accepted=time.monotonic() - began)
        self._checkpointer = TurnCheckpointer(tools, lease, live)
        self._definition: AssistantDefinition | None = None
        self._source: PayloadSource | None = None
        self._prepared: PreparedPayload | None = None
        self._call: RetryingCall | None = None
        self.finished: tuple[NewAnswer, Finished] | None = None
        """The model's own answer, once the turn is durable."""

    async def run(self) -> None:
        """Runs the turn until its answer is durable, or cannot be made durable.

        Cancelling a live turn ends it as interrupted. With `BatchRules` this raises what keeps the turn open.
        """
        self._tools.observer.turn_began(self._lease)
        try:
            outcome = await self._answer()
        except asyncio.CancelledError:
            if self._batch is None:
                await run_to_completion(self._conclude(_INTERRUPTED))
            raise
        await run_to_completion(self._conclude(outcome))

    async def _answer(self) -> _Outcome:
        try:
            async with self._checkpointer.running():
                return await self._ask()
        # The boundary of a live turn's task. A bug too must end the turn: a client and a lease wait for it.
        except Exception as error:
            is_answered = isinstance(error, TurnStalled) and self._call is not None and self._call.is_complete
            is_call_failure = isinstance(error, ProviderFailed) and self._call is not None
            if self._batch is not None and not is_answered and not is_call_failure:
                raise
            if not isinstance(error, StrataError):
                _log.exception("turn.crashed", extra=self._facts())
                return _failed(Internal.code)
            if self._live.is_cancelled:
                return _CANCELLED
            if is_answered and self._call is not None:
                return _complete(self._call)
            return _failed(error.code, describe_failure(error))

    async def _ask(self) -> _Outcome:
        tools, batch = self._tools, self._batch
        self._source = source = await tools.preparation.load(self._tenant_id, self._lease.conversation_id)
        self._definition = source.assistant.definition
        self._prepared = prepared = await tools.preparation.prepare(self._tenant_id, source)
        self._note(built=time.monotonic() - self._began)
        self._call = call = RetryingCall(
            prepared.provider,
            prepared.built.payload,
            tools.retry_policy,
            estimate=tools.estimate,
            hooks=CallHooks(
                on_sent=self._checkpointer.call_sent,
                rebuild=self._leave_out_rejected,
                admit=None if batch is None else self._admit,
                after_failure=None if batch is None else self._settle_failed,
            ),
            first_number=1 if batch is None else batch.first_attempt(prepared),
            retries_after_events=batch is not None,
        )
        self._checkpointer.attend(prepared, call)
        if not self._live.is_cancelled:
            try:
                async with aclosing(call.event_batches()) as batches:
                    async for events in batches:
                        if self._times.first_event is None:
                            self._note(first_event=time.monotonic() - self._began)
                        self._live.append(events)
            except REJECTIONS as failure:
                await self._note_rejected(failure)
                raise
        return _complete(call) if call.is_complete else _CANCELLED

    async def _admit(self, attempt: Attempt) -> None:
        """Waits until a call of a batch may be sent, and records it."""
        if self._batch is None or self._call is None:
            return
        # A paused attempt that this one continues.
        await self._record_ends(self._call.attempts)
        provider = self._checkpointer.prepared_for(attempt).provider
        request = await provider.encode_request(attempt.payload)
        await self._batch.admission.admit(provider, attempt.payload, len(request))
        await self._checkpointer.record_begin(attempt, request)

    async def _settle_failed(self, attempt: Attempt, delay: float | None) -> float:
        """Records a failed call of a batch that another one follows. The last one is stored with the answer."""
        if self._batch is None or self._call is None:
            return delay or 0.0
        if delay is not None:
            await self._record_ends(self._call.attempts)
        return await self._batch.admission.after_failure(attempt, delay)

    async def _record_ends(self, attempts: Sequence[Attempt]) -> None:
        """Stores and settles the calls of a batch that have ended."""
        for end in await self._checkpointer.record_ends(attempts):
            if self._batch is not None:
                await self._batch.admission.settle(end)

    async def _leave_out_rejected(self, failure: ProviderFailed) -> Payload | None:
        """The payload of the next attempt, without what the provider has rejected."""
        if self._prepared is None or self._call is None:
            return None
        prepared = await self._tools.preparation.leave_out_rejected(self._tenant_id, self._prepared, failure)
        if prepared is None:
            return None
        self._prepared = prepared
        self._checkpointer.attend(prepared, self._call)
        return prepared.built.payload

    async def _note_rejected(self, failure: ProviderFailed) -> None:
        """Makes sure that the next turn does not send what was rejected, though this one ends with the failure."""
        if self._prepared is None:
            return
        try:
            await self._tools.preparation.leave_out_rejected(self._tenant_id, self._prepared, failure)
        except StrataError as error:
            _log.warning("turn.rejection_not_stored", extra=self._facts(code=error.code))

    async def _conclude(self, outcome: _Outcome) -> None:
        """Stores the answer and wakes the readers, within the limit for the end of a turn.

        If a live turn cannot be stored, readers get an error and the lease is no longer renewed, so another process
        ends the turn. With `BatchRules` the error is raised.
        """
        lost: StrataError
        try:
            answer, finished = await retry_while_unavailable(
                lambda: self._store_answer(outcome), limit_seconds=self._tools.limits.ending_seconds
            )
        except (LeaseLost, DatabaseUnavailable) as error:
            lost = error
        except TimeoutError:
            lost = TurnStalled()
        # The boundary of a task that is not awaited.
        except Exception:  # noqa: BLE001  reason: logged with its traceback, and readers get `internal`
            _log.exception("turn.end_crashed", extra=self._facts())
            lost = Internal()
        else:
            self.finished = answer, finished
            self._announce(answer, finished)
            if self._batch is not None and answer.end is not None:
                await self._batch.admission.settle(answer.end)
            return
        _log.error("turn.lost", extra=self._facts(code=lost.code))
        self._tools.observer.turn_lost(self._lease, lost.code)
        self._live.lose(lost)
        if self._batch is not None:
            raise lost

    async def _store_answer(self, outcome: _Outcome) -> tuple[NewAnswer, Finished]:
        """Stores the answer as it came; if that fails, the bytes alone; if that fails too, that the turn has ended.

        Raises `LeaseLost`, `DatabaseUnavailable`.
        """
        for build in (self._build_answer, self._build_bare_answer):
            try:
                answer = build(outcome)
                return answer, await self._finish(answer)
            except (LeaseLost, DatabaseUnavailable):
                raise
            # A turn that cannot end blocks its conversation forever: for the next turn, for recovery, for erasure.
            except Exception:  # noqa: BLE001  reason: logged with its traceback, and the turn says `answer_unstorable`
                _log.exception("turn.answer_unstorable", extra=self._facts())
        answer = self._build_answer_without_call(_unstorable(outcome))
        return answer, await self._finish(answer)

    async def _finish(self, answer: NewAnswer) -> Finished:
        await self._checkpointer.record_followed_attempts()
        stored = answer
        if self._batch is not None and self._prepared is not None:
            stored = self._batch.substitute(self._prepared, answer)
            if stored.start is not answer.start and answer.start is not None and answer.end is not None:
                # The stored turn refers to another call, so this one is ended by itself.
                await self._tools.store.end_call(self._lease, answer.start, answer.end)
                stored = replace(stored, is_call_recorded=False)
        return await self._tools.store.finish_turn(self._lease, stored)

    def _announce(self, answer: NewAnswer, finished: Finished) -> None:
        turn = ModelResponseTurn(
            seq=self._lease.turn_seq,
            created_at=finished.created_at,
            blocks=answer.blocks,
            state=answer.state,
            stop_reason=answer.stop_reason,
            error_code=answer.error_code,
            provider=answer.provider,
            model=answer.model,
            usage=answer.usage,
            cost_usd=answer.cost_usd,
            attempt=None if answer.start is None else answer.start.attempt,
            revision=finished.revision,
            ending=answer.ending,
        )
        self._append_unsent_events()
        self._live.end(build_turn_ended(self._lease.conversation_id, turn))
        self._note(ended=time.monotonic() - self._began)
        if answer.start is not None and answer.end is not None and self._prepared is not None:
            self._tools.observer.call_ended(
                self._lease, answer.start, answer.end, assistant_id=self._prepared.assistant_id
            )
        self._tools.observer.turn_ended(self._lease, turn, self._times)
        if self._source is not None and self._prepared is not None:
            payload = self._prepared.built.payload
            signed_summary_length = 0 if payload.signed_summary is None else len(payload.signed_summary.data)
            static_length = len(payload.static_text) + signed_summary_length
            self._tools.follower.turn_followed(
                self._tenant_id, self._source, static_length, turn, len(answer.native.data)
            )
        self._notify_cache_keeper()

    def _notify_cache_keeper(self) -> None:
        prepared, call, keeper = self._prepared, self._call, self._tools.cache_maintainer
        if keeper is None or prepared is None or call is None or not call.attempts:
            return
        keeper.observe_call(
            CacheObservation(
                tenant_id=self._tenant_id,
                conversation_id=self._lease.conversation_id,
                plan=prepared.caching,
                usage=call.stream.answer.usage,
                started_at=call.stream.record.started_at,
                was_missing=any(isinstance(attempt.failure, CacheGone) for attempt in call.attempts),
            )
        )

    def _append_unsent_events(self) -> None:
        """Adds events that the stored bytes contain and that were not passed on, so that every reader gets the same."""
        if self._prepared is None or self._call is None or not self._call.attempts or self._call.is_complete:
            return
        fold = self._tools.folds[self._prepared.provider.name]()
        *earlier, last = self._call.bodies
        events = [*fold_earlier(fold, earlier), *fold_events(fold, last)[0]]
        self._live.append(events[self._live.answer_event_count :])

    def _build_answer(self, outcome: _Outcome) -> NewAnswer:
        prepared, call = self._prepared, self._call
        if prepared is None or call is None or not call.attempts:
            return self._build_answer_without_call(outcome)
        answer, last = call.answer, call.attempts[-1]
        ends = [
            build_call_end(
                self._checkpointer.prepared_for(attempt),
                attempt.stream,
                attempt.payload,
                outcome.error_code if attempt is last else attempt.failure_code,
            )
            for attempt in call.attempts
        ]
        all_ends = [*(() if self._batch is None else self._batch.earlier_ends), *ends]
        return NewAnswer(
            blocks=answer.blocks,
            native=answer.native or Native(dialect=prepared.provider.name, data=b""),
            state=outcome.state,
            stop_reason=outcome.stop_reason,
            error_code=outcome.error_code,
            usage=add_usages([end.usage for end in all_ends]),
            cost_usd=add_costs([end.cost_usd for end in all_ends]),
            pending_call_ids=open_call_ids(answer.blocks) if outcome.state is TurnState.COMPLETE else (),
            provider=prepared.provider.name,
            model=prepared.model,
            account=prepared.provider.account,
            start=self._checkpointer.start_of(last, answer.container),
            end=ends[-1],
            is_call_recorded=self._checkpointer.is_recorded(last),
            model_version=answer.model_version,
            ending=outcome.ending,
        )

    def _build_bare_answer(self, outcome: _Outcome) -> NewAnswer:
        """The end of a turn whose answer cannot be stored: no content, and all bytes that have arrived."""
        prepared, call = self._prepared, self._call
        if prepared is None or call is None or not call.attempts:
            return self._build_answer_without_call(_unstorable(outcome))
        answer = self._build_answer_without_call(_unstorable(outcome))
        last = call.attempts[-1]
        start = self._checkpointer.start_of(last)
        return replace(
            answer,
            cost_usd=None,
            account=prepared.provider.account,
            start=replace(start, warnings=(*start.warnings, {"kind": AnswerUnstorable.code})),
            end=build_bare_call_end(call.stream, AnswerUnstorable.code),
        )

    def _build_answer_without_call(self, outcome: _Outcome) -> NewAnswer:
        provider, model = ("", "") if self._definition is None else (self._definition.provider, self._definition.model)
        return NewAnswer(
            blocks=(),
            native=Native(dialect=provider, data=b""),
            state=outcome.state,
            stop_reason=outcome.stop_reason,
            error_code=outcome.error_code,
            usage=Usage(),
            cost_usd=Decimal(0),
            provider=provider,
            model=model,
            account=None,
            start=None,
            end=None,
            ending=outcome.ending,
        )

    def _note(self, **times: float) -> None:
        self._times = replace(self._times, **times)

    def _facts(self, **more: object) -> dict[str, object]:
        return {"conversation_id": self._lease.conversation_id, "turn_seq": self._lease.turn_seq, **more}


def _unstorable(outcome: _Outcome) -> _Outcome:
    """The same end without the answer."""
    whole = outcome.state is TurnState.COMPLETE
    return replace(
        outcome,
        state=TurnState.FAILED if whole else outcome.state,
        stop_reason=StopReason.ERROR if whole else outcome.stop_reason,
        error_code=AnswerUnstorable.code,
        ending={},
    )


def _failed(code: str, ending: Mapping[str, JsonValue] | None = None) -> _Outcome:
    return _Outcome(state=TurnState.FAILED, stop_reason=StopReason.ERROR, error_code=code, ending=ending or {})


def _complete(call: RetryingCall) -> _Outcome:
    answer = call.answer
    return _Outcome(
        state=TurnState.COMPLETE,
        stop_reason=answer.stop_reason,
        ending=describe_stop(answer.stop_reason, answer.stop_details),
    )
