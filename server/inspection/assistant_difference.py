"""Two versions of an assistant side by side, field by field."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from server.conversation.assistant import AssistantDefinition, Tool
from server.conversation.block import JsonValue
from server.inspection.line_difference import LineDifference, compare_lines

_ONE_LINE_CHARS: Final = 120
"""Longer values are told line by line."""
_MAX_CHANGES: Final = 200
_MAX_ROWS: Final = 3000
"""Of all fields together."""
_PLAIN: Final = ("name", "provider", "model", "language", "description")
_INSTRUCTIONS: Final = ("roles", "procedure", "constraints")


class FieldFate(StrEnum):
    """What became of a field."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


class CacheEffect(StrEnum):
    """What a conversation that goes from the one version to the other does to the provider's cache."""

    NONE = "none"
    """The static text and the tools stay as they are."""
    NEW_PREFIX = "new_prefix"
    """The static text or the tools change, or can: the prefix is written to the cache again."""
    OTHER_MODEL = "other_model"
    """Another model knows nothing of what this one has cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """A field that is not the same in both."""

    path: str
    """`model`, `instructions.roles`, `tools.get_weather`, `settings.thinking`."""
    fate: FieldFate
    old: str | None = None
    """As JSON, where it is short; None where it was not there or `lines` tell it."""
    new: str | None = None
    lines: LineDifference | None = None
    """Of texts, and of what is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDifference:
    """All that is different, in the order of a definition."""

    changes: tuple[FieldChange, ...]
    left_out_count: int
    """Changes at the end that are not told."""
    cache_effect: CacheEffect


def compare_definitions(old: AssistantDefinition, new: AssistantDefinition) -> AssistantDifference:
    """Old to new. The order of keys and tools counts: models read it, and caches compare it."""
    changes = (
        *_compare_plain(old, new),
        *_compare_instructions(old, new),
        *_compare_mappings("variables", old.variables, new.variables),
        *_compare_tools(old.tools, new.tools),
        *_compare_mappings("settings", old.settings, new.settings),
    )
    return AssistantDifference(
        changes=tuple(_shorten(changes[:_MAX_CHANGES])),
        left_out_count=max(0, len(changes) - _MAX_CHANGES),
        cache_effect=_judge({change.path for change in changes}),
    )


def write_json(value: JsonValue) -> str:
    """JSON for people: indented, its keys in their order."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def describe_tool(tool: Tool) -> dict[str, JsonValue]:
    """A tool as it is written in a definition."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _shorten(changes: Iterable[FieldChange]) -> Iterator[FieldChange]:
    """The changes with no more rows than may be told."""
    room = _MAX_ROWS
    for change in changes:
        lines = change.lines
        if lines is not None and len(lines.rows) > room:
            yield replace(change, lines=replace(lines, rows=lines.rows[:room], is_cut=True))
        else:
            yield change
        room -= 0 if lines is None else min(room, len(lines.rows))


def _judge(paths: set[str]) -> CacheEffect:
    if paths & {"provider", "model"}:
        return CacheEffect.OTHER_MODEL
    is_outside = all(path.partition(".")[0] == "settings" for path in paths)
    return CacheEffect.NONE if is_outside else CacheEffect.NEW_PREFIX


def _compare_plain(old: AssistantDefinition, new: AssistantDefinition) -> Iterator[FieldChange]:
    for name in _PLAIN:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield _change(name, before, after)


def _compare_instructions(old: AssistantDefinition, new: AssistantDefinition) -> Iterator[FieldChange]:
    for name in _INSTRUCTIONS:
        before, after = getattr(old.instructions, name), getattr(new.instructions, name)
        if before != after:
            yield FieldChange(
                path=f"instructions.{name}", fate=_fate_of(before, after), lines=compare_lines(before, after)
            )


def _compare_mappings(path: str, old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> Iterator[FieldChange]:
    names = [*old, *(name for name in new if name not in old)]
    changed = False
    for name in names:
        place = f"{path}.{name}"
        if name not in new:
            changed = True
            yield _single(place, FieldFate.REMOVED, old[name])
        elif name not in old:
            changed = True
            yield _single(place, FieldFate.ADDED, new[name])
        elif json.dumps(old[name]) != json.dumps(new[name]):
            changed = True
            yield _change(place, old[name], new[name])
    if not changed and list(old) != list(new):
        yield _by_lines(path, FieldFate.CHANGED, write_json(list(old)), write_json(list(new)))


def _compare_tools(old: Sequence[Tool], new: Sequence[Tool]) -> Iterator[FieldChange]:
    before = {tool.name: write_json(describe_tool(tool)) for tool in old}
    after = {tool.name: write_json(describe_tool(tool)) for tool in new}
    for name in [*before, *(name for name in after if name not in before)]:
        one, other = before.get(name, ""), after.get(name, "")
        if one != other:
            yield _by_lines(f"tools.{name}", _fate_of(one, other), one, other)
    shared = [name for name in before if name in after]
    if shared != [name for name in after if name in before]:
        yield _by_lines("tools", FieldFate.CHANGED, "\n".join(before), "\n".join(after))


def _change(path: str, old: JsonValue, new: JsonValue) -> FieldChange:
    before, after = (json.dumps(value, ensure_ascii=False) for value in (old, new))
    if max(len(before), len(after)) <= _ONE_LINE_CHARS:
        return FieldChange(path=path, fate=FieldFate.CHANGED, old=before, new=after)
    if isinstance(old, str) and isinstance(new, str):
        return _by_lines(path, FieldFate.CHANGED, old, new)
    return _by_lines(path, FieldFate.CHANGED, write_json(old), write_json(new))


def _single(path: str, fate: FieldFate, value: JsonValue) -> FieldChange:
    text = json.dumps(value, ensure_ascii=False)
    is_new = fate is FieldFate.ADDED
    if len(text) <= _ONE_LINE_CHARS:
        return FieldChange(path=path, fate=fate, old=None if is_new else text, new=text if is_new else None)
    told = value if isinstance(value, str) else write_json(value)
    return _by_lines(path, fate, "" if is_new else told, told if is_new else "")


def _by_lines(path: str, fate: FieldFate, old: str, new: str) -> FieldChange:
    return FieldChange(path=path, fate=fate, lines=compare_lines(old, new))


def _fate_of(old: str, new: str) -> FieldFate:
    if not old:
        return FieldFate.ADDED
    return FieldFate.CHANGED if new else FieldFate.REMOVED
