"""The differences between two versions of an assistant."""

from typing import Any

import pytest

from server.conversation.assistant import Instructions, Tool
from server.inspection.assistants import CacheEffect, ChangeKind, compare_definitions
from tests.support.builders import definition


def tool(name: str, **properties: Any) -> Tool:
    return Tool(name=name, description="Does it.", parameters={"type": "object", "properties": properties})


def changes_of(old: Any, new: Any) -> dict[str, tuple[str, str | None, str | None]]:
    changes = compare_definitions(old, new).changes
    return {change.path: (change.change.value, change.old, change.new) for change in changes}


def test_a_version_does_not_differ_from_itself() -> None:
    difference = compare_definitions(definition(), definition())
    assert (difference.changes, difference.cache_effect) == ((), CacheEffect.NONE)


def test_settings_and_variables_are_compared_by_name() -> None:
    old = definition(settings={"thinking": "low", "top_p": 1}, variables={"tone": "kind"})
    new = definition(settings={"thinking": "high", "limit": None}, variables={})
    assert changes_of(old, new) == {
        "variables.tone": ("removed", '"kind"', None),
        "settings.thinking": ("changed", '"low"', '"high"'),
        "settings.top_p": ("removed", "1", None),
        "settings.limit": ("added", None, "null"),
    }


def test_texts_and_tools_are_compared_line_by_line() -> None:
    old = definition(instructions=Instructions(roles="One.\nTwo."), tools=(tool("look"), tool("book")))
    new = definition(instructions=Instructions(roles="One.\nThree."), tools=(tool("look", city={}),))
    changes = {change.path: change for change in compare_definitions(old, new).changes}
    assert list(changes) == ["instructions.roles", "tools.look", "tools.book"]
    assert [change.change for change in changes.values()] == [
        ChangeKind.CHANGED,
        ChangeKind.CHANGED,
        ChangeKind.REMOVED,
    ]
    lines = changes["instructions.roles"].lines
    assert lines is not None
    assert [row.text for row in lines.rows] == ["One.", "Two.", "Three."]


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ({"settings": {"a": 1, "b": 2}}, {"settings": {"b": 2, "a": 1}}, "settings"),
        ({"variables": {"v": {"a": 1, "b": 2}}}, {"variables": {"v": {"b": 2, "a": 1}}}, "variables.v"),
        ({"tools": (tool("a"), tool("b"))}, {"tools": (tool("b"), tool("a"))}, "tools"),
        ({"tools": (tool("t", a={}, b={}),)}, {"tools": (tool("t", b={}, a={}),)}, "tools.t"),
    ],
)
def test_another_order_is_a_difference(old: dict[str, Any], new: dict[str, Any], path: str) -> None:
    assert list(changes_of(definition(**old), definition(**new))) == [path]


@pytest.mark.parametrize(
    ("changes", "effect"),
    [
        ({"settings": {"thinking": "high"}}, CacheEffect.NONE),
        ({"description": "Other."}, CacheEffect.NEW_PREFIX),
        ({"tools": ()}, CacheEffect.NEW_PREFIX),
        ({"variables": {}}, CacheEffect.NEW_PREFIX),
        ({"instructions": Instructions()}, CacheEffect.NEW_PREFIX),
        ({"model": "other", "tools": ()}, CacheEffect.OTHER_MODEL),
        ({"provider": "anthropic"}, CacheEffect.OTHER_MODEL),
    ],
)
def test_the_effect_on_the_cache_follows_from_the_change(changes: dict[str, Any], effect: CacheEffect) -> None:
    assert compare_definitions(definition(), definition(**changes)).cache_effect is effect


def test_the_difference_has_a_maximum_size() -> None:
    big = {str(number): "line\n" * 200 for number in range(1000)}
    difference = compare_definitions(definition(variables={}), definition(variables=big))
    assert len(difference.changes) == 200
    assert difference.left_out_count == 800
    assert sum(len(change.lines.rows) for change in difference.changes if change.lines) <= 3000
