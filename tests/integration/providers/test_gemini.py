"""Gemini passes the contract of the port, and its requests are those of its SDK."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from google import genai
from google.genai import types

from server.conversation.block import TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import CacheGone, ProviderFailed, SignatureRejected, ValidationFailed
from server.conversation.payload import CallSettings, split_static
from server.conversation.turn import StopReason
from server.emulator.gemini.app import build_gemini_app
from server.providers.gemini.provider import GeminiProvider
from server.providers.provider import Provider, ProviderStream, StreamState
from tests.contracts.provider_contract import ProviderContract, send_recorded
from tests.contracts.provider_harness import (
    TOOLS,
    ProviderHarness,
    answer_calls,
    comparable,
    complete,
    consume,
    native_of,
    open_harness,
)
from tests.recordings.catalogue import RECORDINGS, Recorded

MODEL = "gemini-3.8-flash"


@pytest.fixture(scope="module")
async def shared_harness() -> AsyncIterator[ProviderHarness]:
    async with open_harness(build_gemini_app, GeminiProvider, MODEL) as harness:
        yield harness


@pytest.fixture
async def harness(shared_harness: ProviderHarness) -> ProviderHarness:
    await shared_harness.renew()
    return shared_harness


async def test_the_provider_implements_the_port() -> None:
    provider: Provider = GeminiProvider("key")
    assert provider.name == "gemini"
    assert "key" not in provider.account
    assert provider.account != GeminiProvider("another").account
    await provider.close()


class TestGeminiProvider(ProviderContract):
    """See the contract."""

    refused_without = SignatureRejected
    refused_swapped = SignatureRejected
    refused_merged = SignatureRejected

    @staticmethod
    def drop_signature(message: dict[str, Any]) -> None:
        del signed_part(message)["thoughtSignature"]

    @staticmethod
    def swap_signatures(one: dict[str, Any], other: dict[str, Any]) -> None:
        first, second = signed_part(one), signed_part(other)
        first["thoughtSignature"], second["thoughtSignature"] = second["thoughtSignature"], first["thoughtSignature"]

    @staticmethod
    def merge_texts(message: dict[str, Any]) -> None:
        *before, text, signed = message["parts"]
        message["parts"] = [*before, {**signed, "text": text["text"] + signed["text"]}]

    @staticmethod
    def unsigned_thinking(message: dict[str, Any]) -> list[Any]:
        parts = message["parts"]
        signed = max((place for place, part in enumerate(parts) if "thoughtSignature" in part), default=-1)
        return [part for part in parts[signed + 1 :] if part.get("thought")]

    @staticmethod
    def texts_of(message: dict[str, Any]) -> list[str]:
        return [part["text"] for part in message["parts"] if "text" in part]


def signed_part(message: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(part for part in message["parts"] if "thoughtSignature" in part)
    return found


async def fails_with(stream: ProviderStream, error: type[ProviderFailed]) -> None:
    with pytest.raises(error):
        await consume(stream)
    assert stream.state is StreamState.FAILED


async def test_signatures_of_another_account_are_refused(harness: ProviderHarness) -> None:
    answer = await complete(harness.provider, harness.ask())
    messages = [harness.ask().messages[0].data, native_of(answer), answer_calls(harness.provider, answer)]
    await fails_with(harness.another("another-account").open_stream(harness.payload(messages)), SignatureRejected)


async def test_a_missing_cache_has_its_own_error(harness: ProviderHarness) -> None:
    await fails_with(
        harness.provider.open_stream(replace(harness.ask(), cached_content="cachedContents/gone")), CacheGone
    )
    (request,) = harness.requests()
    assert request["body"]["cachedContent"] == "cachedContents/gone"
    assert not {"systemInstruction", "tools", "toolConfig"} & set(request["body"])


async def test_calls_of_another_vendor_are_accepted(harness: ProviderHarness) -> None:
    calls = (ToolCallBlock(id="toolu_1", name="get_weather", arguments={"city": "Oslo"}),)
    foreign = harness.provider.foreign_message([ThinkingBlock(text="Hm."), TextBlock(text="I look."), *calls])
    assert foreign is not None
    results = harness.provider.tool_message([ToolResultBlock(tool_call_id="toolu_1", output="cold")], calls)
    answer = await complete(harness.provider, harness.payload([harness.ask().messages[0].data, foreign, results]))
    assert answer.stop_reason is StopReason.END_TURN


@pytest.mark.parametrize("static_text", ["You help.", 'You help — with "words".\n' * 2_000], ids=["short", "long"])
async def test_the_request_is_the_one_that_the_sdk_sends(harness: ProviderHarness, static_text: str) -> None:
    payload = replace(
        harness.ask(),
        static_text=static_text,
        settings=CallSettings(max_output_tokens=500, thinking="low", temperature=0.5, stop_sequences=("END",)),
    )
    await complete(harness.provider, payload)
    async with httpx2.AsyncClient() as http:
        client = genai.Client(
            api_key="key-a",
            http_options=types.HttpOptions(
                base_url=harness.url, api_version="v1beta", timeout=3_600_000, httpx_async_client=http
            ),
        )
        chunks = await client.aio.models.generate_content_stream(
            model=MODEL,
            contents=[types.Content(role="user", parts=[types.Part(text="What is the weather in Oslo?")])],
            config=types.GenerateContentConfig(
                system_instruction=list(split_static(static_text)),
                tools=[
                    types.Tool(
                        function_declarations=[
                            types.FunctionDeclaration(
                                name=tool.name,
                                description=tool.description,
                                parameters_json_schema=dict(tool.parameters),
                            )
                            for tool in TOOLS
                        ]
                    )
                ],
                max_output_tokens=500,
                temperature=0.5,
                stop_sequences=["END"],
                thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_level=types.ThinkingLevel.LOW),
                automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
                automatic_continuation=False,
            ),
        )
        assert [chunk async for chunk in chunks]
        client.close()
    ours, theirs = harness.requests()
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize("recorded", [one for one in RECORDINGS if one.vendor == "gemini"], ids=str)
async def test_every_recording_has_the_same_events_over_the_network(
    harness: ProviderHarness, recorded: Recorded
) -> None:
    await send_recorded(harness, recorded)


@pytest.mark.parametrize("model", ["%2e%2e/cachedContents#", "x/%2e%2e/gemini-3.8-flash", "models/../files"])
async def test_a_stored_name_cannot_reach_another_endpoint(harness: ProviderHarness, model: str) -> None:
    """A name from before names were checked: nothing is sent, in any use of it."""
    payload = replace(harness.ask(), model=model)
    caches = harness.provider.caches
    assert caches is not None
    with pytest.raises(ValidationFailed):
        await consume(harness.provider.open_stream(payload))
    with pytest.raises(ValidationFailed):
        await harness.provider.count_tokens(payload)
    with pytest.raises(ValidationFailed):
        await caches.create(payload, lifetime_seconds=300, label="x")
    assert harness.requests() == []


@pytest.mark.parametrize("name", ["cachedContents/../files/x", "cachedContents/%2e%2e", "models/x", "", "a?b"])
async def test_a_cache_with_an_invalid_name_is_missing(harness: ProviderHarness, name: str) -> None:
    caches = harness.provider.caches
    assert caches is not None
    with pytest.raises(CacheGone):
        await caches.delete(name)
    with pytest.raises(CacheGone):
        await caches.prolong(name, lifetime_seconds=300)
    assert harness.requests() == []
