"""The loop that calls a provider for one answer: attempts, retries, continuations.

Every request to a model is made here: for live turns, for replayed turns, for summaries and for judges. Callers differ
in the retry policy and in the `CallHooks` that they pass in.

Each attempt has its own stream, and all attempts are kept: the bytes of a failed one are recorded too. Events that were
passed on cannot be taken back. So usage that a provider reports before any content is held until content arrives, and a
failure before that can still be followed by another attempt.

If the provider pauses an answer, another attempt continues it. The events of both are one sequence, and their content
is one answer. See `server.providers.continuation`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from server.conversation.call import CallEnd
from server.conversation.errors import (
    AnswerRejected,
    CacheGone,
    PrefixMismatch,
    ProviderFailed,
    SignatureRejected,
    SummaryRejected,
)
from server.conversation.event import ProviderEvent, UsageReported
from server.conversation.payload import Payload
from server.conversation.turn import StopReason
from server.conversation.usage import Usage, add_usages
from server.providers.continuation import continue_payload, fold_earlier, fold_events
from server.providers.provider import ENDED, Provider, ProviderAnswer, ProviderStream, StreamState
from server.providers.retry_policy import RetryBudget, RetryPolicy
from server.providers.token_estimate import TokenEstimate

REJECTIONS: Final = (AnswerRejected, SummaryRejected, PrefixMismatch, SignatureRejected)
"""The provider rejects what it has signed itself: the same request fails every time."""
_OK: Final = 200
_log = logging.getLogger("strata.provider")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One request to the provider."""

    number: int
    payload: Payload
    stream: ProviderStream
    failure: ProviderFailed | None = None
    """None while it runs, and if it succeeded, was paused or was cancelled."""

    @property
    def failure_code(self) -> str | None:
        return None if self.failure is None else self.failure.code


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHooks:
    """Callbacks of a call. What they raise ends the call."""

    admit: Callable[[Attempt], Awaitable[None]] | None = None
    """Awaited before an attempt is sent."""
    on_sent: Callable[[], None] | None = None
    """Called when the request of an attempt is sent."""
    rebuild: Callable[[ProviderFailed], Awaitable[Payload | None]] | None = None
    """Returns the payload without the signatures that the provider has rejected, or None if nothing can be left out.
    Used once, for the first of `REJECTIONS` that occurs before any event."""
    after_failure: Callable[[Attempt, float | None], Awaitable[float]] | None = None
    """Awaited after an attempt has failed, with the planned delay before the next one, or None if none follows. Returns
    the delay that is left to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits on calls of batch work, such as a budget or a rate."""

    admit: Callable[[Provider, Payload, int], Awaitable[None]]
    """Awaited before each attempt, with the size of its request in bytes. If it raises, nothing is sent."""
    settle: Callable[[CallEnd], Awaitable[None]]
    """Awaited after each admitted attempt whose end is durable."""
    after_failure: Callable[[Attempt, float | None], Awaitable[float]]
    """See `CallHooks`. A failed attempt that another one follows is settled before."""


class RetryingCall:
    """Gets one answer from a provider, with as many attempts as the policy allows."""

    def __init__(
        self,
        provider: Provider,
        payload: Payload,
        policy: RetryPolicy,
        *,
        estimate: TokenEstimate | None = None,
        hooks: CallHooks | None = None,
        first_number: int = 1,
        retries_after_events: bool = False,
    ) -> None:
        """`estimate` is adjusted by each successful call. `first_number`: of the first attempt. `retries_after_events`:
        for a caller that passes no events on, so an attempt that broke off can be followed by another one.
        """
        self._provider = provider
        self._payload = payload
        self._policy = policy
        self._estimate = estimate
        self._hooks = hooks or CallHooks()
        self._may_rebuild = self._hooks.rebuild is not None
        self._first_number = first_number
        self._retries_after_events = retries_after_events
        self._cancelled = asyncio.Event()
        self.attempts: list[Attempt] = []
        """All attempts that were admitted, in order."""
        self._waits = False
        """Between two attempts."""
        self._continued: list[Attempt] = []
        """The paused attempts that the present one continues."""
        self._usage_before = Usage()
        """Usage of the paused attempts."""
        self._is_paused = False
        """The last attempt was paused, and another one will continue it."""

    @property
    def next_number(self) -> int:
        """The number of the next attempt."""
        return self._first_number + len(self.attempts)

    @property
    def stream(self) -> ProviderStream:
        """The stream of the last attempt."""
        return self.attempts[-1].stream

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole: the last attempt succeeded and no other one will continue it."""
        return bool(self.attempts) and self.stream.state is StreamState.COMPLETE and not self._is_paused

    @property
    def bodies(self) -> list[bytes]:
        """The bytes of the answer: of the paused attempts in order, then of the last attempt."""
        if not self.attempts:
            return []
        record = self.stream.record
        earlier = [each.stream.record.body for each in self._continued if each is not self.attempts[-1]]
        return [*earlier, record.body if record.status == _OK else b""]

    @property
    def answer(self) -> ProviderAnswer:
        """The part of the answer that has arrived, over all attempts that belong to it."""
        if not self._continued:
            return self.stream.answer
        *earlier, last = self.bodies
        fold = self._provider.open_fold()
        fold_earlier(fold, earlier)
        fold_events(fold, last)
        return fold.answer

    @property
    def is_ending(self) -> bool:
        """Whether the last attempt has ended and no other one follows: the rest takes no time."""
        return bool(self.attempts) and not self._waits and self.stream.state in ENDED

    async def event_batches(self) -> AsyncGenerator[Sequence[ProviderEvent], None]:
        """The events of the last attempt, and of the paused ones that it continues, as they arrive. May be used once.

        Raises the last attempt's `ProviderFailed`, and what the callbacks raise.
        """
        budget = RetryBudget(self._policy)
        while not self._cancelled.is_set():
            attempt = await self._open_attempt()
            if attempt is None:
                return
            began = time.monotonic()
            held: list[ProviderEvent] = []
            given = False
            try:
                async with aclosing(attempt.stream.event_batches()) as batches:
                    async for batch in batches:
                        released = batch if given else _hold_usage(held, batch)
                        if released:
                            given = True
                            yield self._sum_usage(released)
            except ProviderFailed as error:
                attempt.failure = error
                given = given and not self._retries_after_events
                if await self._prepare_retry(attempt, budget, time.monotonic() - began, events_given=given):
                    continue
            if held:
                yield self._sum_usage(held)
            if attempt.failure is not None and not self._cancelled.is_set():
                raise attempt.failure
            self._learn(attempt)
            if not self._continue(attempt):
                return
            budget = RetryBudget(self._policy)

    async def cancel(self) -> None:
        """Ends the running attempt, or the wait for the next one; no other follows."""
        self._cancelled.set()
        if self.attempts:
            await self.stream.cancel()

    async def _open_attempt(self) -> Attempt | None:
        """The next attempt once it is admitted; None if the call was cancelled meanwhile."""
        attempt = Attempt(
            number=self.next_number,
            payload=self._payload,
            stream=self._provider.open_stream(self._payload),
        )
        if self._hooks.admit is not None:
            self._waits = True
            await self._hooks.admit(attempt)
            self._waits = False
            if self._cancelled.is_set():
                return None
        if self._hooks.on_sent is not None:
            attempt.stream.call_when_sent(self._hooks.on_sent)
        self.attempts.append(attempt)
        self._is_paused = False
        return attempt

    def _continue(self, attempt: Attempt) -> bool:
        """Makes the next attempt continue this one, if it was paused and the limit allows it."""
        if (
            not self._provider.continues_pauses
            or attempt.stream.state is not StreamState.COMPLETE
            or attempt.stream.answer.stop_reason is not StopReason.PAUSED
            or len(self._continued) >= self._policy.max_continuations
        ):
            return False
        self._continued.append(attempt)
        whole = self.answer
        if whole.native is None:
            # There is nothing to send back that the model could continue.
            self._continued.pop()
            return False
        self._usage_before = whole.usage
        numbers = [paused.number for paused in self._continued]
        container = None if whole.container is None else str(whole.container["id"])
        self._payload = continue_payload(self._payload, whole.native.data, numbers, container=container)
        self._is_paused = True
        _log.info(
            "provider.answer_continued",
            extra={
                "provider": self._provider.name,
                "model": self._payload.model,
                "attempt": attempt.number,
                "continuations": len(self._continued),
            },
        )
        return True

    def _sum_usage(self, batch: Sequence[ProviderEvent]) -> Sequence[ProviderEvent]:
        """Adds the usage of the paused attempts, so that the events state the usage of the whole answer so far."""
        if not self._continued:
            return batch
        return [
            replace(event, usage=add_usages([self._usage_before, event.usage]))
            if isinstance(event, UsageReported)
            else event
            for event in batch
        ]

    async def _prepare_retry(
        self, attempt: Attempt, budget: RetryBudget, call_seconds: float, *, events_given: bool
    ) -> bool:
        """Waits until the next attempt is due. False if none follows, or if the call is cancelled meanwhile."""
        failure = attempt.failure
        if failure is None:
            return False
        self._waits = True
        try:
            if not events_given and await self._change_payload(failure):
                if self._hooks.after_failure is not None:
                    await self._hooks.after_failure(attempt, 0.0)
                return True
            delay = budget.plan(
                failure,
                call_seconds=call_seconds,
                events_given=events_given,
                chance=random.random(),  # noqa: S311  reason: spreads retries, guards nothing
            )
            _log.warning(
                "provider.call_failed",
                extra={
                    "provider": self._provider.name,
                    "model": self._payload.model,
                    "attempt": attempt.number,
                    "code": failure.code,
                    "retry_in_seconds": delay,
                },
            )
            if self._hooks.after_failure is not None:
                left = await self._hooks.after_failure(attempt, delay)
                delay = None if delay is None else left
            if delay is None or self._cancelled.is_set():
                return False
            try:
                async with asyncio.timeout(delay):
                    await self._cancelled.wait()
            except TimeoutError:
                return True
            return False
        finally:
            self._waits = False

    async def _change_payload(self, failure: ProviderFailed) -> bool:
        """Whether another payload is sent at once, without the cache that is gone or the signatures that were rejected.

        A continuation is not changed, because it begins with the answer itself; the next turn leaves them out.
        """
        if isinstance(failure, CacheGone) and self._payload.cached_content is not None:
            _log.info("provider.cache_gone", extra={"provider": self._provider.name, "model": self._payload.model})
            self._payload = replace(self._payload, cached_content=None)
            return True
        if not isinstance(failure, REJECTIONS) or self._hooks.rebuild is None or not self._may_rebuild:
            return False
        self._may_rebuild = False
        payload = None if self._continued else await self._hooks.rebuild(failure)
        if payload is None:
            return False
        self._payload = payload
        return True

    def _learn(self, attempt: Attempt) -> None:
        """Adjusts the estimate, except after a call with an explicit cache, whose tokens are not in the request."""
        stream = attempt.stream
        if self._estimate is None or stream.state is not StreamState.COMPLETE or attempt.payload.cached_content:
            return
        self._estimate.learn(attempt.payload.model, len(stream.record.request_body), stream.answer.usage.input_tokens)


def _hold_usage(held: list[ProviderEvent], batch: Sequence[ProviderEvent]) -> Sequence[ProviderEvent]:
    """Returns the events that are passed on. Usage that is reported before any content is held until that arrives."""
    held += batch
    if all(isinstance(event, UsageReported) for event in held):
        return ()
    released = tuple(held)
    held.clear()
    return released
