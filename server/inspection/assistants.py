"""Assistants for operators: rows of the lists, one version with its use, and the difference between two versions."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final

from server.conversation.assistant import Assistant, AssistantDefinition, Tool
from server.conversation.block import JsonValue
from server.inspection.differences import TextDifference, compare_lines

COUNT_CAP: Final = 1000
"""Conversations are counted up to this number. A count that equals it means that many or more."""
_ONE_LINE_CHARS: Final = 120
"""Longer values are compared line by line."""
_MAX_CHANGES: Final = 200
_MAX_ROWS: Final = 3000
"""Rows of all fields together."""
_PLAIN: Final = ("name", "provider", "model", "language", "description")
_INSTRUCTIONS: Final = ("roles", "procedure", "constraints")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantOutline:
    """An assistant in a list, as of its newest version."""

    id: str
    tenant_id: str
    tenant_name: str
    name: str
    provider: str
    model: str
    version: int
    version_count: int
    conversation_count: int
    """At most `COUNT_CAP`."""
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOutline:
    """A version of an assistant in a list."""

    version: int
    created_at: datetime
    name: str
    provider: str
    model: str
    tool_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedAssistant:
    """One version of an assistant, and how many conversations use which version."""

    tenant_id: str
    tenant_name: str
    assistant: Assistant
    newest_version: int
    conversation_counts: Mapping[int, int]
    """Conversations by version, among the newest `COUNT_CAP` of the assistant."""


class ChangeKind(StrEnum):
    """How a field changed."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


class CacheEffect(StrEnum):
    """How switching a conversation to the other version affects the provider's cache."""

    NONE = "none"
    """The static text and the tools do not change."""
    NEW_PREFIX = "new_prefix"
    """The static text or the tools may change: the prefix is written to the cache again."""
    OTHER_MODEL = "other_model"
    """Models do not share a cache: everything is written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """A field that differs."""

    path: str
    """`model`, `instructions.roles`, `tools.get_weather`, `settings.thinking`."""
    change: ChangeKind
    old: str | None = None
    """The value as JSON. None if it was missing, or is long and compared in `lines`."""
    new: str | None = None
    lines: TextDifference | None = None
    """For texts and long values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDifference:
    """All fields that differ, in the order of a definition."""

    changes: tuple[FieldChange, ...]
    left_out_count: int
    """Changes at the end that were omitted."""
    cache_effect: CacheEffect


def compare_definitions(old: AssistantDefinition, new: AssistantDefinition) -> AssistantDifference:
    """Compare two definitions. The order of keys and tools counts, because it is part of the cached prefix."""
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
        cache_effect=_find_cache_effect({change.path for change in changes}),
    )


def write_json(value: JsonValue) -> str:
    """Render indented JSON with the keys in their order."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def describe_tool(tool: Tool) -> dict[str, JsonValue]:
    """Return a tool as a definition contains it."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _shorten(changes: Iterable[FieldChange]) -> Iterator[FieldChange]:
    """Truncate the changes to `_MAX_ROWS` rows."""
    left = _MAX_ROWS
    for change in changes:
        lines = change.lines
        if lines is not None and len(lines.rows) > left:
            yield replace(change, lines=replace(lines, rows=lines.rows[:left], is_cut=True))
        else:
            yield change
        left -= 0 if lines is None else min(left, len(lines.rows))


def _find_cache_effect(paths: set[str]) -> CacheEffect:
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
                path=f"instructions.{name}", change=_kind_of(before, after), lines=compare_lines(before, after)
            )


def _compare_mappings(path: str, old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> Iterator[FieldChange]:
    names = [*old, *(name for name in new if name not in old)]
    changed = False
    for name in names:
        field = f"{path}.{name}"
        if name not in new:
            changed = True
            yield _single(field, ChangeKind.REMOVED, old[name])
        elif name not in old:
            changed = True
            yield _single(field, ChangeKind.ADDED, new[name])
        elif json.dumps(old[name]) != json.dumps(new[name]):
            changed = True
            yield _change(field, old[name], new[name])
    if not changed and list(old) != list(new):
        yield _by_lines(path, ChangeKind.CHANGED, write_json(list(old)), write_json(list(new)))


def _compare_tools(old: Sequence[Tool], new: Sequence[Tool]) -> Iterator[FieldChange]:
    before = {tool.name: write_json(describe_tool(tool)) for tool in old}
    after = {tool.name: write_json(describe_tool(tool)) for tool in new}
    for name in [*before, *(name for name in after if name not in before)]:
        one, other = before.get(name, ""), after.get(name, "")
        if one != other:
            yield _by_lines(f"tools.{name}", _kind_of(one, other), one, other)
    shared = [name for name in before if name in after]
    if shared != [name for name in after if name in before]:
        yield _by_lines("tools", ChangeKind.CHANGED, "\n".join(before), "\n".join(after))


def _change(path: str, old: JsonValue, new: JsonValue) -> FieldChange:
    before, after = (json.dumps(value, ensure_ascii=False) for value in (old, new))
    if max(len(before), len(after)) <= _ONE_LINE_CHARS:
        return FieldChange(path=path, change=ChangeKind.CHANGED, old=before, new=after)
    if isinstance(old, str) and isinstance(new, str):
        return _by_lines(path, ChangeKind.CHANGED, old, new)
    return _by_lines(path, ChangeKind.CHANGED, write_json(old), write_json(new))


def _single(path: str, change: ChangeKind, value: JsonValue) -> FieldChange:
    text = json.dumps(value, ensure_ascii=False)
    is_new = change is ChangeKind.ADDED
    if len(text) <= _ONE_LINE_CHARS:
        return FieldChange(path=path, change=change, old=None if is_new else text, new=text if is_new else None)
    text = value if isinstance(value, str) else write_json(value)
    return _by_lines(path, change, "" if is_new else text, text if is_new else "")


def _by_lines(path: str, change: ChangeKind, old: str, new: str) -> FieldChange:
    return FieldChange(path=path, change=change, lines=compare_lines(old, new))


def _kind_of(old: str, new: str) -> ChangeKind:
    if not old:
        return ChangeKind.ADDED
    return ChangeKind.CHANGED if new else ChangeKind.REMOVED
