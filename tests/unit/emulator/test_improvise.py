"""What the emulated model invents: calls of the tools that the prompt means, arguments within their schemas, answers
about results.
"""

from typing import Any

import jsonschema
import pytest

from server.emulator.improvise import ToolOffer, build_value, improvise
from server.emulator.reply import ToolCall

WEATHER = ToolOffer(
    name="get_weather",
    description="Current weather of a city",
    schema={"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]},
)
SEARCH = ToolOffer(
    name="search_documents",
    description="Looks into the archive",
    schema={"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
)


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [
        ("What is the weather in Paris?", [ToolCall(name="get_weather", arguments={"city": "Paris"})]),
        (
            "Compare the weather in Paris and New York.",
            [
                ToolCall(name="get_weather", arguments={"city": "Paris"}),
                ToolCall(name="get_weather", arguments={"city": "New York"}),
            ],
        ),
        (
            'Use search_documents for "cache prefix", 5 results',
            [ToolCall(name="search_documents", arguments={"query": "cache prefix", "limit": 5})],
        ),
        ("How are you?", []),
    ],
)
def test_the_tools_that_the_prompt_means_are_called(prompt: str, calls: list[ToolCall]) -> None:
    assert list(improvise(prompt, 0, [WEATHER, SEARCH], []).tool_calls) == calls


def test_two_tools_can_be_meant_at_once() -> None:
    reply = improvise("Search the documents about weather in Oslo", 0, [WEATHER, SEARCH], [])

    assert [call.name for call in reply.tool_calls] == ["get_weather", "search_documents"]


def test_results_become_an_answer() -> None:
    reply = improvise("What is the weather in Paris?", 2, [WEATHER], ['{"output": "18 degrees"}', "plain"])

    assert reply.tool_calls == ()
    assert "18 degrees" in reply.text
    assert "plain" in reply.text


def test_an_answer_depends_only_on_the_question() -> None:
    assert improvise("Tell me about owls", 0, [], []) == improvise("Tell me about owls", 0, [], [])
    assert "owls" in improvise("Tell me about owls", 0, [], []).text
    assert improvise("", 0, [], []).text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["null", "integer"]},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "integer"}},
        {
            "type": "object",
            "properties": {"a": {"type": "object", "properties": {"b": {"type": "number"}}}, "c": {"type": "string"}},
            "required": ["a"],
        },
    ],
)
def test_values_are_what_their_schema_allows(schema: dict[str, Any]) -> None:
    jsonschema.validate(build_value(schema, "x", "Give me 3.5 of b"), schema)
