"""Thinking blocks: a long accepted tool loop, each way to invalidate it, and each harmless change."""

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.support.anthropic_emulator import (
    BINDING,
    FABLE,
    MANUAL,
    OLD_OPUS,
    OPUS,
    WEATHER,
    AnthropicEmulator,
    answers_to,
    anthropic_emulator,
    asking,
    assistant,
    assistant_message,
    user,
)

STEPS = 10
SCRIPT = "\n".join(
    f"""
- when: twenty
  thinking: Step {step} needs two cities.
  tool_calls:
    - {{name: get_weather, arguments: {{city: City {step} A}}}}
    - {{name: get_weather, arguments: {{city: City {step} B}}}}
"""
    for step in range(STEPS)
)
BOUND = (
    "{}: Invalid `signature` in `thinking` block. The block is bound to a different conversation. Remove the block, or "
    'set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)
NEEDS_HEADER = " That setting requires the `thinking-binding-controls-2026-08-01` value in the `anthropic-beta` header."
INVALID = "{}: Invalid `signature` in `thinking` block"
MODIFIED = (
    "{}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These blocks "
    "must remain as they were in the original response."
)
DROP = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
async def emulator() -> AsyncIterator[AnthropicEmulator]:
    async with anthropic_emulator(SCRIPT) as running:
        yield running


async def run_loop(
    emulator: AnthropicEmulator, *, model: str = FABLE, steps: int = STEPS, key: str = "key-a"
) -> dict[str, Any]:
    """A conversation of this many steps with two parallel calls each, driven by the stock SDK as a stream."""
    client = emulator.client(key)
    body = asking(user("Look at twenty cities."), model=model, system="You know cities.", tools=[WEATHER])
    for _ in range(steps):
        async with client.messages.stream(**body) as stream:
            message = await stream.get_final_message()
        assert message.stop_reason == "tool_use"
        turn = {"role": "assistant", "content": [one.to_dict() for one in message.content]}
        body["messages"] += [turn, answers_to(turn)]
    return body


async def finish_turn(emulator: AnthropicEmulator, body: dict[str, Any], **options: Any) -> None:
    """End the tool loop with text and ask again, so that no assistant message is in a tool loop any more."""
    body["messages"][-1]["content"].append({"type": "text", "text": "That is enough."})
    answer = await emulator.accepts(body, **options)
    assert answer["stop_reason"] == "end_turn"
    body["messages"] += [assistant_message(answer), user("And now?")]


def thinking_at(body: dict[str, Any], message: int) -> dict[str, Any]:
    block: dict[str, Any] = body["messages"][message]["content"][0]
    assert block["type"] == "thinking"
    return block


async def test_ten_steps_with_parallel_calls_and_thinking_are_accepted(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator)
    answer = await emulator.accepts(body)
    assert answer["stop_reason"] == "end_turn"
    assert len(body["messages"]) == 1 + 2 * STEPS
    assert all(thinking_at(body, number)["signature"] for number in range(1, 2 * STEPS, 2))


async def test_every_step_has_its_own_signature(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator)
    signatures = {thinking_at(body, number)["signature"] for number in range(1, 2 * STEPS, 2)}
    assert len(signatures) == STEPS


@pytest.mark.parametrize("model", [FABLE, OLD_OPUS])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda signature: signature[:0],
        lambda signature: signature[:-8],
        lambda signature: signature + "AAAA",
        lambda signature: signature[:40] + ("A" if signature[40] != "A" else "B") + signature[41:],
        lambda signature: signature[:0] + "EpoBCkgIBBABGAIiQGVtcHR5",
    ],
    ids=["empty", "truncated", "longer", "one-letter", "foreign"],
)
async def test_an_altered_signature_is_invalid_on_every_model(
    emulator: AnthropicEmulator, model: str, spoil: Callable[[str], str]
) -> None:
    body = await run_loop(emulator, model=model, steps=3)
    block = thinking_at(body, 3)
    block["signature"] = spoil(block["signature"])
    assert await emulator.refusal(body) == INVALID.format("messages.3.content.0")


async def test_swapped_signatures_of_earlier_steps_are_invalid(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=4)
    first, second = thinking_at(body, 1), thinking_at(body, 3)
    first["signature"], second["signature"] = second["signature"], first["signature"]
    text = await emulator.refusal(body)
    assert text.startswith(BOUND.format("messages.1.content.0") + NEEDS_HEADER)


async def test_a_signature_swapped_into_the_latest_message_is_a_modification(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=4)
    first, last = thinking_at(body, 1), thinking_at(body, 7)
    first["signature"], last["signature"] = last["signature"], first["signature"]
    assert await emulator.refusal(body) == MODIFIED.format("messages.7.content.0")


async def test_thinking_removed_from_the_latest_message_is_a_modification(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=3)
    del body["messages"][5]["content"][0]
    assert await emulator.refusal(body) == MODIFIED.format("messages.5.content.0")


async def test_a_gap_in_the_chain_makes_the_blocks_after_it_invalid(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=4)
    del body["messages"][3]["content"][0]
    text = await emulator.refusal(body)
    assert text.startswith(BOUND.format("messages.5.content.0"))
    assert text.endswith("A `thinking` block before it is missing or has moved.")


def change_system(body: dict[str, Any]) -> None:
    body["system"] += " It is noon."


def change_tools(body: dict[str, Any]) -> None:
    body["tools"] = [{**WEATHER, "description": "Weather"}]


def add_tool(body: dict[str, Any]) -> None:
    body["tools"] = [WEATHER, {**WEATHER, "name": "get_time"}]


def change_first_message(body: dict[str, Any]) -> None:
    body["messages"][0] = user("Look at twenty towns.")


def add_to_first_message(body: dict[str, Any]) -> None:
    body["messages"][0]["content"].insert(0, {"type": "text", "text": "It is noon."})


def shorten_result(body: dict[str, Any]) -> None:
    body["messages"][2]["content"][0]["content"] = "…"


def change_call(body: dict[str, Any]) -> None:
    body["messages"][1]["content"][1]["input"]["city"] = "Elsewhere"


def delete_first_step(body: dict[str, Any]) -> None:
    del body["messages"][1:3]


@pytest.mark.parametrize(
    ("change", "first_invalid", "names"),
    [
        (change_system, 1, "`system`"),
        (change_tools, 1, "`tools`"),
        (add_tool, 1, "`tools`"),
        (change_first_message, 1, "`messages`"),
        (add_to_first_message, 1, "`messages`"),
        (shorten_result, 3, "`messages`"),
        (change_call, 3, "`messages`"),
        (delete_first_step, 1, "`messages`"),
    ],
)
async def test_an_edit_of_the_past_makes_later_thinking_invalid(
    emulator: AnthropicEmulator, change: Change, first_invalid: int, names: str
) -> None:
    body = await run_loop(emulator, steps=4)
    change(body)
    text = await emulator.refusal(body)
    assert text.startswith(BOUND.format(f"messages.{first_invalid}.content.0") + NEEDS_HEADER)
    assert names in text.removeprefix(BOUND.format(f"messages.{first_invalid}.content.0"))
    counted = {key: value for key, value in body.items() if key != "max_tokens"}
    assert await emulator.refusal(counted, path="/v1/messages/count_tokens") == text


def move_cache_markers(body: dict[str, Any]) -> None:
    body["system"] = [{"type": "text", "text": body["system"], "cache_control": {"type": "ephemeral"}}]
    body["tools"] = [{**WEATHER, "cache_control": {"type": "ephemeral"}}]
    body["messages"][2]["content"][0]["cache_control"] = {"type": "ephemeral"}


def change_settings(body: dict[str, Any]) -> None:
    body |= {
        "max_tokens": 5,
        "output_config": {"effort": "low"},
        "tool_choice": {"type": "none"},
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive", "display": "summarized"},
    }


def reorder_keys(body: dict[str, Any]) -> None:
    body["tools"] = [dict(reversed(WEATHER.items()))]
    body["messages"][1]["content"][1] = dict(reversed(body["messages"][1]["content"][1].items()))


def write_as_string(body: dict[str, Any]) -> None:
    body["messages"][0]["content"] = body["messages"][0]["content"][0]["text"]


def split_results(body: dict[str, Any]) -> None:
    first, second = body["messages"][2]["content"]
    body["messages"][2:3] = [user(first), user(second)]


def add_deferred_tool(body: dict[str, Any]) -> None:
    body["tools"] = [*body["tools"], {**WEATHER, "name": "get_time", "defer_loading": True}]


def remove_first_thinking(body: dict[str, Any]) -> None:
    del body["messages"][1]["content"][0]


def remove_all_thinking(body: dict[str, Any]) -> None:
    for number in range(1, len(body["messages"]), 2):
        del body["messages"][number]["content"][0]


def write_into_omitted(body: dict[str, Any]) -> None:
    thinking_at(body, 3)["thinking"] = "This is ignored."


@pytest.mark.parametrize(
    "change",
    [
        move_cache_markers,
        change_settings,
        reorder_keys,
        write_as_string,
        split_results,
        add_deferred_tool,
        remove_first_thinking,
        remove_all_thinking,
        write_into_omitted,
    ],
)
async def test_harmless_changes_leave_thinking_valid(emulator: AnthropicEmulator, change: Change) -> None:
    body = await run_loop(emulator, steps=4)
    change(body)
    await emulator.accepts(body)


async def test_thinking_removed_from_the_end_may_not_be_put_back(emulator: AnthropicEmulator) -> None:
    whole = await run_loop(emulator, steps=2)
    await finish_turn(emulator, whole)  # Ends with its own thinking.
    bare = copy.deepcopy(whole)
    for number in (1, 3, 5):
        del bare["messages"][number]["content"][0]
    answer = await emulator.accepts(bare)  # A new block, created without the others.
    again = [*whole["messages"], assistant_message(answer), user("And then?")]
    text = await emulator.refusal({**whole, "messages": again})
    assert text.startswith(BOUND.format("messages.7.content.0"))


async def test_a_fork_that_replays_the_prefix_keeps_its_thinking(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=2)
    fork = copy.deepcopy(body)
    await finish_turn(emulator, body)
    fork["messages"][-1]["content"].append({"type": "text", "text": "Take another way."})
    await emulator.accepts(fork)


@pytest.mark.parametrize(
    ("model", "key", "status"),
    [
        (FABLE, "key-a", 400),
        (FABLE, "old-key", 400),
        (OPUS, "key-a", 400),
        (OPUS, "old-key", 200),
        ("claude-fable-5-1", "key-a", 400),
        ("claude-sonnet-5-5", "key-a", 400),
        ("claude-haiku-5-5", "key-a", 400),
        ("claude-haiku-5-5", "old-key", 200),
        ("claude-mythos-5-1", "key-a", 200),
        (OLD_OPUS, "key-a", 200),
        ("claude-sonnet-5", "key-a", 200),
    ],
)
async def test_the_model_and_the_age_of_the_account_determine_whether_it_is_checked(
    emulator: AnthropicEmulator, model: str, key: str, status: int
) -> None:
    body = await run_loop(emulator, model=model, steps=2, key=key)
    change_system(body)
    response = await emulator.post(body, key=key)
    assert response.status_code == status, response.text


async def test_an_old_account_can_request_the_check(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, model=OPUS, steps=2, key="old-key")
    change_system(body)
    strict = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "error"}}
    text = await emulator.refusal({**body, "thinking": strict}, key="old-key", betas=BINDING)
    assert text.startswith(BOUND.format("messages.1.content.0"))
    assert NEEDS_HEADER not in text


async def test_an_old_account_with_the_header_alone_gets_a_warning(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, model=OPUS, steps=2, key="old-key")
    change_system(body)
    answer = await emulator.accepts(body, key="old-key", betas=BINDING)
    assert answer["input_transformations"] == [
        {
            "type": "thinking_mismatch_allowed",
            "path": f"messages.{number}.content.0",
            "reason": "prefix_binding_mismatch",
        }
        for number in (1, 3)
    ]


async def test_dropped_blocks_are_listed_and_new_ones_are_valid(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=3)
    shorten_result(body)
    body["thinking"] = DROP
    body["messages"][-1]["content"].append({"type": "text", "text": "That is enough."})
    client = emulator.client()
    message = await client.beta.messages.create(**body, betas=[BINDING])
    dropped = [(entry.path, entry.reason) for entry in message.input_transformations or []]
    assert dropped == [(f"messages.{number}.content.0", "prefix_binding_mismatch") for number in (3, 5)]
    body["messages"] += [message.to_param(), user("And now?")]
    again = await client.beta.messages.create(**body, betas=[BINDING])
    assert [entry.path for entry in again.input_transformations or []] == [path for path, _ in dropped]


async def test_a_gap_drops_all_blocks_after_it(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, steps=4)
    await finish_turn(emulator, body)
    del body["messages"][3]["content"][0]
    answer = await emulator.accepts({**body, "thinking": DROP}, betas=BINDING)
    assert [entry["path"] for entry in answer["input_transformations"]] == [
        f"messages.{number}.content.0" for number in (5, 7, 9)
    ]


async def test_thinking_of_another_model_is_dropped_and_used_again_later(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, model=FABLE, steps=2)
    await finish_turn(emulator, body)
    elsewhere = await emulator.accepts({**body, "model": OPUS}, betas=BINDING)
    assert [entry["reason"] for entry in elsewhere["input_transformations"]] == ["model_binding_mismatch"] * 3
    body["messages"] += [assistant_message(elsewhere), user("Thanks.")]
    back = await emulator.accepts(body, betas=BINDING)
    assert back["input_transformations"] == []


async def test_thinking_of_sonnet_5_5_is_valid_in_its_account_only(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, model="claude-sonnet-5-5", steps=2, key="acme/1")
    sister = await emulator.accepts(body, key="acme/2", betas=BINDING)
    assert sister["input_transformations"] == []
    stranger = await emulator.accepts(body, key="other", betas=BINDING)
    assert [entry["reason"] for entry in stranger["input_transformations"]] == ["organization_binding_mismatch"] * 2


async def test_shown_thinking_must_not_be_changed(emulator: AnthropicEmulator) -> None:
    body = await run_loop(emulator, model="claude-sonnet-5", steps=0)
    body["thinking"] = {"type": "adaptive", "display": "summarized"}
    for _ in range(2):
        answer = await emulator.accepts(body)
        assert answer["content"][0]["thinking"].startswith("Step")
        body["messages"] += [assistant_message(answer), answers_to(answer)]
    latest = copy.deepcopy(body)
    thinking_at(latest, 3)["thinking"] = "Something else."
    assert await emulator.refusal(latest) == MODIFIED.format("messages.3.content.0")
    earlier = copy.deepcopy(body)
    thinking_at(earlier, 1)["thinking"] = "Something else."
    assert await emulator.refusal(earlier) == INVALID.format("messages.1.content.0")


async def test_a_call_that_this_emulator_never_made_needs_no_thinking(emulator: AnthropicEmulator) -> None:
    call = {"type": "tool_use", "id": "toolu_made_by_hand", "name": "get_weather", "input": {"city": "Rome"}}
    await emulator.accepts(asking(user("Rome?"), assistant(call), answers_to(assistant(call)), tools=[WEATHER]))


async def test_with_a_budget_a_turn_thinks_once_and_must_begin_with_it() -> None:
    async with anthropic_emulator(SCRIPT) as emulator:
        body = asking(user("Look at twenty cities."), model=MANUAL, tools=[WEATHER])
        body |= {"max_tokens": 4_000, "thinking": {"type": "enabled", "budget_tokens": 2_000}}
        for step in range(3):
            answer = await emulator.accepts(body)
            assert (answer["content"][0]["type"] == "thinking") is (step == 0)
            body["messages"] += [assistant_message(answer), answers_to(answer)]
        await emulator.accepts(body)
        del body["messages"][1]["content"][0]
        text = await emulator.refusal(body)
        assert text.startswith(
            "messages.1.content.0.type: Expected 'thinking' or 'redacted_thinking', but found 'tool_use'"
        )


async def test_redacted_thinking_is_sent_back_like_any_other() -> None:
    script = """
- thinking: "[redacted] a secret"
  tool_calls: [{name: get_weather, arguments: {city: Rome}}]
"""
    async with anthropic_emulator(script) as emulator:
        body = asking(user("Rome?"), tools=[WEATHER])
        answer = await emulator.accepts(body)
        assert answer["content"][0].keys() == {"type", "data"}
        body["messages"] += [assistant_message(answer), answers_to(answer)]
        await emulator.accepts(body)
        body["messages"][1]["content"][0]["data"] += "AAAA"
        assert await emulator.refusal(body) == "messages.1.content.0: Invalid `data` in `redacted_thinking` block"


async def test_signatures_stay_valid_after_a_restart() -> None:
    async with anthropic_emulator(SCRIPT) as first:
        body = await run_loop(first, steps=2)
    async with anthropic_emulator() as second:
        await second.accepts(body)
        change_system(body)
        assert (await second.refusal(body)).startswith(BOUND.format("messages.1.content.0"))
