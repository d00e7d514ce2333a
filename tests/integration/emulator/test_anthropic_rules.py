"""For every documented rule a request that breaks it, sent with the stock SDK, and the text it is refused with."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.anthropic_emulator import (
    FABLE,
    MANUAL,
    OLD_OPUS,
    OPUS,
    WEATHER,
    AnthropicEmulator,
    anthropic_emulator,
    asking,
    assistant,
    marked,
    system,
    tool_result,
    tool_use,
    user,
)

HELLO = user("Hello")
CITY = {"city": "Paris"}
NEXT = "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
PREVIOUS = "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
NO_ENABLED = (
    'is not supported for this model. Use "thinking.type.adaptive" and "output_config.effort" to control thinking '
    "behavior."
)
CLEAR_AT = "mid-conversation-system-clear-at-2026-08-21"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    body: Mapping[str, Any]
    text: str
    betas: str = ""


def thinking(kind: str, model: str, **more: Any) -> dict[str, Any]:
    return asking(HELLO, model=model, thinking={"type": kind, **more})


FIELDS = [
    Case(name="unknown", body=asking(HELLO, colour="red"), text="colour: Extra inputs are not permitted"),
    Case(name="temperature", body=asking(HELLO, temperature=1), text="temperature: Extra inputs are not permitted"),
    Case(name="top_p", body=asking(HELLO, top_p=1), text="top_p: Extra inputs are not permitted"),
    Case(name="top_k", body=asking(HELLO, top_k=1), text="top_k: Extra inputs are not permitted"),
    Case(
        name="compaction without its beta",
        body=asking(HELLO, compaction={"type": "summarize"}),
        text="compaction: Extra inputs are not permitted",
    ),
    Case(
        name="context_management without its beta",
        body=asking(HELLO, context_management={"edits": []}),
        text="context_management: Extra inputs are not permitted",
    ),
    Case(
        name="thread without its beta",
        body=asking(HELLO, thread={"type": "create"}),
        text="thread: Extra inputs are not permitted",
    ),
    Case(
        name="block_binding without its beta",
        body=thinking("adaptive", FABLE, block_binding={"prefix_mismatch_behavior": "drop_block"}),
        text="thinking.adaptive.block_binding: Extra inputs are not permitted",
    ),
    Case(
        name="clear_at without its beta",
        body=asking(HELLO, system("Be kind.", clear_at="next_user_message")),
        text="messages.1.clear_at: Extra inputs are not permitted",
    ),
    Case(
        name="unknown in a message",
        body=asking({**HELLO, "name": "Ann"}),
        text="messages.0.name: Extra inputs are not permitted",
    ),
    Case(
        name="unknown in a block",
        body=asking(user({"type": "text", "text": "Hello", "id": "1"})),
        text="messages.0.content.0.text.id: Extra inputs are not permitted",
    ),
    Case(
        name="unknown in a tool",
        body=asking(HELLO, tools=[{**WEATHER, "parameters": {}}]),
        text="tools.0.custom.parameters: Extra inputs are not permitted",
    ),
    Case(name="no max_tokens", body={"model": FABLE, "messages": [HELLO]}, text="max_tokens: Field required"),
    Case(name="no messages", body=asking(), text="messages: at least one message is required"),
    Case(
        name="wrong type",
        body=asking(HELLO, max_tokens="many"),
        text="max_tokens: Input should be a valid integer",
    ),
    Case(
        name="no signature at all",
        body=asking(HELLO, assistant({"type": "thinking", "thinking": ""}), HELLO),
        text="messages.1.content.0.thinking.signature: Field required",
    ),
    Case(
        name="unknown tool twice",
        body=asking(HELLO, tools=[WEATHER, WEATHER]),
        text="tools: Tool names must be unique.",
    ),
    Case(
        name="bad tool name",
        body=asking(HELLO, tools=[{**WEATHER, "name": "get weather"}]),
        text="tools.0.custom.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'",
    ),
    Case(
        name="unknown beta",
        body=asking(HELLO),
        betas="no-such-beta-2026-01-01",
        text="Unexpected value(s) `no-such-beta-2026-01-01` for the `anthropic-beta` header. Please consult our "
        "documentation at docs.claude.com or try again without the header.",
    ),
    Case(
        name="too many output tokens",
        body=asking(HELLO, max_tokens=200_000),
        text=f"max_tokens: 200000 > 128000, which is the maximum allowed number of output tokens for {FABLE}",
    ),
]

TALK = [
    Case(
        name="first role",
        body=asking(assistant("Hello"), HELLO),
        text='messages: first message must use the "user" role',
    ),
    Case(
        name="prefill",
        body=asking(HELLO, assistant("I am")),
        text="This model does not support assistant message prefill. The conversation must end with a user message.",
    ),
    Case(
        name="prefill with a blank at its end",
        body=asking(HELLO, assistant("I am "), model=MANUAL),
        text="messages: final assistant content cannot end with trailing whitespace",
    ),
    Case(name="empty text", body=asking(user("")), text="messages: text content blocks must be non-empty"),
    Case(
        name="empty text of the assistant",
        body=asking(HELLO, assistant(""), HELLO),
        text="messages: text content blocks must be non-empty",
    ),
    Case(
        name="blank text",
        body=asking(user(" \n")),
        text="messages: text content blocks must contain non-whitespace text",
    ),
    Case(
        name="empty content",
        body=asking(HELLO, assistant(), HELLO),
        text="messages.1: all messages must have non-empty content except for the optional final assistant message",
    ),
    Case(
        name="result missing",
        body=asking(HELLO, assistant(tool_use("toolu_A", **CITY), tool_use("toolu_B", **CITY)), HELLO),
        text="messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_A, toolu_B. "
        + NEXT,
    ),
    Case(
        name="one of two results missing",
        body=asking(
            HELLO,
            assistant(tool_use("toolu_A", **CITY), tool_use("toolu_B", **CITY)),
            user(tool_result("toolu_A")),
        ),
        text="messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_B. " + NEXT,
    ),
    Case(
        name="text before the result",
        body=asking(HELLO, assistant(tool_use("toolu_A", **CITY)), user("Here:", tool_result("toolu_A"))),
        text="messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_A. " + NEXT,
    ),
    Case(
        name="calls at the end",
        body=asking(HELLO, assistant(tool_use("toolu_A", **CITY))),
        text="messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_A. " + NEXT,
    ),
    Case(
        name="orphan result",
        body=asking(HELLO, assistant("Yes"), user("And", tool_result("toolu_X"))),
        text="messages.2.content.1: unexpected `tool_use_id` found in `tool_result` blocks: toolu_X. " + PREVIOUS,
    ),
    Case(
        name="two results for one call",
        body=asking(
            HELLO, assistant(tool_use("toolu_A", **CITY)), user(tool_result("toolu_A"), tool_result("toolu_A"))
        ),
        text="messages.2.content.1: each tool_use must have a single result. Found multiple `tool_result` blocks with "
        "id: toolu_A",
    ),
    Case(
        name="the same id twice",
        body=asking(
            HELLO,
            assistant(tool_use("toolu_A", **CITY)),
            user(tool_result("toolu_A")),
            assistant(tool_use("toolu_A", **CITY)),
            user(tool_result("toolu_A")),
        ),
        text="messages.3.content.0: `tool_use` ids must be unique",
    ),
    Case(
        name="a call of the user",
        body=asking(user(tool_use("toolu_A", **CITY))),
        text="messages.0.content.0: `tool_use` blocks can only be in `assistant` messages",
    ),
    Case(
        name="server tool unresolved",
        body=asking(
            HELLO,
            assistant({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}),
            HELLO,
        ),
        text="`web_search` tool use with id `srvtoolu_1` was found without a corresponding `web_search_tool_result` "
        "block",
    ),
    Case(
        name="document of the assistant",
        body=asking(
            HELLO,
            assistant({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}),
            HELLO,
        ),
        text="messages.1.content.0: `document` blocks can only be in `user` messages",
    ),
    Case(
        name="citations of the user",
        body=asking(user({"type": "text", "text": "Hello", "citations": [{"type": "char_location"}]})),
        text="messages.0.content.0.text.citations: Extra inputs are not permitted",
    ),
]

SYSTEM_MESSAGES = [
    Case(
        name="not on this model",
        body=asking(HELLO, system("Be kind."), model="claude-sonnet-5"),
        text='messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, not '
        '"system" as an input message role.',
    ),
    Case(
        name="first",
        body=asking(system("Be kind."), HELLO),
        text='messages: first message must use the "user" role',
    ),
    Case(
        name="before a user message",
        body=asking(HELLO, system("Be kind."), HELLO),
        text="messages.1: role 'system' must precede an 'assistant' message or end the array",
    ),
    Case(
        name="after an assistant message",
        body=asking(HELLO, assistant("Yes"), system("Be kind.")),
        text="messages.2: role 'system' must follow a 'user' message or an 'assistant' message that ends with a server "
        "tool result",
    ),
    Case(
        name="between a call and its result",
        body=asking(HELLO, assistant(tool_use("toolu_A", **CITY)), system("Be kind."), user(tool_result("toolu_A"))),
        text="messages.2: role 'system' must follow a 'user' message or an 'assistant' message that ends with a server "
        "tool result",
    ),
    Case(
        name="clear_at of a user message",
        body=asking({**HELLO, "clear_at": "next_user_message"}),
        betas=CLEAR_AT,
        text="messages.0.clear_at: Extra inputs are not permitted",
    ),
    Case(
        name="clear_at with a cache marker",
        body=asking(HELLO, system(marked("Be kind."), clear_at="next_user_message")),
        betas=CLEAR_AT,
        text="messages.1.content.0.cache_control: cache_control cannot be set in a message with `clear_at`",
    ),
]

MODELS = [
    Case(
        name="enabled",
        body=thinking("enabled", FABLE, budget_tokens=1_024),
        text=f'"thinking.type.enabled" {NO_ENABLED}',
    ),
    Case(
        name="enabled on 4.7",
        body=thinking("enabled", "claude-opus-4-7", budget_tokens=1_024),
        text=f'"thinking.type.enabled" {NO_ENABLED}',
    ),
    Case(name="disabled", body=thinking("disabled", OPUS), text=f'"thinking.type.disabled" {NO_ENABLED}'),
    Case(
        name="disabled on Sonnet 5.5",
        body=thinking("disabled", "claude-sonnet-5-5"),
        text=f'"thinking.type.disabled" {NO_ENABLED}',
    ),
    Case(
        name="adaptive on an old one",
        body=thinking("adaptive", MANUAL),
        text="adaptive thinking is not supported on this model",
    ),
    Case(
        name="between_tools",
        body=thinking("between_tools", OPUS),
        text='"thinking.type.between_tools" is not supported for this model.',
    ),
    Case(
        name="xhigh without thinking",
        body={**thinking("disabled", "claude-haiku-5-5"), "output_config": {"effort": "xhigh"}},
        text="output_config.effort 'xhigh' is not supported when thinking is disabled on this model. Use effort 'high' "
        "or below, or enable thinking.",
    ),
    Case(
        name="effort where there is none",
        body=asking(HELLO, model=MANUAL, output_config={"effort": "low"}),
        text="This model does not support the effort parameter.",
    ),
    Case(
        name="small budget",
        body=thinking("enabled", MANUAL, budget_tokens=100),
        text="thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
    ),
    Case(
        name="budget as large as the output",
        body={**thinking("enabled", MANUAL, budget_tokens=2_000), "max_tokens": 2_000},
        text="`max_tokens` must be greater than `thinking.budget_tokens`. Please consult our documentation at "
        "https://docs.claude.com/en/docs/build-with-claude/extended-thinking#max-tokens-and-context-window-size",
    ),
    Case(
        name="manual mode begins with thinking",
        body={
            **asking(HELLO, assistant(tool_use("toolu_A", **CITY)), user(tool_result("toolu_A")), model=MANUAL),
            "max_tokens": 4_000,
            "thinking": {"type": "enabled", "budget_tokens": 1_024},
        },
        text="messages.1.content.0.type: Expected 'thinking' or 'redacted_thinking', but found 'tool_use'. When "
        "'thinking' is enabled, a final 'assistant' message must start with a thinking block (preceeding the lastmost "
        "set of 'tool_use' and 'tool_result' blocks). To avoid this requirement, disable 'thinking'.",
    ),
    Case(
        name="forced tool",
        body=asking(HELLO, model=OPUS, tools=[WEATHER], tool_choice={"type": "any"}),
        text='tool_choice: type "tool" and "any" are not supported for this model.',
    ),
    Case(
        name="forced tool with thinking",
        body=asking(
            HELLO,
            model=OLD_OPUS,
            tools=[WEATHER],
            tool_choice={"type": "tool", "name": "get_weather"},
            thinking={"type": "adaptive"},
        ),
        text="Thinking may not be enabled when tool_choice forces tool use.",
    ),
    Case(
        name="tool choice without tools",
        body=asking(HELLO, tool_choice={"type": "auto"}),
        text="tool_choice may only be specified while providing tools",
    ),
]

CACHE = [
    Case(
        name="five markers",
        body=asking(user(*(marked(f"Part {number}") for number in range(5)))),
        text="A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    Case(
        name="four markers and an automatic one",
        body=asking(
            user(*(marked(f"Part {number}") for number in range(4)), "and this"), cache_control={"type": "ephemeral"}
        ),
        text="A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    Case(
        name="short before long",
        body=asking(user(marked("Once", "1h")), system=[marked("Be kind.", "5m")]),
        text="messages.0.content.0.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
        "cache_control block. Note that blocks are processed in the following order: `tools`, `system`, `messages`.",
    ),
    Case(
        name="automatic with another time",
        body=asking(user(marked("Once", "1h")), cache_control={"type": "ephemeral"}),
        text="Top-level cache_control has ttl='5m' but the target block already has cache_control with ttl='1h'",
    ),
    Case(
        name="on thinking",
        body=asking(
            HELLO,
            assistant({"type": "thinking", "thinking": "", "signature": "x", "cache_control": {"type": "ephemeral"}}),
            HELLO,
        ),
        text="messages.1.content.0.thinking.cache_control: Extra inputs are not permitted",
    ),
    Case(
        name="on empty text",
        body=asking(user("Hello", marked(""))),
        text="messages.0.content.1.text: cache_control cannot be set for empty text blocks",
    ),
    Case(
        name="unknown time",
        body=asking(user(marked("Hello", "2h"))),
        text="messages.0.content.0.text.cache_control.ttl: Input should be '5m' or '1h'",
    ),
]


@pytest.fixture(scope="module")
async def emulator() -> AsyncIterator[AnthropicEmulator]:
    async with anthropic_emulator() as running:
        yield running


@pytest.mark.parametrize(
    "case", [*FIELDS, *TALK, *SYSTEM_MESSAGES, *MODELS, *CACHE], ids=lambda case: case.name.replace(" ", "-")
)
async def test_a_broken_rule_is_a_400_with_the_documented_text(emulator: AnthropicEmulator, case: Case) -> None:
    assert await emulator.refusal(case.body, betas=case.betas) == case.text


@pytest.mark.parametrize(
    "case",
    [case for case in [*TALK, *SYSTEM_MESSAGES, *CACHE] if not case.betas],
    ids=lambda case: case.name.replace(" ", "-"),
)
async def test_counting_tokens_runs_the_same_checks(emulator: AnthropicEmulator, case: Case) -> None:
    body = {key: value for key, value in case.body.items() if key != "max_tokens"}
    assert await emulator.refusal(body, path="/v1/messages/count_tokens") == case.text


ACCEPTED = [
    Case(name="string content", body=asking({"role": "user", "content": "Hello"}, system="Be kind."), text=""),
    Case(name="consecutive user messages", body=asking(HELLO, HELLO), text=""),
    Case(
        name="results over two user messages",
        body=asking(
            HELLO,
            assistant(tool_use("toolu_A", **CITY), tool_use("toolu_B", **CITY)),
            user(tool_result("toolu_B")),
            user(tool_result("toolu_A", [{"type": "text", "text": "rain"}], is_error=True), "Well?"),
        ),
        text="",
    ),
    Case(name="system message at the end", body=asking(HELLO, system("Be kind.")), text=""),
    Case(name="system message in the middle", body=asking(HELLO, system("Be kind."), assistant("Yes"), HELLO), text=""),
    Case(
        name="turn-scoped system message",
        body=asking(HELLO, system("Be kind.", clear_at="next_user_message"), assistant("Yes"), HELLO),
        betas=CLEAR_AT,
        text="",
    ),
    Case(name="prefill on an old model", body=asking(HELLO, assistant("I am"), model=MANUAL), text=""),
    Case(name="thinking off by default", body=asking(HELLO, model="claude-opus-4-8"), text=""),
    Case(name="between_tools on Sonnet 5.5", body=thinking("between_tools", "claude-sonnet-5-5"), text=""),
    Case(name="disabled on Haiku 5.5", body=thinking("disabled", "claude-haiku-5-5"), text=""),
    Case(name="effort", body=asking(HELLO, output_config={"effort": "max"}), text=""),
    Case(
        name="forced tool on an old model",
        body=asking(HELLO, model=OLD_OPUS, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}),
        text="",
    ),
    Case(
        name="everything else",
        body=asking(
            HELLO,
            metadata={"user_id": "u1"},
            stop_sequences=["never"],
            service_tier="auto",
            diagnostics={"previous_message_id": None},
            inference_geo="us",
            tools=[{**WEATHER, "strict": True, "type": "custom"}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        ),
        text="",
    ),
]


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name.replace(" ", "-"))
async def test_documented_requests_are_accepted(emulator: AnthropicEmulator, case: Case) -> None:
    answer = await emulator.accepts(case.body, betas=case.betas)
    assert answer["stop_reason"] in {"end_turn", "tool_use"}


async def test_sampling_parameters_are_fine_under_the_older_version(emulator: AnthropicEmulator) -> None:
    await emulator.accepts(asking(HELLO, temperature=0.5, top_p=0.9, top_k=5), version="2023-06-01")


def server_call(name: str = "web_search") -> dict[str, Any]:
    return {"type": "server_tool_use", "id": "srvtoolu_1", "name": name, "input": {}}


def server_result(name: str = "web_search") -> dict[str, Any]:
    return {"type": f"{name}_tool_result", "tool_use_id": "srvtoolu_1", "content": []}


UNRESOLVED = (
    "`web_search` tool use with id `srvtoolu_1` was found without a corresponding `web_search_tool_result` block"
)
CALLED = assistant(server_call(), tool_use("toolu_1", **CITY))
RESULT = user(tool_result("toolu_1"))


async def test_a_server_tool_may_wait_for_the_results_of_a_client_tool(emulator: AnthropicEmulator) -> None:
    answer = await emulator.accepts(asking(HELLO, CALLED, RESULT, tools=[WEATHER]))
    assert answer["content"][0]["type"] == "web_search_tool_result"
    assert answer["content"][0]["tool_use_id"] == "srvtoolu_1"
    later = assistant(server_result(), {"type": "text", "text": "Cold."})
    await emulator.accepts(asking(HELLO, CALLED, RESULT, later, HELLO, tools=[WEATHER]))


@pytest.mark.parametrize(
    "messages",
    [
        [HELLO, assistant(server_call()), HELLO],
        [HELLO, CALLED, user(tool_result("toolu_1"), "Well?")],
        [HELLO, CALLED, RESULT, assistant({"type": "text", "text": "Cold."}), HELLO],
    ],
    ids=["nothing goes on with it", "text beside the results", "the next answer has no result"],
)
async def test_a_server_tool_that_is_not_continued_is_refused(emulator: AnthropicEmulator, messages: list[Any]) -> None:
    assert await emulator.refusal(asking(*messages, tools=[WEATHER])) == UNRESOLVED


async def test_only_the_paused_answer_itself_is_continued(emulator: AnthropicEmulator) -> None:
    body = asking(HELLO)
    answer = await emulator.accepts(body, fault="pause")
    assert answer["stop_reason"] == "pause_turn"
    assert answer["content"][-1]["type"] == "server_tool_use"
    message = {"role": "assistant", "content": answer["content"]}
    going_on = await emulator.accepts(asking(HELLO, message))
    assert going_on["content"][0]["tool_use_id"] == answer["content"][-1]["id"]
    altered = {"role": "assistant", "content": [*answer["content"][:-1], {"type": "text", "text": "Mine."}]}
    assert "prefill" in await emulator.refusal(asking(HELLO, altered))


async def test_paused_code_needs_its_container(emulator: AnthropicEmulator) -> None:
    waiting = assistant(server_call("code_execution"), tool_use("toolu_1", **CITY))
    body = asking(HELLO, waiting, RESULT, tools=[WEATHER])
    assert (await emulator.refusal(body)).startswith("container_id is required")
    assert await emulator.refusal({**body, "container": "c"}) == "container: Container `c` was not found"


async def test_a_result_repeats_the_toolset_of_its_call(emulator: AnthropicEmulator) -> None:
    called = assistant({**tool_use("toolu_1", **CITY), "toolset_name": "north"})
    text = "messages.2.content.0.toolset_name: does not match the `toolset_name` of the `tool_use` block"
    assert await emulator.refusal(asking(HELLO, called, RESULT, tools=[WEATHER])) == text
    named = user({**tool_result("toolu_1"), "toolset_name": "north"})
    await emulator.accepts(asking(HELLO, called, named, tools=[WEATHER]))
