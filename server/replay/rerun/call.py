"""A candidate's call: permitted, written down, made, and written down again.

No call leaves without permission: the replay runs, its budget suffices, and neither its own rate nor the provider's
stands in the way. It is written down before it leaves. So a process that dies over it leaves a trace, and whoever goes
on knows that what it was for has to be asked once more.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID, uuid4

from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.errors import (
    DatabaseUnavailable,
    Internal,
    ProviderFailed,
    ProviderOverloaded,
    ProviderRateLimited,
)
from server.conversation.manifest import encode_manifest
from server.conversation.payload import Payload
from server.conversation.shutdown import Shutdown
from server.conversation.store import Store
from server.payload.call_records import build_call_end, build_call_start, price_answer
from server.payload.preparation import PreparedPayload
from server.providers.provider import Provider, ProviderAnswer, ProviderStream
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.replay.rerun.call_estimate import count_tokens, estimate_call, estimate_said, estimate_sent
from server.replay.rerun.observer import CallPurpose, ReplayObserver
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import CallEstimate, CallSpending, Granted, ItemLease, Stopped, Wait
from server.replay.rerun.retries import RetryAllowance

CALL_LOST: Final = "call_lost"
"""The error code of a call whose process died over it."""
ANSWER_GONE: Final = "answer_gone"
"""The error code of an answer whose bytes retention has removed before it was compared."""
_LONGEST_WAIT_SECONDS: Final = 5.0
"""So that a pause, a cancellation or a stop is not noticed late."""
_TRIES: Final = 20
_PAUSE_SECONDS: Final = 1.0
_log = logging.getLogger("strata.replay")


class ItemHalted(Exception):
    """The item is to be gone on with later: the replay does not run any more, this process is about to stop, or one
    that was believed dead has had the last word on the replay conversation just now.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How asking went, after as many attempts as it took."""

    start: CallStart
    end: CallEnd
    answer: ProviderAnswer
    failure: ProviderFailed | None
    reservation: UUID | None
    """Of the last attempt; still to be settled. None where somebody else has made it."""
    spending: CallSpending
    """The same attempt's."""
    earlier: tuple[CallEnd, ...] = ()
    """Of the attempts before it, which are written down and settled."""


class CandidateCalls:
    """Makes the calls of one item."""

    def __init__(
        self,
        replays: Replays,
        replay_store: Store,
        lease: ItemLease,
        *,
        estimate: TokenEstimate,
        retry_policy: RetryPolicy,
        shutdown: Shutdown,
        observer: ReplayObserver,
    ) -> None:
        self._replays = replays
        self._replay_store = replay_store
        self._lease = lease
        self._estimate = estimate
        self._retry_policy = retry_policy
        self._shutdown = shutdown
        self.observer = observer

    async def ask(
        self, lease: Lease, prepared: PreparedPayload, *, first_attempt: int, recorded: Call | None
    ) -> CallOutcome:
        """The answer to a payload, or its last failure. `recorded`: the call that was made in its place.

        Failed attempts that another one follows are written down here, the last one is the caller's to write down: an
        answer is durable together with the turn that it ends. Raises `ItemHalted`, `LeaseLost`, `DatabaseUnavailable`.
        """
        retry_allowance, attempt = self.be_patient(), first_attempt
        earlier: list[CallEnd] = []
        while True:
            outcome = await self._attempt(lease, prepared, attempt, recorded)
            outcome = replace(outcome, earlier=tuple(earlier))
            failure = outcome.failure
            if failure is None:
                return outcome
            delay = await self.plan_delay(retry_allowance, failure, outcome.start, outcome.end)
            if delay is None:
                return outcome
            await self._replay_store.end_call(lease, outcome.start, outcome.end)
            await self.settle_outcome(outcome)
            earlier.append(outcome.end)
            attempt += 1
            await self.wait(delay)

    async def permit(self, provider: str, estimate: CallEstimate) -> UUID:
        """Waits for permission. What it is settled by. Raises `ItemHalted`, `LeaseLost`, `PriceUnknown`."""
        reservation = uuid4()
        while True:
            self._heed_sign()
            permission = await self._replays.reserve_call(
                self._lease, reservation, provider=provider, estimate=estimate
            )
            match permission:
                case Granted():
                    return reservation
                case Wait(seconds=seconds):
                    await self.wait(min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS))
                case Stopped():
                    raise ItemHalted

    async def settle_outcome(self, outcome: CallOutcome) -> None:
        """What its last attempt came to."""
        if outcome.reservation is not None:
            await self.settle(outcome.reservation, outcome.spending)

    async def settle(self, reservation: UUID, spending: CallSpending) -> None:
        """Tries for as long as it may help: what is not settled counts by its estimate."""
        await retry_write(lambda: self._replays.settle_call(self._lease, reservation, spending))

    def estimate(self, payload: Payload, provider: str, size_bytes: int) -> CallEstimate:
        """What a request of this size may come to, where nothing like it was recorded."""
        sent = self._estimate.estimate(payload.model, size_bytes)
        return estimate_call(provider, payload.model, sent, estimate_said(payload.settings.max_output_tokens, None))

    async def _attempt(
        self, lease: Lease, prepared: PreparedPayload, attempt: int, recorded: Call | None
    ) -> CallOutcome:
        provider, payload = prepared.provider, prepared.built.payload
        request = await provider.encode_request(payload)
        estimate = self._foresee_answer(prepared, len(request), recorded)
        reservation = await self.permit(provider.name, estimate)
        stream = provider.open_stream(payload)
        start = replace(
            build_call_start(prepared, attempt, stream, payload),
            started_at=datetime.now(UTC),
            request_hash=hashlib.sha256(request).digest(),
        )
        await self._replay_store.begin_call(lease, start)
        failure = await listen(stream)
        code = None if failure is None else failure.code
        end = build_call_end(prepared, stream, payload, code)
        self.observer.call_ended(start, end, CallPurpose.ANSWER)
        self._learn(payload, len(request), failure, stream.answer)
        return CallOutcome(
            start=start,
            end=end,
            answer=stream.answer,
            failure=failure,
            reservation=reservation,
            spending=CallSpending(
                usd=price_answer(payload.model, start.started_at, stream.answer),
                tokens=count_tokens(stream.answer.usage),
            ),
        )

    def _learn(self, payload: Payload, size_bytes: int, failure: ProviderFailed | None, answer: ProviderAnswer) -> None:
        if failure is None and not payload.cached_content:
            self._estimate.learn(payload.model, size_bytes, answer.usage.input_tokens)

    def _foresee_answer(self, prepared: PreparedPayload, size_bytes: int, recorded: Call | None) -> CallEstimate:
        payload = prepared.built.payload
        sent = estimate_sent(encode_manifest(prepared.built.manifest), recorded)
        if sent is None:
            sent = self._estimate.estimate(payload.model, size_bytes)
        usage = None if recorded is None or recorded.end is None else recorded.end.usage
        said = estimate_said(payload.settings.max_output_tokens, usage)
        return estimate_call(prepared.provider.name, payload.model, sent, said)

    async def wait(self, seconds: float) -> None:
        """Raises `ItemHalted` where the process wants to stop meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._shutdown.requested.wait()
        except TimeoutError:
            return
        raise ItemHalted

    def _heed_sign(self) -> None:
        if self._shutdown.requested.is_set():
            raise ItemHalted

    def be_patient(self) -> RetryAllowance:
        """For a new question."""
        return RetryAllowance(self._retry_policy)

    async def plan_delay(
        self, retry_allowance: RetryAllowance, failure: ProviderFailed, start: CallStart, end: CallEnd
    ) -> float | None:
        """How long to wait before another attempt; None where none follows.

        What one process is told holds for all: where the provider wants to be left alone, no call leaves for it, and
        there is nothing else to wait for.
        """
        delay = retry_allowance.plan(
            failure,
            call_seconds=max(0.0, (end.ended_at - start.started_at).total_seconds()),
            chance=random.random(),  # noqa: S311  reason: spreads retries, guards nothing
        )
        _log.warning(
            "provider.call_failed",
            extra={
                "provider": start.provider,
                "model": start.model,
                "attempt": start.attempt,
                "code": failure.code,
                "retry_in_seconds": delay,
            },
        )
        is_limited = isinstance(failure, ProviderRateLimited)
        asked = failure.details.get("retry_after_seconds")
        pause = asked if isinstance(asked, int | float) else delay if is_limited else None
        if pause is not None and isinstance(failure, ProviderRateLimited | ProviderOverloaded):
            await self._replays.pause_provider(start.provider, float(pause))
        return 0.0 if is_limited and delay is not None else delay


def recall_outcome(call: Call, provider: Provider) -> CallOutcome:
    """How asking went, from what is stored of the call that was answered last."""
    if call.end is None:
        raise Internal("A call without an end has no answer.")
    is_gone = call.end.error_code is None and not call.end.raw_response
    return CallOutcome(
        start=call.start,
        end=replace(call.end, error_code=ANSWER_GONE) if is_gone else call.end,
        answer=provider.fold_body(call.end.raw_response or b""),
        failure=None,
        reservation=None,
        spending=CallSpending(usd=call.end.cost_usd, tokens=count_tokens(call.end.usage)),
    )


async def listen(stream: ProviderStream) -> ProviderFailed | None:
    """Until the call is over. Why it failed, if it did. Nobody hears the answer before it is whole."""
    try:
        async with aclosing(stream.events()) as events:
            async for _ in events:
                pass
    except ProviderFailed as error:
        return error
    return None


async def retry_write(write: Callable[[], Awaitable[object]]) -> None:
    """Tries again for as long as it may help where the database is away: what was answered is paid for."""
    for remaining in reversed(range(_TRIES)):
        try:
            await write()
        except DatabaseUnavailable:
            if not remaining:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return
