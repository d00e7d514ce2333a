"""Admission of the calls of a replay's item: budget, rate, and the providers' own limits.

A call is sent only if its replay runs, the budget suffices, and neither the replay's rate nor a limit of the provider
delays it. The estimate of the call is reserved before it is sent, and replaced by its cost when it has ended.
"""

import asyncio
from functools import partial
from typing import Final
from uuid import UUID, uuid4

from server.conversation.call import Call, CallEnd
from server.conversation.errors import ProviderOverloaded, ProviderRateLimited
from server.conversation.manifest import build_manifest, encode_manifest
from server.conversation.outages import retry_while_unavailable
from server.conversation.payload import Payload
from server.conversation.shutdown import Shutdown
from server.providers.calls import Admission, Attempt
from server.providers.provider import Provider
from server.providers.token_estimate import TokenEstimate
from server.replay.rerun.budget import count_tokens, estimate_call, estimate_input_tokens, estimate_output_tokens
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import CallSpending, Granted, ItemLease, Stopped, Wait

_MAX_WAIT_SECONDS: Final = 5.0
"""The maximum delay until a pause or a cancellation takes effect."""


class ItemHalted(Exception):
    """The item has to be continued later: its replay is not running any more, this process shuts down, or another
    process has written to the replay conversation.
    """


class ItemAdmission:
    """Admits the calls of one item, one call at a time."""

    def __init__(self, replays: Replays, lease: ItemLease, *, estimate: TokenEstimate, shutdown: Shutdown) -> None:
        self._replays = replays
        self._lease = lease
        self._estimate = estimate
        self._shutdown = shutdown
        self._reservation: UUID | None = None
        """Of the call that was admitted last and is not settled."""
        self._provider_name = ""
        """The provider of that call."""

    def limits(self, recorded: Call | None = None) -> Admission:
        """Return the limits as callables. `recorded`: the recorded call that the admitted calls repeat, if any."""
        return Admission(
            admit=partial(self._admit, recorded), settle=self.settle, after_failure=self._pause_after_failure
        )

    async def settle(self, end: CallEnd) -> None:
        """Replace the reservation of the last call with its cost. Does nothing if no call is reserved.

        A reservation that is not settled counts by its estimate. Raises `LeaseLost`, `DatabaseUnavailable`.
        """
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        spending = CallSpending(usd=end.cost_usd, tokens=count_tokens(end.usage))
        await retry_while_unavailable(lambda: self._replays.settle_call(self._lease, reservation, spending))

    async def _admit(self, recorded: Call | None, provider: Provider, payload: Payload, size_bytes: int) -> None:
        """Wait until the call may be sent. Raises `ItemHalted`, `LeaseLost`, `PriceUnknown`."""
        input_tokens = estimate_input_tokens(encode_manifest(build_manifest(payload)), recorded)
        usage = None if recorded is None or recorded.end is None else recorded.end.usage
        estimate = estimate_call(
            provider.name,
            payload.model,
            self._estimate.estimate(payload.model, size_bytes) if input_tokens is None else input_tokens,
            estimate_output_tokens(payload.settings.max_output_tokens, usage),
        )
        reservation = uuid4()
        while True:
            await self._wait(0.0)
            permission = await self._replays.reserve_call(
                self._lease, reservation, provider=provider.name, estimate=estimate
            )
            match permission:
                case Granted():
                    self._reservation, self._provider_name = reservation, provider.name
                    return
                case Wait(seconds=seconds):
                    await self._wait(min(max(seconds, 0.0), _MAX_WAIT_SECONDS))
                case Stopped():
                    raise ItemHalted

    async def _pause_after_failure(self, attempt: Attempt, delay: float | None) -> float:
        """Wait before the next attempt. A rate limit pauses the calls of all replays to the provider.

        A rate limit causes no other delay, because the next attempt is not admitted before the pause has ended. Raises
        `ItemHalted`.
        """
        failure = attempt.failure
        is_limited = isinstance(failure, ProviderRateLimited)
        if failure is not None and isinstance(failure, ProviderRateLimited | ProviderOverloaded):
            asked = failure.details.get("retry_after_seconds")
            pause = asked if isinstance(asked, int | float) else delay if is_limited else None
            if pause is not None:
                await self._replays.pause_provider(self._provider_name, float(pause))
        if delay is not None and not is_limited:
            await self._wait(delay)
        return 0.0

    async def _wait(self, seconds: float) -> None:
        """Wait for this time. Raises `ItemHalted` if a shutdown is requested meanwhile."""
        if not self._shutdown.requested.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._shutdown.requested.wait()
            except TimeoutError:
                return
        raise ItemHalted
