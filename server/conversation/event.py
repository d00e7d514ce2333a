"""Events: what a stream means.

A provider's stream gives, in the order in which the model writes:

| event             | fields                       | when                                                             |
|-------------------|------------------------------|------------------------------------------------------------------|
| `ThinkingDelta`   | text                         | some reasoning                                                   |
| `TextDelta`       | text                         | some of the answer                                               |
| `ToolCallBegin`   | call_id, name                | a call begins                                                    |
| `ToolCallDelta`   | call_id, arguments_json      | some of its arguments, as JSON text; Gemini sends none           |
| `ToolCallEnd`     | call_id, name, arguments     | the call is whole                                                |
| `UsageReported`   | usage                        | the provider said what it took; the last one counts              |

Events are purely semantic. That a stream failed is no event: it is raised, and what had arrived is in the snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from server.conversation.block import JsonValue
from server.conversation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingDelta:
    """Some reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Some of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallBegin:
    """A call begins."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """Some of a call's arguments, as JSON text."""

    call_id: str
    arguments_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnd:
    """A call is whole."""

    call_id: str
    name: str
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReported:
    """What the provider says it took so far."""

    usage: Usage


ProviderEvent: TypeAlias = ThinkingDelta | TextDelta | ToolCallBegin | ToolCallDelta | ToolCallEnd | UsageReported
