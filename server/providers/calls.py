"""Calling a provider with patience: one answer, from as many calls as the policy allows.

Each attempt is a stream of its own, and what became of it is kept: the bytes of a failed one are worth as much to an
operator as those of the one that succeeded.

Only what is given out cannot be taken back. So the usage that providers report before they say anything is held until
something is said, and a failure before that can still be made good by another attempt.

An answer that the provider pauses is continued by a further attempt, which begins where the paused one ended: their
events are one sequence, and what they say is one answer. See `server.providers.continuation`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeAlias

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
from server.providers.retry_policy import RetryPolicy, plan_retry
from server.providers.token_estimate import TokenEstimate

Rebuild: TypeAlias = Callable[[ProviderFailed], Awaitable[Payload | None]]
"""The payload without what the provider has rejected; None if nothing can be left out."""
REJECTIONS: Final = (AnswerRejected, SummaryRejected, PrefixMismatch, SignatureRejected)
"""The provider rejects what it has signed itself: the same request fails every time."""
_AT_ONCE: Final = (CacheGone, *REJECTIONS)
"""What is followed by another request at once, which is no retry of the same."""
_OK: Final = 200
_log = logging.getLogger("strata.provider")


class RetryingCall:
    """One turn's way to its answer."""

    def __init__(
        self,
        provider: Provider,
        payload: Payload,
        policy: RetryPolicy,
        *,
        estimate: TokenEstimate | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        """`estimate` learns from the call that gets through. `rebuild` is used once, for the first of `REJECTIONS`
        that comes before any event.
        """
        self._provider = provider
        self._payload = payload
        self._policy = policy
        self._estimate = estimate
        self._rebuild = rebuild
        self._cancelled = asyncio.Event()
        self.attempts: list[ProviderStream] = []
        """All of them, the last one last. Empty until `events` is used."""
        self.payloads: list[Payload] = []
        """What each of them was sent with."""
        self.failures: list[ProviderFailed | None] = []
        """How they failed, in the same order: all but the last one, and the last one where it failed too. None for one
        that was paused, and that another one continues."""
        self.on_sent: Callable[[], None] | None = None
        """Called when the request of an attempt goes out."""
        self._pauses = False
        self._continued: list[ProviderStream] = []
        """The paused attempts that the present one continues."""
        self._usage_before = Usage()
        """Of those."""
        self._is_paused = False
        """The last attempt was paused, and another one is to continue it."""

    @property
    def stream(self) -> ProviderStream:
        """The attempt that counts."""
        return self.attempts[-1]

    @property
    def failure_codes(self) -> list[str | None]:
        """The codes of `failures`."""
        return [None if failure is None else failure.code for failure in self.failures]

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole: the last attempt got through and no other one is to continue it."""
        return bool(self.attempts) and self.stream.state is StreamState.COMPLETE and not self._is_paused

    @property
    def bodies(self) -> list[bytes]:
        """The bytes that the answer is made of: those of the paused attempts in order, then of the one that counts."""
        if not self.attempts:
            return []
        record = self.stream.record
        earlier = [stream.record.body for stream in self._continued if stream is not self.stream]
        return [*earlier, record.body if record.status == _OK else b""]

    @property
    def answer(self) -> ProviderAnswer:
        """What has arrived of the whole answer, over all attempts that it took."""
        if not self._continued:
            return self.stream.answer
        *earlier, last = self.bodies
        fold = self._provider.open_fold()
        fold_earlier(fold, earlier)
        fold_events(fold, last)
        return fold.answer

    @property
    def is_ending(self) -> bool:
        """Whether the last attempt has ended and no other one is waited for: what is left takes no time."""
        return bool(self.attempts) and not self._pauses and self.stream.state in ENDED

    async def events(self) -> AsyncGenerator[ProviderEvent, None]:
        """The events of the attempt that counts: all that its bytes say, whether it got through or not.

        May be used once. Raises the last attempt's `ProviderFailed`.
        """
        began = time.monotonic()
        while not self._cancelled.is_set():
            stream = self._provider.open_stream(self._payload)
            self.payloads.append(self._payload)
            self.attempts.append(stream)
            self._is_paused = False
            if self.on_sent is not None:
                stream.call_when_sent(self.on_sent)
            held: list[ProviderEvent] = []
            given = False
            failure: ProviderFailed | None = None
            try:
                async with aclosing(_hold_usage(stream, held)) as events:
                    async for event in events:
                        given = True
                        yield self._sum_usage(event)
            except ProviderFailed as error:
                failure = error
            if failure is not None and await self._may_try_again(failure, began, events_given=given):
                continue
            for event in held:
                yield self._sum_usage(event)
            if failure is not None and not self._cancelled.is_set():
                raise failure
            self._learn(stream)
            if not self._continue(stream):
                return
            began = time.monotonic()

    async def cancel(self) -> None:
        """Ends the running attempt now, or the wait for the next; no other follows."""
        self._cancelled.set()
        if self.attempts:
            await self.stream.cancel()

    def _continue(self, stream: ProviderStream) -> bool:
        """Makes the next attempt continue this one, if it was paused and the limit allows it."""
        if (
            not self._provider.continues_pauses
            or stream.state is not StreamState.COMPLETE
            or stream.answer.stop_reason is not StopReason.PAUSED
            or len(self._continued) >= self._policy.max_continuations
        ):
            return False
        self._continued.append(stream)
        whole = self.answer
        if whole.native is None:
            # Nothing that could be sent back for it to go on from.
            self._continued.pop()
            return False
        self.failures.append(None)
        self._usage_before = whole.usage
        attempts = [self.attempts.index(paused) + 1 for paused in self._continued]
        container = None if whole.container is None else str(whole.container["id"])
        self._payload = continue_payload(self._payload, whole.native.data, attempts, container=container)
        self._is_paused = True
        _log.info(
            "provider.answer_continued",
            extra={
                "provider": self._provider.name,
                "model": self._payload.model,
                "attempt": len(self.attempts),
                "continuations": len(self._continued),
            },
        )
        return True

    def _sum_usage(self, event: ProviderEvent) -> ProviderEvent:
        """Usage of the whole answer so far, as a fold over the bytes of all its attempts tells it."""
        if not self._continued or not isinstance(event, UsageReported):
            return event
        return replace(event, usage=add_usages([self._usage_before, event.usage]))

    async def _may_try_again(self, failure: ProviderFailed, began: float, *, events_given: bool) -> bool:
        """Waits as long as the policy says; False where it says no, or where somebody cancels meanwhile."""
        self.failures.append(failure)
        if isinstance(failure, CacheGone) and self._payload.cached_content is not None and not events_given:
            # Not a failure of the provider's: the same is said again in full, at once.
            _log.info("provider.cache_gone", extra={"provider": self._provider.name, "model": self._payload.model})
            self._payload = replace(self._payload, cached_content=None)
            return True
        if isinstance(failure, REJECTIONS) and not events_given and await self._leave_out(failure):
            return True
        delay = self._plan(failure, elapsed_seconds=time.monotonic() - began, events_given=events_given)
        if delay is None:
            return False
        self._pauses = True
        try:
            async with asyncio.timeout(delay):
                await self._cancelled.wait()
        except TimeoutError:
            return True
        finally:
            self._pauses = False
        return False

    async def _leave_out(self, failure: ProviderFailed) -> bool:
        """Whether there is a payload without what was rejected. Asked for once.

        Not for a continuation, which begins with what the model has just said: the next turn does without it.
        """
        rebuild, self._rebuild = self._rebuild, None
        if rebuild is None or self._continued:
            return False
        self._pauses = True
        try:
            payload = await rebuild(failure)
        finally:
            self._pauses = False
        if payload is None:
            return False
        self._payload = payload
        return True

    def _failures_in_a_row(self) -> list[ProviderFailed]:
        """Since the first attempt, or since the last one that was paused."""
        newest: list[ProviderFailed] = []
        for failure in self.failures:
            newest = [] if failure is None else [*newest, failure]
        return newest

    def _learn(self, stream: ProviderStream) -> None:
        """Not from a call that names an explicit cache: most of its tokens are not in its bytes."""
        if self._estimate is None or stream.state is not StreamState.COMPLETE or self._payload.cached_content:
            return
        size = len(stream.record.request_body)
        self._estimate.learn(self._payload.model, size, stream.answer.usage.input_tokens)

    def _plan(self, error: ProviderFailed, *, elapsed_seconds: float, events_given: bool) -> float | None:
        delay = plan_retry(
            self._policy,
            error,
            # One that only found its cache gone, or a signature rejected, is no try of the provider's patience.
            attempt=1 + sum(not isinstance(failure, _AT_ONCE) for failure in self._failures_in_a_row()[:-1]),
            elapsed_seconds=elapsed_seconds,
            events_given=events_given,
            chance=random.random(),  # noqa: S311  reason: spreads retries, guards nothing
        )
        _log.warning(
            "provider.call_failed",
            extra={
                "provider": self._provider.name,
                "model": self._payload.model,
                "attempt": len(self.attempts),
                "code": error.code,
                "retry_in_seconds": delay,
            },
        )
        return None if self._cancelled.is_set() else delay


async def _hold_usage(stream: ProviderStream, held: list[ProviderEvent]) -> AsyncGenerator[ProviderEvent, None]:
    """The events of a stream; usage from before anything is said waits in `held`, and stays there if nothing is."""
    said = False
    async with aclosing(stream.events()) as events:
        async for event in events:
            if not said and isinstance(event, UsageReported):
                held.append(event)
                continue
            said = True
            while held:
                yield held.pop(0)
            yield event
