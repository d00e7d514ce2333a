"""Every failure of a provider has its own error, keeps its bytes and the partial answer, and is not retried by the
provider.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from server.conversation.errors import (
    ContextTooLong,
    ProviderAuthentication,
    ProviderDisconnected,
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderMalformed,
    ProviderOverloaded,
    ProviderQuotaExceeded,
    ProviderRateLimited,
    ProviderRejected,
    ProviderTimedOut,
    ProviderUnavailable,
)
from server.conversation.payload import CallSettings
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.gemini.app import build_gemini_app
from server.emulator.reply import FaultKind, Reply
from server.emulator.server import emulating
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from server.providers.provider import Provider, ProviderAnswer, ProviderStream, StreamState
from server.providers.wire.transport import WireLimits
from tests.contracts.provider_harness import (
    BRIEF,
    WAIT_SECONDS,
    BuildProvider,
    ProviderHarness,
    build_payload,
    consume,
    open_harness,
)
from tests.recordings.catalogue import load
from tests.recordings.replay import Replay

MODELS = {"gemini": "gemini-3.8-flash", "anthropic": "claude-fable-5-2"}
BUILDERS: dict[str, BuildProvider] = {"gemini": GeminiProvider, "anthropic": AnthropicProvider}
SPEECH = Reply(thinking="Let me think about it.", text="Here is what I can say about all of it.")


@pytest.fixture(scope="module", params=["gemini", "anthropic"])
async def shared_harness(request: pytest.FixtureRequest) -> AsyncIterator[ProviderHarness]:
    vendor = request.param
    apps: dict[str, Any] = {"gemini": build_gemini_app, "anthropic": build_anthropic_app}
    async with open_harness(apps[vendor], BUILDERS[vendor], MODELS[vendor]) as harness:
        yield harness


@pytest.fixture
async def harness(shared_harness: ProviderHarness) -> ProviderHarness:
    await shared_harness.renew()
    return shared_harness


async def fail(stream: ProviderStream, expected: type[ProviderFailed]) -> ProviderFailed:
    """Consume the stream. Returns its error, which has exactly the expected type."""
    with pytest.raises(ProviderFailed) as caught:
        await asyncio.wait_for(consume(stream), WAIT_SECONDS)
    assert type(caught.value) is expected
    assert stream.state is StreamState.FAILED
    assert stream.record.ended_at is not None
    return caught.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: FaultKind
    error: type[ProviderFailed]
    status: int | dict[str, int] = 200
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{name}={value}" for name, value in self.options.items())])


BEFORE = [
    Case(kind=FaultKind.RATE_LIMITED, error=ProviderRateLimited, status=429, options={"retry_after_seconds": 7.5}),
    Case(kind=FaultKind.RATE_LIMITED_NO_DELAY, error=ProviderQuotaExceeded, status=429),
    Case(kind=FaultKind.INTERNAL, error=ProviderUnavailable, status=500),
    Case(kind=FaultKind.GATEWAY_TIMEOUT, error=ProviderTimedOut, status=504),
    Case(kind=FaultKind.BAD_AUTH, error=ProviderAuthentication, status=401),
    Case(kind=FaultKind.OVERLOADED, error=ProviderOverloaded, status={"gemini": 503, "anthropic": 529}),
]


@pytest.mark.parametrize("case", BEFORE, ids=str)
async def test_a_refusal_has_its_error_and_its_bytes(harness: ProviderHarness, case: Case) -> None:
    harness.inject_fault(case.kind, message="In the words of billing.", **case.options)
    stream = harness.provider.open_stream(harness.ask())
    error = await fail(stream, case.error)
    assert stream.record.status == (
        case.status[harness.provider.name] if isinstance(case.status, dict) else case.status
    )
    assert b"In the words of billing." in stream.record.body
    assert error.details["provider_message"] == "In the words of billing."
    assert error.details.get("retry_after_seconds") == case.options.get("retry_after_seconds")
    assert stream.answer == ProviderAnswer()
    assert len(harness.requests()) == 1


async def test_an_unavailable_service_may_become_available_again(harness: ProviderHarness) -> None:
    harness.inject_fault(FaultKind.UNAVAILABLE)
    expected = {"gemini": ProviderOverloaded, "anthropic": ProviderUnavailable}
    await fail(harness.provider.open_stream(harness.ask()), expected[harness.provider.name])
    assert len(harness.requests()) == 1


WITHIN = [
    Case(kind=kind, error=error, options={"after_chunks": after_chunks})
    for kind, error in [
        (FaultKind.CUT, ProviderDisconnected),
        (FaultKind.EARLY_END, ProviderEndedEarly),
        (FaultKind.MALFORMED_JSON, ProviderMalformed),
        (FaultKind.OVERLOADED_MID_STREAM, ProviderOverloaded),
        (FaultKind.ERROR_MID_STREAM, ProviderUnavailable),
        (FaultKind.SILENCE, ProviderTimedOut),
    ]
    for after_chunks in (1, 4, 9)
]


@pytest.mark.parametrize("case", WITHIN, ids=str)
async def test_a_failure_in_the_middle_keeps_what_had_arrived(harness: ProviderHarness, case: Case) -> None:
    harness.queue_replies(SPEECH)
    harness.inject_fault(case.kind, **case.options)
    provider = harness.another(limits=BRIEF if case.kind is FaultKind.SILENCE else None)
    stream = provider.open_stream(harness.ask("Tell me."))
    await fail(stream, case.error)
    assert stream.record.status == 200
    assert stream.record.body
    assert stream.answer.blocks
    assert stream.answer.stop_reason is None
    assert stream.answer == provider.fold_body(stream.record.body)
    assert len(harness.requests()) == 1


@pytest.mark.parametrize("kind", [FaultKind.EMPTY_STREAM, FaultKind.EMPTY_STOP])
async def test_an_answer_without_content_is_a_failure(harness: ProviderHarness, kind: FaultKind) -> None:
    harness.inject_fault(kind)
    stream = harness.provider.open_stream(harness.ask("Tell me."))
    await fail(stream, ProviderEmpty)
    assert stream.answer == harness.provider.fold_body(stream.record.body)
    assert len(harness.requests()) == 1


async def test_silence_before_the_answer_is_a_timeout(harness: ProviderHarness) -> None:
    harness.inject_fault(FaultKind.SILENCE)
    stream = harness.another(limits=BRIEF).open_stream(harness.ask())
    await fail(stream, ProviderTimedOut)
    visit = await harness.watch.next_visit()
    await asyncio.wait_for(visit.wait(), WAIT_SECONDS)
    assert (stream.record.status, stream.record.body) == (None, b"")
    assert len(harness.requests()) == 1


async def test_a_request_that_breaks_a_rule_is_refused_with_the_message_of_the_provider(
    harness: ProviderHarness,
) -> None:
    stream = harness.provider.open_stream(harness.ask(settings=CallSettings(extra={"no_such_field": 1})))
    error = await fail(stream, ProviderRejected)
    assert "no_such_field" in str(error.details["provider_message"])
    assert "no_such_field" in error.message
    assert stream.record.status == 400


async def test_a_bad_key_is_refused(harness: ProviderHarness) -> None:
    await fail(harness.another("invalid").open_stream(harness.ask()), ProviderAuthentication)


@pytest.mark.parametrize("vendor", ["gemini", "anthropic"])
async def test_a_request_that_is_too_long_has_its_own_error(vendor: str) -> None:
    bodies = {
        "gemini": b'{"error":{"code":400,"message":"The input token count (1048577) exceeds the maximum number of'
        b' tokens allowed (1048576).","status":"INVALID_ARGUMENT"}}',
        "anthropic": b'{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 1000001'
        b' tokens > 1000000 maximum"}}',
    }
    await expect_refusal(vendor, 400, bodies[vendor], ContextTooLong)


async def expect_refusal(vendor: str, status: int, body: bytes, error: type[ProviderFailed]) -> ProviderFailed:
    app = Replay(status=status, pieces=[body], content_type="application/json" if body[:1] in b"{[" else "text/html")
    async with emulating(app) as url:
        provider = BUILDERS[vendor]("key", base_url=url)
        stream = provider.open_stream(build_payload(MODELS[vendor], [provider.user_message([], {})]))
        caught = await fail(stream, error)
        assert stream.record.body == body
        assert len(app.requests) == 1
        await provider.close()
    return caught


@pytest.mark.parametrize("vendor", ["gemini", "anthropic"])
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, ProviderAuthentication),
        (403, ProviderAuthentication),
        (404, ProviderRejected),
        (413, ContextTooLong),
        (429, ProviderRateLimited),
        (500, ProviderUnavailable),
        (502, ProviderUnavailable),
        (504, ProviderTimedOut),
    ],
)
async def test_an_error_page_of_a_gateway_has_the_error_of_its_status(
    vendor: str, status: int, error: type[ProviderFailed]
) -> None:
    await expect_refusal(vendor, status, b"<html><h1>No</h1></html>", error)


async def test_a_key_that_gemini_calls_an_invalid_argument_is_an_invalid_key() -> None:
    body = (
        b'{"error":{"code":400,"message":"API key not valid. Please pass a valid API key.","status":"INVALID_ARGUMENT",'
        b'"details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"API_KEY_INVALID"}]}}'
    )
    await expect_refusal("gemini", 400, body, ProviderAuthentication)


@pytest.mark.parametrize("vendor", ["gemini", "anthropic"])
async def test_a_host_without_a_listener_is_unavailable(vendor: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        provider: Provider = BUILDERS[vendor]("key", base_url=url, limits=WireLimits(connect_seconds=1))
        stream = provider.open_stream(build_payload(MODELS[vendor], [provider.user_message([], {})]))
        await fail(stream, ProviderUnavailable)
        assert (stream.record.status, stream.record.body) == (None, b"")
        await provider.close()


@pytest.mark.parametrize("vendor", ["gemini", "anthropic"])
async def test_a_connection_that_breaks_before_the_answer_is_a_cut(vendor: str) -> None:
    async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(slam, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        provider = BUILDERS[vendor]("key", base_url=f"http://127.0.0.1:{port}")
        stream = provider.open_stream(build_payload(MODELS[vendor], [provider.user_message([], {})]))
        await fail(stream, ProviderDisconnected)
        await provider.close()


@pytest.mark.parametrize("vendor", ["gemini", "anthropic"])
async def test_an_answer_in_single_bytes_is_the_same_answer(vendor: str) -> None:
    body = load(vendor, "parallel_calls")
    async with emulating(Replay(pieces=[body[at : at + 1] for at in range(len(body))])) as url:
        provider = BUILDERS[vendor]("key", base_url=url)
        stream = provider.open_stream(build_payload(MODELS[vendor], [provider.user_message([], {})]))
        await consume(stream)
        assert stream.record.body == body
        assert stream.answer == provider.fold_body(body)
        await provider.close()
