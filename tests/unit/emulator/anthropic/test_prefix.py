"""Which requests have the same prefix."""

import copy
from typing import Any

import pytest

from server.emulator.anthropic.prefix import close_prefix, open_prefix

_BODY: dict[str, Any] = {
    "system": "Be kind.",
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}],
    "messages": [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1, "b": {"cache_control": 1}}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "done"}]},
    ],
}


def digest(body: dict[str, Any]) -> str:
    return close_prefix(body["messages"], open_prefix(body).prefix).digest


def changed(*path: Any, to: Any) -> dict[str, Any]:
    body = copy.deepcopy(_BODY)
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return body


@pytest.mark.parametrize(
    "body",
    [
        changed("system", to=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]),
        changed("messages", 0, "content", to=[{"type": "text", "text": "Hello", "citations": None}]),
        changed("messages", 1, "content", 0, "signature", to="other"),
        changed("messages", 1, "content", 1, "input", to={"b": {"cache_control": 1}, "a": 1.0}),
        changed("messages", 2, "content", 0, "content", to=[{"type": "text", "text": "done"}]),
        changed("max_tokens", to=5),
    ],
)
def test_these_prefixes_are_the_same(body: dict[str, Any]) -> None:
    assert digest(body) == digest(_BODY)


@pytest.mark.parametrize(
    "body",
    [
        changed("system", to="Be kind!"),
        changed("tools", 0, "name", to="g"),
        changed("messages", 0, "content", to="Hello "),
        changed("messages", 1, "content", 1, "id", to="2"),
        changed("messages", 1, "content", 1, "input", "b", to={}),
        changed("messages", 2, "content", 0, "is_error", to=True),
        changed("messages", 2, "role", to="assistant"),
    ],
)
def test_these_prefixes_differ(body: dict[str, Any]) -> None:
    assert digest(body) != digest(_BODY)


def test_splitting_a_message_changes_nothing_but_splitting_a_text_does() -> None:
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = {"messages": [{"role": "user", "content": two}]}
    split = {"messages": [{"role": "user", "content": [one]} for one in two]}
    assert digest(joined) == digest(split)
    assert digest(joined) != digest({"messages": [{"role": "user", "content": "ab"}]})
