"""Compaction on demand: a signed summary replaces the messages that it summarises."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.anthropic_emulator import (
    COMPACT,
    OLD_OPUS,
    OPUS,
    AnthropicEmulator,
    anthropic_emulator,
    asking,
    assistant_message,
    user,
)

SUMMARIZE: Any = {"type": "summarize"}


@pytest.fixture
async def emulator() -> AsyncIterator[AnthropicEmulator]:
    async with anthropic_emulator() as running:
        yield running


async def send_turns(emulator: AnthropicEmulator, turns: int, model: str = OPUS) -> dict[str, Any]:
    """A conversation that ends with a question."""
    body = asking(user("Question 0"), model=model, system="Be brief.")
    for turn in range(1, turns + 1):
        body["messages"] += [assistant_message(await emulator.accepts(body)), user(f"Question {turn}")]
    return body


async def compact(emulator: AnthropicEmulator, body: dict[str, Any]) -> dict[str, Any]:
    """The compaction block, as the SDK gives it from a stream."""
    client = emulator.client()
    async with client.beta.messages.stream(**body, compaction=SUMMARIZE, betas=[COMPACT]) as stream:
        message = await stream.get_final_message()
    assert message.stop_reason == "compaction"
    assert [one.type for one in message.content] == ["compaction"]
    return message.content[0].to_dict()


async def test_a_summary_replaces_the_messages_and_keeps_the_thinking_after_them(emulator: AnthropicEmulator) -> None:
    body = await send_turns(emulator, 4)
    summed_up, kept = body["messages"][:5], body["messages"][5:]
    block = await compact(emulator, {**body, "messages": summed_up})
    assert "Question 0" in block["content"]
    shorter = {**body, "messages": [{"role": "assistant", "content": [block]}, *kept]}
    assert any(one["type"] == "thinking" for message in kept for one in message["content"])
    answer = await emulator.accepts(shorter, betas=COMPACT)
    shorter["messages"] += [assistant_message(answer), user("And on?")]
    await emulator.accepts(shorter, betas=COMPACT)
    # Without the block the same turns have lost their prefix.
    bare = {**body, "messages": [user("Question 2"), *kept]}
    assert "bound to a different conversation" in await emulator.refusal(bare)


async def test_a_summary_may_be_summarised_again(emulator: AnthropicEmulator) -> None:
    body = await send_turns(emulator, 4)
    block = await compact(emulator, {**body, "messages": body["messages"][:3]})
    body["messages"] = [{"role": "assistant", "content": [block]}, *body["messages"][3:]]
    again = await compact(emulator, {**body, "messages": body["messages"][:3]})
    assert "Question 0" in again["content"]
    body["messages"] = [{"role": "assistant", "content": [again]}, *body["messages"][3:]]
    await emulator.accepts(body, betas=COMPACT)


@pytest.mark.parametrize("change", ["system", "kept turn edited", "other model"])
async def test_kept_thinking_needs_the_same_prefix(emulator: AnthropicEmulator, change: str) -> None:
    body = await send_turns(emulator, 4)
    summed_up = {**body, "messages": body["messages"][:5]}
    if change == "other model":
        summed_up["model"] = OLD_OPUS
    block = await compact(emulator, summed_up)
    kept = copy.deepcopy(body["messages"][5:])
    if change == "kept turn edited":
        kept[1]["content"][0]["text"] = "Something else"
    body["messages"] = [{"role": "assistant", "content": [block]}, *kept]
    if change == "system":
        body["system"] = "Be verbose."
    assert "bound to a different conversation" in await emulator.refusal(body, betas=COMPACT)


async def test_a_damaged_block_is_refused_with_its_code(emulator: AnthropicEmulator) -> None:
    body = await send_turns(emulator, 2)
    block = await compact(emulator, {**body, "messages": body["messages"][:3]})
    first = {"role": "assistant", "content": [block]}
    rest = body["messages"][3:]

    async def code(*messages: dict[str, Any], **more: Any) -> str | None:
        return (await emulator.refusal_with_code({**body, "messages": list(messages), **more}, betas=COMPACT))[1]

    def spoil(**change: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": [{**block, **change}]}

    assert await code(spoil(content="Something else."), *rest) == "compaction_content_mismatch"
    assert await code(spoil(signature=block["signature"][:-4]), *rest) == "compaction_signature_invalid"
    assert await code(spoil(signature=None), *rest) == "compaction_signature_invalid"
    assert await code(spoil(tool_changes=[{"type": "tool_removal"}]), *rest) == "compaction_tool_changes_mismatch"
    assert await code(first, user("x"), first, user("y")) == "compaction_block_ambiguous"
    assert await code(user("x"), first, user("y")) == "compaction_block_misplaced"


async def test_a_summary_needs_messages_and_complete_turns(emulator: AnthropicEmulator) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    open_turn = asking(user("Hello"), {"role": "assistant", "content": [call]}, compaction=SUMMARIZE)
    assert (await emulator.refusal_with_code(open_turn, betas=COMPACT))[1] == "compaction_incomplete_turn"
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    nothing = asking(failed, compaction=SUMMARIZE)
    assert (await emulator.refusal_with_code(nothing, betas=COMPACT))[1] == "compaction_nothing_to_summarize"


async def test_an_overloaded_compaction_has_its_own_code(emulator: AnthropicEmulator) -> None:
    response = await emulator.post(asking(user("Hello"), compaction=SUMMARIZE), betas=COMPACT, fault="overloaded")
    assert response.status_code == 529
    assert response.json()["error"]["details"] == {"error_code": "compaction_unavailable"}


async def test_the_block_needs_its_beta_header(emulator: AnthropicEmulator) -> None:
    body = await send_turns(emulator, 1)
    block = await compact(emulator, {**body, "messages": body["messages"][:1]})
    body["messages"] = [{"role": "assistant", "content": [block]}, user("And?")]
    await emulator.accepts(body, betas=COMPACT)
    assert (await emulator.refusal(body)).startswith(
        "messages.0.content.0: Input tag 'compaction' found using 'type' does not match any of the expected tags:"
    )
