"""The prompt cache, observed by the usage numbers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.emulator.latency import Latency
from tests.support.anthropic_emulator import (
    FABLE,
    OPUS,
    WEATHER,
    AnthropicEmulator,
    anthropic_emulator,
    asking,
    assistant,
    assistant_message,
    marked,
    user,
)

LONG = "word " * 1_000
"""About 1,250 tokens."""
MINUTE = 60.0


@pytest.fixture
async def emulator() -> AsyncIterator[AnthropicEmulator]:
    async with anthropic_emulator() as running:
        yield running


def numbers(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Uncached, written and read tokens."""
    usage = answer["usage"]
    assert usage["cache_creation_input_tokens"] == sum(usage["cache_creation"].values())
    return usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]


async def count(emulator: AnthropicEmulator, body: dict[str, Any]) -> int:
    counted = {key: value for key, value in body.items() if key != "max_tokens"}
    total: int = (await emulator.accepts(counted, path="/v1/messages/count_tokens"))["input_tokens"]
    return total


async def test_a_growing_conversation_reads_what_the_last_request_wrote(emulator: AnthropicEmulator) -> None:
    client = emulator.client()
    messages: list[Any] = []
    written_before = 0
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn}. {LONG}"})
        request: dict[str, Any] = {"model": FABLE, "system": LONG, "tools": [WEATHER], "messages": messages}
        total = (await client.messages.count_tokens(**request)).input_tokens
        answer = await client.messages.create(**request, max_tokens=500, cache_control={"type": "ephemeral"})
        usage = answer.usage
        assert usage.cache_read_input_tokens == written_before
        assert usage.input_tokens == 0
        assert usage.cache_creation_input_tokens == total - written_before
        written_before = total
        messages.append(answer.to_param())


async def test_without_a_marker_everything_is_uncached(emulator: AnthropicEmulator) -> None:
    body = asking(user(LONG), system=LONG)
    total = await count(emulator, body)
    for _ in range(2):
        assert numbers(await emulator.accepts(body)) == (total, 0, 0)


async def test_only_what_precedes_a_breakpoint_is_cached(emulator: AnthropicEmulator) -> None:
    body = asking(user("What now?"), system=[marked(LONG)], tools=[WEATHER])
    total = await count(emulator, body)
    paid, written, read = numbers(await emulator.accepts(body))
    assert (paid + written, read) == (total, 0)
    assert paid < 10
    other = {**body, "messages": [user("And something else?")]}
    again = numbers(await emulator.accepts(other))
    assert again[1:] == (0, written)


async def test_a_short_prefix_is_silently_not_cached(emulator: AnthropicEmulator) -> None:
    body = asking(user(marked("word " * 300)))
    for _ in range(2):
        assert numbers(await emulator.accepts(body))[1:] == (0, 0)
    # 1,250 tokens are enough for this model, but not for one with a minimum of 4,096.
    long = asking(user(marked(LONG)))
    assert numbers(await emulator.accepts(long))[1] > 0
    assert numbers(await emulator.accepts({**long, "model": "claude-opus-4-6"}))[1:] == (0, 0)


@pytest.mark.parametrize(("ttl", "minutes"), [("5m", 5), ("1h", 60)])
async def test_an_entry_lives_from_its_last_use(emulator: AnthropicEmulator, ttl: str, minutes: int) -> None:
    body = asking(user(marked(LONG, ttl)))
    written = numbers(await emulator.accepts(body))[1]
    for _ in range(3):  # Each read renews its whole lifetime.
        emulator.clock.now += (minutes - 1) * MINUTE
        assert numbers(await emulator.accepts(body))[1:] == (0, written)
    emulator.clock.now += minutes * MINUTE
    assert numbers(await emulator.accepts(body))[1:] == (written, 0)


async def test_the_two_lifetimes_are_counted_separately(emulator: AnthropicEmulator) -> None:
    body = asking(user(marked(LONG, "5m"), "and?"), system=[marked(LONG, "1h")])
    usage = (await emulator.accepts(body))["usage"]
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 1_000
    assert usage["cache_creation"]["ephemeral_5m_input_tokens"] > 1_000
    emulator.clock.now += 10 * MINUTE  # The short-lived one has expired, the long-lived one is read.
    again = (await emulator.accepts(body))["usage"]
    assert again["cache_read_input_tokens"] == usage["cache_creation"]["ephemeral_1h_input_tokens"]
    assert again["cache_creation"] == {
        "ephemeral_1h_input_tokens": 0,
        "ephemeral_5m_input_tokens": usage["cache_creation"]["ephemeral_5m_input_tokens"],
    }


@pytest.mark.parametrize(("blocks", "found"), [(19, "found"), (20, "")])
async def test_a_breakpoint_looks_back_twenty_blocks(emulator: AnthropicEmulator, blocks: int, found: str) -> None:
    first = asking(user(marked(LONG)))
    written = numbers(await emulator.accepts(first))[1]
    more = [{"type": "text", "text": f"Block {number}"} for number in range(blocks - 1)]
    second = asking(user(LONG, *more, marked("The end")))
    assert numbers(await emulator.accepts(second))[2] == (written if found else 0)


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        ({"model": OPUS}, ""),
        ({"tools": [{**WEATHER, "description": "Weather"}]}, ""),
        ({"system": [marked(LONG + "!")]}, "tools"),
        ({"tool_choice": {"type": "none"}}, "system"),
        ({"output_config": {"effort": "low"}}, "system"),
        ({"output_config": {"effort": "high"}}, "messages"),
        ({"thinking": {"type": "adaptive"}}, "messages"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "messages"),
        ({"max_tokens": 7}, "messages"),
        ({"metadata": {"user_id": "u"}}, "messages"),
    ],
    ids=str,
)
async def test_the_changed_part_determines_what_is_still_read(
    emulator: AnthropicEmulator, change: dict[str, Any], keeps: str
) -> None:
    tools = [
        {**WEATHER, "description": LONG, "name": "other"},
        {**WEATHER, "cache_control": {"type": "ephemeral"}},
    ]
    body = asking(user(marked(LONG)), system=[marked(LONG)], tools=tools)
    await emulator.accepts(body)
    answer = await emulator.accepts({**body, "tools": tools, **change})
    read = numbers(answer)[2]
    totals = {
        "tools": await count(emulator, asking(user("x"), tools=tools)) - 4,
        "system": await count(emulator, asking(user("x"), tools=tools, system=LONG)) - 4,
        "messages": await count(emulator, body),
    }
    assert read == (totals[keeps] if keeps else 0)


async def test_thinking_turned_off_leaves_only_the_system_prompt_cached(emulator: AnthropicEmulator) -> None:
    body = asking(user(marked(LONG)), system=[marked(LONG)], model="claude-haiku-5-5")
    await emulator.accepts(body)
    read = numbers(await emulator.accepts({**body, "thinking": {"type": "disabled"}}))[2]
    assert 1_000 < read < 1_500


async def test_images_anywhere_change_the_cached_messages(emulator: AnthropicEmulator) -> None:
    await emulator.accepts(asking(user(marked(LONG)), system=[marked(LONG)]))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    read = numbers(await emulator.accepts(asking(user(marked(LONG), image), system=[marked(LONG)])))[2]
    assert 1_000 < read < 1_500  # the system prompt only


async def test_the_order_of_keys_matters_to_the_cache(emulator: AnthropicEmulator) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome", "day": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": LONG}
    body = asking(
        user("Rome?"), assistant(call), user({**result, "cache_control": {"type": "ephemeral"}}), tools=[WEATHER]
    )
    await emulator.accepts(body)
    assert numbers(await emulator.accepts(body))[2] > 0
    body["messages"][1]["content"][0]["input"] = {"day": 1, "city": "Rome"}
    assert numbers(await emulator.accepts(body))[2] == 0


async def test_accounts_do_not_share_a_cache(emulator: AnthropicEmulator) -> None:
    body = asking(user(marked(LONG)))
    await emulator.accepts(body, key="acme/1")
    assert numbers(await emulator.accepts(body, key="acme/2"))[2] > 0
    assert numbers(await emulator.accepts(body, key="other"))[2] == 0


async def test_a_failed_request_leaves_nothing_in_the_cache(emulator: AnthropicEmulator) -> None:
    body = asking(user(marked(LONG)))
    assert (await emulator.post(body, fault="overloaded")).status_code == 529
    assert numbers(await emulator.accepts(body))[2] == 0


async def test_parallel_requests_miss_until_the_first_answer_has_begun() -> None:
    async with anthropic_emulator(latency=Latency(first_chunk_seconds=0.3, seconds_per_chunk=0)) as emulator:
        body = asking(user(marked(LONG)))
        both = await asyncio.gather(emulator.accepts(body), emulator.accepts(body))
        assert [numbers(answer)[2] for answer in both] == [0, 0]
        assert numbers(await emulator.accepts(body))[2] > 0


async def test_no_output_tokens_only_warm_the_cache(emulator: AnthropicEmulator) -> None:
    body = asking(user(marked(LONG)))
    warmed = await emulator.accepts({**body, "max_tokens": 0})
    assert (warmed["content"], warmed["usage"]["output_tokens"]) == ([], 0)
    assert numbers(await emulator.accepts(body))[2] == numbers(warmed)[1]


async def test_thinking_that_is_sent_back_counts_although_it_is_not_shown(emulator: AnthropicEmulator) -> None:
    body = asking(user("Hello"))
    answer = await emulator.accepts(body)
    bare = [one for one in answer["content"] if one["type"] != "thinking"]
    whole = asking(user("Hello"), assistant_message(answer), user("More"))
    without = asking(user("Hello"), {"role": "assistant", "content": bare}, user("More"))
    spent = answer["usage"]["output_tokens_details"]["thinking_tokens"]
    assert spent > 0
    assert await count(emulator, whole) - await count(emulator, without) == spent


async def test_diagnostics_name_what_changed(emulator: AnthropicEmulator) -> None:
    client = emulator.client()
    body = asking(user(LONG), system=LONG, tools=[WEATHER])
    first = await client.messages.create(**body, diagnostics={"previous_message_id": None})
    assert first.diagnostics is None

    async def reason(**change: Any) -> tuple[str, int | None] | None:
        answer = await client.messages.create(**{**body, **change}, diagnostics={"previous_message_id": first.id})
        if answer.diagnostics is None:
            return None
        assert answer.diagnostics.cache_miss_reason is not None
        found = answer.diagnostics.cache_miss_reason.to_dict()
        return str(found["type"]), found.get("cache_missed_input_tokens")

    total = first.usage.input_tokens
    assert await reason(messages=[user(LONG), first.to_param(), user("More")]) is None
    assert await reason(model=OPUS) == ("model_changed", total)
    assert await reason(tools=[]) == ("tools_changed", total)
    assert (await reason(system="Short") or ("", 0))[0] == "system_changed"
    assert (await reason(messages=[user("Else")]) or ("", 0))[0] == "messages_changed"
    assert await reason(tool_choice={"type": "none"}) == ("unavailable", None)
    unknown = await client.messages.create(**body, diagnostics={"previous_message_id": "msg_never"})
    assert unknown.diagnostics
    assert unknown.diagnostics.cache_miss_reason
    assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"
