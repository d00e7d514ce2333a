"""A missing cache does not use up the retry budget. All other rules of calls are tested with real streams."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.conversation.errors import CacheGone, ProviderFailed, ProviderOverloaded
from server.conversation.event import ProviderEvent, TextDelta
from server.conversation.payload import Payload
from server.providers.calls import RetryingCall
from server.providers.provider import Provider, StreamState
from server.providers.retry_policy import RetryPolicy
from tests.contracts.provider_harness import build_payload

GONE, BUSY = CacheGone(), ProviderOverloaded(retry_after_seconds=0)


@dataclass(slots=True)
class FailingProvider:
    """Fails as configured, then answers."""

    failures: list[ProviderFailed]
    name: str = "gemini"
    continues_pauses: bool = False
    asked: list[str | None] = field(default_factory=list)

    def open_stream(self, payload: Payload) -> Any:
        self.asked.append(payload.cached_content)
        failure = self.failures.pop(0) if self.failures else None

        async def event_batches() -> AsyncIterator[list[ProviderEvent]]:
            if failure is not None:
                raise failure
            yield [TextDelta(text="Yes.")]

        return SimpleNamespace(event_batches=event_batches, state=StreamState.COMPLETE)


@pytest.mark.parametrize(
    ("failures", "attempts", "cached"),
    [
        ([GONE], 1, [True, False]),
        ([GONE, BUSY], 2, [True, False, False]),
        ([BUSY, GONE, BUSY], 3, [True, True, False, False]),
    ],
)
async def test_a_missing_cache_is_not_an_attempt(
    failures: list[ProviderFailed], attempts: int, cached: list[bool]
) -> None:
    provider = FailingProvider(failures=list(failures))
    payload = build_payload("m", [b"{}"], cached_content="cachedContents/1")
    call = RetryingCall(cast(Provider, provider), payload, RetryPolicy(attempts=attempts))
    assert len([batch async for batch in call.event_batches()]) == 1
    assert [name is not None for name in provider.asked] == cached
    assert [attempt.failure for attempt in call.attempts] == [*failures, None]


async def test_the_retry_budget_still_ends() -> None:
    provider = FailingProvider(failures=[GONE, BUSY, BUSY])
    payload = build_payload("m", [b"{}"], cached_content="cachedContents/1")
    call = RetryingCall(cast(Provider, provider), payload, RetryPolicy(attempts=2))
    with pytest.raises(ProviderOverloaded):
        _ = [batch async for batch in call.event_batches()]
    assert len(provider.asked) == 3
