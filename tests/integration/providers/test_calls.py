"""Retries of failing calls: transient failures are retried, and nothing that a client has received is repeated."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx2
import pytest

from server.conversation.block import TextBlock
from server.conversation.errors import (
    ProviderDisconnected,
    ProviderOverloaded,
    ProviderQuotaExceeded,
    ProviderRateLimited,
)
from server.conversation.event import ProviderEvent, TextDelta, UsageReported
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.conversation.turn import StopReason
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.server import emulating
from server.emulator.state import build_state
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.calls import RetryingCall
from server.providers.provider import StreamState
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from tests.contracts.provider_harness import WAIT_SECONDS

QUICK = RetryPolicy(first_delay_seconds=0.001, longest_delay_seconds=0.002)


@pytest.fixture
async def emulator() -> AsyncIterator[str]:
    async with emulating(build_anthropic_app(build_state())) as url:
        yield url


@pytest.fixture
async def provider(emulator: str) -> AsyncIterator[AnthropicProvider]:
    provider = AnthropicProvider("k", base_url=emulator)
    yield provider
    await provider.close()


def payload(provider: AnthropicProvider) -> Payload:
    message = PayloadMessage(layer=Layer.TRIGGER, data=provider.user_message([TextBlock(text="Tell me a story")], {}))
    return Payload(model="claude-opus-5-5", static_text="You help.", tools=(), messages=(message,))


async def arm(url: str, **fault: object) -> None:
    async with httpx2.AsyncClient() as client:
        assert (await client.post(f"{url}/__faults", json=fault)).status_code < 300


async def test_a_transient_failure_is_hidden_but_recorded(emulator: str, provider: AnthropicProvider) -> None:
    await arm(emulator, kind="overloaded", times=2)
    call = RetryingCall(provider, payload(provider), QUICK)
    events = [event async for batch in call.event_batches() for event in batch]
    assert any(isinstance(event, TextDelta) for event in events)
    assert [attempt.stream.state for attempt in call.attempts] == [
        StreamState.FAILED,
        StreamState.FAILED,
        StreamState.COMPLETE,
    ]
    assert [attempt.stream.record.status for attempt in call.attempts] == [529, 529, 200]
    assert b"overloaded_error" in call.attempts[0].stream.record.body
    assert call.stream.answer.stop_reason is StopReason.END_TURN


async def test_a_successful_call_updates_the_estimate(provider: AnthropicProvider) -> None:
    estimate = TokenEstimate()
    asked = replace(payload(provider), static_text="You are a careful assistant. " * 200)
    before = estimate.estimate(asked.model, 10_000)
    for _ in range(3):
        call = RetryingCall(provider, asked, QUICK, estimate=estimate)
        _ = [event async for batch in call.event_batches() for event in batch]
    size, reported = len(call.stream.record.request_body), call.stream.answer.usage.input_tokens
    assert reported > 100
    assert estimate.estimate(asked.model, 10_000) != before
    assert abs(estimate.estimate(asked.model, size) - reported) <= max(2, reported * 0.02)


async def test_a_failed_call_does_not_update_the_estimate(emulator: str, provider: AnthropicProvider) -> None:
    estimate = TokenEstimate()
    await arm(emulator, kind="rate_limited_no_delay", times=1)
    asked = replace(payload(provider), static_text="You are a careful assistant. " * 200)
    with pytest.raises(ProviderQuotaExceeded):
        _ = [batch async for batch in RetryingCall(provider, asked, QUICK, estimate=estimate).event_batches()]
    assert estimate.estimate(asked.model, 10_000) == TokenEstimate().estimate(asked.model, 10_000)


async def test_retries_end(emulator: str, provider: AnthropicProvider) -> None:
    await arm(emulator, kind="overloaded", times=10)
    call = RetryingCall(provider, payload(provider), QUICK)
    with pytest.raises(ProviderOverloaded):
        _ = [event async for batch in call.event_batches() for event in batch]
    assert len(call.attempts) == QUICK.attempts


async def test_nothing_received_is_repeated(emulator: str, provider: AnthropicProvider) -> None:
    await arm(emulator, kind="cut", times=1, after_chunks=4)
    call = RetryingCall(provider, payload(provider), QUICK)
    with pytest.raises(ProviderDisconnected):
        _ = [event async for batch in call.event_batches() for event in batch]
    assert call.stream.answer.blocks
    assert len(call.attempts) == 1


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"kind": "rate_limited", "retry_after_seconds": 3600}, ProviderRateLimited),
        ({"kind": "rate_limited_no_delay"}, ProviderQuotaExceeded),
    ],
    ids=["in an hour", "never"],
)
async def test_a_permanent_failure_is_reported_at_once(
    emulator: str, provider: AnthropicProvider, fault: dict[str, object], error: type[Exception]
) -> None:
    await arm(emulator, times=1, **fault)
    call = RetryingCall(provider, payload(provider), QUICK)
    with pytest.raises(error):
        _ = [event async for batch in call.event_batches() for event in batch]
    assert len(call.attempts) == 1


@pytest.mark.parametrize("kind", ["overloaded_mid_stream", "cut", "early_end"])
async def test_a_failure_after_usage_alone_is_hidden(emulator: str, provider: AnthropicProvider, kind: str) -> None:
    await arm(emulator, kind=kind, times=1, after_chunks=0)
    call = RetryingCall(provider, payload(provider), QUICK)
    events = [event async for batch in call.event_batches() for event in batch]
    assert [attempt.stream.state for attempt in call.attempts] == [StreamState.FAILED, StreamState.COMPLETE]
    assert events == events_in(provider, call)
    assert isinstance(events[0], UsageReported)


async def test_the_usage_of_a_permanently_failed_attempt_is_reported(
    emulator: str, provider: AnthropicProvider
) -> None:
    await arm(emulator, kind="overloaded_mid_stream", times=QUICK.attempts, after_chunks=0)
    call = RetryingCall(provider, payload(provider), QUICK)
    received: list[ProviderEvent] = []
    with pytest.raises(ProviderOverloaded):
        await listen(call, received)
    assert len(received) == 1
    assert isinstance(received[0], UsageReported)
    assert len(call.attempts) == QUICK.attempts
    assert [attempt.failure_code for attempt in call.attempts] == ["provider_overloaded"] * QUICK.attempts


async def test_the_failure_of_each_attempt_is_recorded(emulator: str, provider: AnthropicProvider) -> None:
    await arm(emulator, kind="overloaded", times=1)
    await arm(emulator, kind="cut", times=1, after_chunks=0)
    call = RetryingCall(provider, payload(provider), QUICK)
    _ = [event async for batch in call.event_batches() for event in batch]
    assert [attempt.failure_code for attempt in call.attempts] == ["provider_overloaded", "provider_disconnected", None]


async def test_cancel_does_not_wait_for_the_next_attempt(emulator: str, provider: AnthropicProvider) -> None:
    slow = RetryPolicy(first_delay_seconds=3600, longest_delay_seconds=3600, budget_seconds=10**6)
    await arm(emulator, kind="overloaded", times=1)
    call = RetryingCall(provider, payload(provider), slow)
    received: list[ProviderEvent] = []
    listening = asyncio.create_task(listen(call, received))
    async with asyncio.timeout(WAIT_SECONDS):
        while not call.attempts or call.attempts[0].failure is None:  # noqa: ASYNC110  reason: the call has no event for it, and needs none
            await asyncio.sleep(0)
        await call.cancel()
        await listening
    assert received == []
    assert [attempt.stream.state for attempt in call.attempts] == [StreamState.FAILED]


async def listen(call: RetryingCall, received: list[ProviderEvent]) -> None:
    """Record the received events, also if the call fails."""
    async for batch in call.event_batches():
        received.extend(batch)


def events_in(provider: AnthropicProvider, call: RetryingCall) -> list[ProviderEvent]:
    """The answer in the bytes of the attempt that counts."""
    return list(provider.open_fold().feed(call.stream.record.body))


async def test_a_cancelled_call_is_not_retried(emulator: str, provider: AnthropicProvider) -> None:
    call = RetryingCall(provider, payload(provider), QUICK)
    async for _ in call.event_batches():
        await call.cancel()
    assert [attempt.stream.state for attempt in call.attempts] == [StreamState.CANCELLED]
    assert emulator
