"""Calling a provider with patience: one answer, from as many calls as the policy allows.

Each attempt is a stream of its own, and what became of it is kept: the bytes of a failed one are worth as much to an
operator as those of the one that succeeded.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from server.errors import ProviderFailed
from server.event import ProviderEvent
from server.payload import Payload
from server.provider import Provider, ProviderStream, StreamState
from server.retry_policy import RetryPolicy, plan_retry
from server.token_estimate import TokenEstimate

_log = logging.getLogger("strata.provider")


class PatientCall:
    """One turn's way to its answer."""

    def __init__(
        self, provider: Provider, payload: Payload, policy: RetryPolicy, *, estimate: TokenEstimate | None = None
    ) -> None:
        """`estimate` learns from the call that gets through."""
        self._provider = provider
        self._payload = payload
        self._policy = policy
        self._estimate = estimate
        self._cancelled = False
        self.attempts: list[ProviderStream] = []
        """All of them, the last one last. Empty until `events` is used."""

    @property
    def stream(self) -> ProviderStream:
        """The attempt that counts."""
        return self.attempts[-1]

    async def events(self) -> AsyncGenerator[ProviderEvent, None]:
        """The events of the attempt that got through. May be used once. Raises the last attempt's `ProviderFailed`."""
        began = time.monotonic()
        while not self._cancelled:
            stream = self._provider.open_stream(self._payload)
            self.attempts.append(stream)
            given = False
            try:
                async with aclosing(stream.events()) as events:
                    async for event in events:
                        given = True
                        yield event
            except ProviderFailed as error:
                delay = self._plan(error, elapsed_seconds=time.monotonic() - began, events_given=given)
                if delay is None:
                    raise
                await asyncio.sleep(delay)
            else:
                self._learn(stream)
                return

    async def cancel(self) -> None:
        """Ends the running attempt now; no other follows."""
        self._cancelled = True
        if self.attempts:
            await self.stream.cancel()

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
            attempt=len(self.attempts),
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
        return None if self._cancelled else delay
