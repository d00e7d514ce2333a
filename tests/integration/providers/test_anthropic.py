"""Claude passes the contract of the port, and its requests are those of its SDK."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlockParam

from server.conversation.block import TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import PrefixMismatch, SignatureRejected
from server.conversation.payload import CallSettings, split_static
from server.conversation.turn import StopReason
from server.emulator.anthropic.app import build_anthropic_app
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.provider import Provider
from tests.contracts.provider_contract import ProviderContract, send_recorded
from tests.contracts.provider_harness import (
    TOOLS,
    ProviderHarness,
    answer_calls,
    comparable,
    complete,
    native_of,
    open_harness,
)
from tests.recordings.catalogue import RECORDINGS, Recorded

MODEL = "claude-fable-5-2"
"""Checks what precedes thinking, for every account."""


@pytest.fixture(scope="module")
async def shared_harness() -> AsyncIterator[ProviderHarness]:
    async with open_harness(build_anthropic_app, AnthropicProvider, MODEL) as harness:
        yield harness


@pytest.fixture
async def harness(shared_harness: ProviderHarness) -> ProviderHarness:
    await shared_harness.renew()
    return shared_harness


async def test_the_provider_implements_the_port() -> None:
    provider: Provider = AnthropicProvider("key")
    assert provider.name == "anthropic"
    assert "key" not in provider.account
    assert provider.account != AnthropicProvider("another").account
    await provider.close()


class TestAnthropicProvider(ProviderContract):
    """See the contract."""

    refused_without = SignatureRejected
    refused_swapped = SignatureRejected
    refused_merged = PrefixMismatch

    @staticmethod
    def drop_signature(message: dict[str, Any]) -> None:
        message["content"].remove(thinking_of(message))

    @staticmethod
    def swap_signatures(one: dict[str, Any], other: dict[str, Any]) -> None:
        first, second = thinking_of(one), thinking_of(other)
        first["signature"], second["signature"] = second["signature"], first["signature"]

    @staticmethod
    def merge_texts(message: dict[str, Any]) -> None:
        message["content"] = [{"type": "text", "text": "".join(block["text"] for block in message["content"])}]

    @staticmethod
    def unsigned_thinking(message: dict[str, Any]) -> list[Any]:
        return [block for block in message["content"] if block["type"] == "thinking" and not block["signature"]]

    @staticmethod
    def texts_of(message: dict[str, Any]) -> list[str]:
        return [block["text"] for block in message["content"] if block["type"] == "text"]


def thinking_of(message: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(block for block in message["content"] if block["type"] == "thinking")
    return found


async def test_calls_of_another_vendor_are_accepted(harness: ProviderHarness) -> None:
    calls = (ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"}),)
    foreign = harness.provider.foreign_message([ThinkingBlock(text="Hm."), TextBlock(text="I look."), *calls])
    assert foreign is not None
    results = harness.provider.tool_message([ToolResultBlock(tool_call_id="call_1", output="cold")], calls)
    answer = await complete(harness.provider, harness.payload([harness.ask().messages[0].data, foreign, results]))
    assert answer.stop_reason is StopReason.END_TURN


async def test_thinking_after_another_static_text_is_a_mismatch(harness: ProviderHarness) -> None:
    answer = await complete(harness.provider, harness.ask())
    messages = [harness.ask().messages[0].data, native_of(answer), answer_calls(harness.provider, answer)]
    with pytest.raises(PrefixMismatch) as caught:
        await complete(harness.provider, harness.payload(messages, static_text="You help now and then."))
    assert "system" in str(caught.value.details["provider_message"])


async def test_marked_content_is_read_from_the_cache(harness: ProviderHarness) -> None:
    long = "Many words. " * 2_000
    messages = [harness.provider.user_message([TextBlock(text=long)], {})]
    first = await complete(harness.provider, harness.payload(messages, breakpoints=(0,), cache_seconds=3600))
    messages += [native_of(first), harness.provider.user_message([TextBlock(text="Go on.")], {})]
    second = await complete(harness.provider, harness.payload(messages, breakpoints=(0, 1, 2), cache_seconds=3600))
    assert first.usage.cache_write_tokens == first.long_write_tokens > 1_000
    assert second.usage.cache_read_tokens >= first.usage.cache_write_tokens
    assert second.usage.fresh_input_tokens < first.usage.cache_write_tokens


@pytest.mark.parametrize("static_text", ["You help.", 'You help — with "words".\n' * 2_000], ids=["short", "long"])
async def test_the_request_is_the_one_that_the_sdk_sends(harness: ProviderHarness, static_text: str) -> None:
    settings = CallSettings(max_output_tokens=500, thinking="low", stop_sequences=("END",))
    await complete(harness.provider, replace(harness.ask(), settings=settings, static_text=static_text))
    pieces: list[TextBlockParam] = [{"type": "text", "text": piece} for piece in split_static(static_text)]
    for piece in pieces[-2:]:
        piece["cache_control"] = {"type": "ephemeral"}
    async with anthropic.AsyncAnthropic(base_url=harness.url, api_key="key-a", max_retries=0) as client:
        events = await client.messages.create(
            model=MODEL,
            max_tokens=500,
            stream=True,
            system=pieces,
            tools=[
                {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
                for tool in TOOLS
            ],
            messages=[{"role": "user", "content": [{"type": "text", "text": "What is the weather in Oslo?"}]}],
            thinking={"type": "adaptive", "display": "summarized"},
            output_config={"effort": "low"},
            stop_sequences=["END"],
        )
        assert [event async for event in events]
    ours, theirs = harness.requests()
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize("recorded", [one for one in RECORDINGS if one.vendor == "anthropic"], ids=str)
async def test_every_recording_has_the_same_events_over_the_network(
    harness: ProviderHarness, recorded: Recorded
) -> None:
    await send_recorded(harness, recorded)
