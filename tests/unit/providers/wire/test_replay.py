"""Stored bytes give the same answer through the real SDKs as the network did."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from server.conversation.block import TextBlock
from server.conversation.errors import ProviderFailed, ProviderOverloaded, ProviderUnavailable
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from server.providers.provider import Provider, StreamState
from server.providers.wire.replay import ReplayingTransport, StoredAnswer

MODELS = {"gemini": "gemini-3.1-pro-preview", "anthropic": "claude-opus-5-5"}
RECORDINGS = {
    (path.parent.name, path.stem): path.read_bytes()
    for path in sorted((Path(__file__).parents[3] / "recordings").glob("*/*.sse"))
}


def build(vendor: str, transport: ReplayingTransport) -> Provider:
    return (GeminiProvider if vendor == "gemini" else AnthropicProvider)("k", transport=transport)


def payload(provider: Provider) -> Payload:
    data = provider.user_message([TextBlock(text="Hello")], {})
    message = PayloadMessage(layer=Layer.TRIGGER, data=data)
    return Payload(model=MODELS[provider.name], static_text="", tools=(), messages=(message,))


@pytest.mark.parametrize("recording", RECORDINGS, ids="-".join)
@pytest.mark.parametrize("size", [7, 10**6], ids=["in crumbs", "at once"])
async def test_stored_bytes_give_the_same_answer_through_the_sdk(recording: tuple[str, str], size: int) -> None:
    body = RECORDINGS[recording]
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    provider = build(recording[0], ReplayingTransport([StoredAnswer(status=200, pieces=pieces)]))
    stream = provider.open_stream(payload(provider))
    with suppress(ProviderFailed):
        _ = [event async for event in stream.events()]
    await provider.close()
    assert stream.state in {StreamState.COMPLETE, StreamState.FAILED}
    assert stream.answer == provider.fold_body(body)
    # A failed stream is not read any further.
    assert body.startswith(stream.record.body)


async def test_a_model_that_is_not_listed_is_recorded_as_assumed() -> None:
    provider = build("gemini", ReplayingTransport([]))
    listed = provider.open_stream(payload(provider))
    assumed = provider.open_stream(replace(payload(provider), model="gemini-9-xenon"))
    assert listed.warnings == ()
    assert assumed.warnings == ({"kind": "profile_assumed", "model": "gemini-9-xenon", "family": "gemini-3"},)
    await provider.close()


@pytest.mark.parametrize("vendor", MODELS)
async def test_a_request_without_a_stored_answer_is_unreachable(vendor: str) -> None:
    provider = build(vendor, ReplayingTransport([]))
    with pytest.raises(ProviderUnavailable):
        _ = [event async for event in provider.open_stream(payload(provider)).events()]
    await provider.close()


async def test_a_stored_error_gives_the_same_error() -> None:
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    transport = ReplayingTransport([StoredAnswer(status=529, pieces=(body,))])
    provider = build("anthropic", transport)
    stream = provider.open_stream(payload(provider))
    with pytest.raises(ProviderOverloaded):
        _ = [event async for event in stream.events()]
    assert (stream.state, stream.record.body, stream.record.status) == (StreamState.FAILED, body, 529)
    assert b'"Hello"' in transport.requests[0]
    await provider.close()
