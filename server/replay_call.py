"""A candidate's call: permitted, written down, made, and written down again.

No call leaves without permission: the replay runs, its budget suffices, and neither its own rate nor the provider's
stands in the way. It is written down before it leaves. So a process that dies over it leaves a trace, and whoever goes
on knows that what it was for has to be asked once more.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID, uuid4

from server.call import Call, CallEnd, CallStart
from server.call_records import cost_of, end_of, start_of
from server.conversation import Lease
from server.errors import DatabaseUnavailable, Internal, ProviderFailed, ProviderOverloaded, ProviderRateLimited
from server.model_profile import find_profile
from server.payload import Payload
from server.payload_preparation import PreparedPayload
from server.pricing import price_call
from server.provider import Provider, ProviderAnswer, ProviderStream
from server.replay import CallEstimate, CallSpending, Granted, ItemLease, Stopped, Wait
from server.replays import Replays
from server.retry_policy import RetryPolicy, plan_retry
from server.stop_sign import StopSign
from server.store import Store
from server.token_estimate import TokenEstimate
from server.usage import Usage

CALL_LOST: Final = "call_lost"
"""The error code of a call whose process died over it."""
_LEAST_OUTPUT_TOKENS: Final = 1_024
_LONGEST_WAIT_SECONDS: Final = 5.0
"""So that a pause, a cancellation or a stop is not noticed late."""
_TRIES: Final = 20
_PAUSE_SECONDS: Final = 1.0
_log = logging.getLogger("strata.replay")


class ItemHalted(Exception):
    """No call may leave now: the replay does not run any more, or this process is about to stop."""


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
        shadows: Store,
        lease: ItemLease,
        *,
        estimate: TokenEstimate,
        retry_policy: RetryPolicy,
        stop_sign: StopSign,
    ) -> None:
        self._replays = replays
        self._shadows = shadows
        self._lease = lease
        self._estimate = estimate
        self._retry_policy = retry_policy
        self._stop_sign = stop_sign

    async def ask(
        self, lease: Lease, prepared: PreparedPayload, *, first_attempt: int, expected: Usage | None
    ) -> CallOutcome:
        """The answer to a payload, or its last failure. `expected`: what the recorded one took.

        Failed attempts that another one follows are written down here, the last one is the caller's to write down: an
        answer is durable together with the turn that it ends. Raises `ItemHalted`, `LeaseLost`, `DatabaseUnavailable`.
        """
        began, attempt = time.monotonic(), first_attempt
        earlier: list[CallEnd] = []
        while True:
            outcome = await self._attempt(lease, prepared, attempt, expected)
            outcome = replace(outcome, earlier=tuple(earlier))
            failure = outcome.failure
            if failure is None:
                return outcome
            delay = self.plan_delay(
                prepared.provider.name, prepared.model, failure, attempt - first_attempt + 1, time.monotonic() - began
            )
            await self.hold_back(prepared.provider.name, failure)
            if delay is None:
                return outcome
            await self._shadows.end_call(lease, outcome.start, outcome.end)
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
        await insist(lambda: self._replays.settle_call(self._lease, reservation, spending))

    def foresee(self, payload: Payload, provider: str, size_bytes: int, expected: Usage | None) -> CallEstimate:
        """What a request of this size may come to."""
        said = 0 if expected is None else 2 * (expected.output_tokens + expected.reasoning_tokens)
        limit = payload.settings.max_output_tokens or max(_LEAST_OUTPUT_TOKENS, said)
        return foresee_call(provider, payload.model, self._estimate.estimate(payload.model, size_bytes), limit)

    async def _attempt(
        self, lease: Lease, prepared: PreparedPayload, attempt: int, expected: Usage | None
    ) -> CallOutcome:
        provider, payload = prepared.provider, prepared.built.payload
        request = await provider.encode_request(payload)
        estimate = self.foresee(payload, provider.name, len(request), expected)
        reservation = await self.permit(provider.name, estimate)
        stream = provider.open_stream(payload)
        start = replace(
            start_of(prepared, attempt, stream, payload),
            started_at=datetime.now(UTC),
            request_hash=hashlib.sha256(request).digest(),
        )
        await self._shadows.begin_call(lease, start)
        failure = await listen(stream)
        code = None if failure is None else failure.code
        end = end_of(prepared, stream, payload, code)
        self._learn(payload, len(request), failure, stream.answer)
        return CallOutcome(
            start=start,
            end=end,
            answer=stream.answer,
            failure=failure,
            reservation=reservation,
            spending=CallSpending(
                usd=cost_of(payload.model, start.started_at, stream.answer), tokens=count_tokens(stream.answer.usage)
            ),
        )

    def _learn(self, payload: Payload, size_bytes: int, failure: ProviderFailed | None, answer: ProviderAnswer) -> None:
        if failure is None and not payload.cached_content:
            self._estimate.learn(payload.model, size_bytes, answer.usage.input_tokens)

    async def hold_back(self, provider: str, failure: ProviderFailed) -> None:
        """What one process is told holds for all."""
        asked = failure.details.get("retry_after_seconds")
        if isinstance(failure, ProviderRateLimited | ProviderOverloaded) and isinstance(asked, int | float):
            await self._replays.hold_back(provider, float(asked))

    async def wait(self, seconds: float) -> None:
        """Raises `ItemHalted` where the process wants to stop meanwhile."""
        try:
            await asyncio.wait_for(self._stop_sign.raised.wait(), seconds)
        except TimeoutError:
            return
        raise ItemHalted

    def _heed_sign(self) -> None:
        if self._stop_sign.raised.is_set():
            raise ItemHalted

    def plan_delay(
        self, provider: str, model: str, failure: ProviderFailed, attempt: int, elapsed_seconds: float
    ) -> float | None:
        """How long to wait before another attempt; None where none follows."""
        delay = plan_retry(
            self._retry_policy,
            failure,
            attempt=attempt,
            elapsed_seconds=elapsed_seconds,
            events_given=False,
            chance=random.random(),  # noqa: S311  reason: spreads retries, guards nothing
        )
        _log.warning(
            "provider.call_failed",
            extra={
                "provider": provider,
                "model": model,
                "attempt": attempt,
                "code": failure.code,
                "retry_in_seconds": delay,
            },
        )
        return delay


def recall_outcome(call: Call, provider: Provider) -> CallOutcome:
    """How asking went, from what is stored of the call that was answered last."""
    if call.end is None:
        raise Internal("A call without an end has no answer.")
    return CallOutcome(
        start=call.start,
        end=call.end,
        answer=provider.fold_body(call.end.raw_response or b""),
        failure=None,
        reservation=None,
        spending=CallSpending(usd=call.end.cost_usd, tokens=count_tokens(call.end.usage)),
    )


def foresee_call(provider: str, model: str, sent_tokens: int, said_tokens: int) -> CallEstimate:
    """Rather too much than too little: all that is sent is written to a cache for long, where the model has one."""
    profile = find_profile(provider, model)
    writes = profile.breakpoints > 0
    usage = Usage(
        fresh_input_tokens=0 if writes else sent_tokens,
        cache_write_tokens=sent_tokens if writes else 0,
        output_tokens=min(said_tokens, profile.output_limit_tokens),
    )
    cost = price_call(model, datetime.now(UTC), usage, long_write_tokens=usage.cache_write_tokens)
    return CallEstimate(usd=None if cost is None else cost.total_usd, tokens=count_tokens(usage))


async def listen(stream: ProviderStream) -> ProviderFailed | None:
    """Until the call is over. Why it failed, if it did. Nobody hears the answer before it is whole."""
    try:
        async with aclosing(stream.events()) as events:
            async for _ in events:
                pass
    except ProviderFailed as error:
        return error
    return None


async def insist(write: Callable[[], Awaitable[object]]) -> None:
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


def count_tokens(usage: Usage) -> int:
    """All of them."""
    return usage.input_tokens + usage.output_tokens + usage.reasoning_tokens
