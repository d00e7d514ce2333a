"""Scripts: the replies of the emulated model, in YAML.

A script is a list of steps, or a mapping with that list under `steps`. A step is a reply or a fault:

    - text: Hello.                        # `thinking` and `tool_calls` are optional
    - when: weather                       # only if the newest user text contains it, ignoring case
      tool_calls:
        - name: get_weather
          arguments: {city: Paris}
    - fault: rate_limited                 # with `retry_after` (seconds), `after_chunks`, `message`
      times: 2
      then:                               # the next step or steps; they inherit `when`
        text: Here I am again.

Each request takes the first matching step that is not used up. A step matches by `when`, `after_tools` (whether the
newest content holds tool results) and `at` (the number of the model request, from 1). `times` says how often a step is
used: 1 by default, `always` for no limit. If no step matches, the emulator improvises.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from server.emulator.faults import FaultInvalid, build_fault
from server.emulator.reply import Reply, ToolCall, Turn

_CONDITIONS: Final = frozenset({"when", "after_tools", "at", "times"})
_REPLY_KEYS: Final = frozenset({"thinking", "text", "tool_calls", "server_calls"})
_FAULT_KEYS: Final = frozenset(
    {"fault", "after_chunks", "retry_after", "message", "body_base64", "status", "content_type", "then"}
)
_CALL_KEYS: Final = frozenset({"name", "arguments", "toolset_name"})
_ALWAYS: Final = "always"


class ScriptInvalid(ValueError):
    """The script is not valid. The message names the line."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One step, with the number of uses left."""

    turn: Turn
    when: str = ""
    after_tools: bool | None = None
    at: int | None = None
    times_left: float = 1

    def fits(self, request_number: int, prompt: str, *, after_tools: bool) -> bool:
        return (
            self.times_left > 0
            and self.when.casefold() in prompt.casefold()
            and self.after_tools in {None, after_tools}
            and self.at in {None, request_number}
        )


class Script:
    """The steps that are not used up."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)

    def take(self, request_number: int, prompt: str, *, after_tools: bool) -> Turn | None:
        """The step for this request, or None if no step matches."""
        for step in self._steps:
            if step.fits(request_number, prompt, after_tools=after_tools):
                step.times_left -= 1
                return step.turn
        return None


def load_script(source: Path | str) -> Script:
    """Load a script from a file or from a text. Raises `ScriptInvalid`."""
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ScriptInvalid(f"This is not YAML: {error}") from error
    if root is None:
        return Script(())
    if isinstance(root, yaml.MappingNode):
        fields = _fields(root, frozenset({"steps"}))
        root = fields.get("steps", root)
    return Script([step for node in _items(root, "A script") for step in _read_step(node, {})])


def _read_step(node: yaml.Node, inherited: dict[str, Any]) -> Iterator[Step]:
    fields = _fields(node, _CONDITIONS | _REPLY_KEYS | _FAULT_KEYS)
    is_fault = "fault" in fields
    stray = set(fields) - _CONDITIONS - (_FAULT_KEYS if is_fault else _REPLY_KEYS)
    if stray:
        kind = "fault" if is_fault else "reply"
        raise ScriptInvalid(f"{_place(node)}: a {kind} has no {', '.join(sorted(stray))}.")
    conditions = {**inherited, **_read_conditions(fields)}
    yield Step(turn=_read_fault(fields, node) if is_fault else _read_reply(fields, node), **conditions)
    if "then" in fields:
        following = fields["then"]
        nodes = following.value if isinstance(following, yaml.SequenceNode) else [following]
        kept = {"when": conditions["when"]} if "when" in conditions else {}
        for later in nodes:
            yield from _read_step(later, kept)


def _read_conditions(fields: dict[str, yaml.Node]) -> dict[str, Any]:
    conditions: dict[str, Any] = {}
    if "when" in fields:
        conditions["when"] = _text(fields["when"], "when")
    if "after_tools" in fields:
        conditions["after_tools"] = _value(fields["after_tools"], bool, "after_tools is true or false")
    if "at" in fields:
        conditions["at"] = _value(fields["at"], int, "at is the number of a request")
    if "times" in fields:
        times = _construct(fields["times"])
        if times != _ALWAYS and (type(times) is not int or times < 1):
            raise ScriptInvalid(f"{_place(fields['times'])}: times is a number from 1, or `always`.")
        conditions["times_left"] = float("inf") if times == _ALWAYS else times
    return conditions


def _read_fault(fields: dict[str, yaml.Node], node: yaml.Node) -> Turn:
    try:
        return build_fault(
            kind=_construct(fields["fault"]),
            after_chunks=_construct(fields["after_chunks"]) if "after_chunks" in fields else 0,
            retry_after_seconds=_construct(fields["retry_after"]) if "retry_after" in fields else None,
            message=_construct(fields["message"]) if "message" in fields else "",
            **{name: _construct(fields[name]) for name in ("body_base64", "status", "content_type") if name in fields},
        )
    except FaultInvalid as error:
        raise ScriptInvalid(f"{_place(node)}: {error}") from error


def _read_reply(fields: dict[str, yaml.Node], node: yaml.Node) -> Turn:
    if not set(fields) & _REPLY_KEYS:
        raise ScriptInvalid(f"{_place(node)}: a step is a reply (thinking, text, tool_calls, server_calls) or a fault.")
    calls, server_calls = (
        tuple(_read_call(call) for call in (_items(fields[name], name) if name in fields else []))
        for name in ("tool_calls", "server_calls")
    )
    return Reply(
        thinking=_text(fields["thinking"], "thinking") if "thinking" in fields else "",
        text=_text(fields["text"], "text") if "text" in fields else "",
        tool_calls=calls,
        server_calls=server_calls,
    )


def _read_call(node: yaml.Node) -> ToolCall:
    fields = _fields(node, _CALL_KEYS)
    if "name" not in fields:
        raise ScriptInvalid(f"{_place(node)}: a tool call has a name.")
    arguments = _value(fields["arguments"], dict, "arguments is a mapping") if "arguments" in fields else {}
    toolset = _text(fields["toolset_name"], "toolset_name") if "toolset_name" in fields else ""
    return ToolCall(name=_text(fields["name"], "name"), arguments=arguments, toolset_name=toolset)


def _fields(node: yaml.Node, known: frozenset[str]) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise ScriptInvalid(f"{_place(node)}: expected a mapping with some of {', '.join(sorted(known))}.")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value not in known:
            raise ScriptInvalid(f"{_place(key)}: unknown key {key.value!r}; there are {', '.join(sorted(known))}.")
        fields[key.value] = value
    return fields


def _items(node: yaml.Node, name: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise ScriptInvalid(f"{_place(node)}: {name} is a list.")
    return list(node.value)


def _text(node: yaml.Node, name: str) -> str:
    text: str = _value(node, str, f"{name} is a text; put it in quotes")
    return text


def _value(node: yaml.Node, kind: type, rule: str) -> Any:
    value = _construct(node)
    if type(value) is not kind:
        raise ScriptInvalid(f"{_place(node)}: {rule}, not {value!r}.")
    return value


def _construct(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_object(node, deep=True)


def _place(node: yaml.Node) -> str:
    return f"Line {node.start_mark.line + 1}"
