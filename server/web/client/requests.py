"""Values that a client sends, and their bodies. Types of `server.conversation` are used if there is one."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias, assert_never

from server.conversation.assistant import Instructions, Tool
from server.conversation.block import JsonValue
from server.conversation.conversation import ConversationDraft, OnBusy


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDraft:
    """A new assistant, or the next version of one. The server chooses the provider and the model if they are None."""

    name: str
    provider: str | None = None
    model: str | None = None
    language: str = ""
    description: str = ""
    instructions: Instructions = field(default_factory=Instructions)
    variables: Mapping[str, JsonValue] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    settings: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChange:
    """Changes of a conversation. Members that are None are not changed."""

    assistant_version: int | None = None
    """The version to continue with, unless `latest` is set."""
    latest: bool = False
    args: Mapping[str, JsonValue] | None = None
    context: Mapping[str, JsonValue] | None = None
    metadata: Mapping[str, JsonValue] | None = None
    expected_revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Text in a task."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """An image in a task. The server detects its type from the bytes."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one tool call."""

    tool_call_id: str
    output: JsonValue
    is_error: bool = False


Task: TypeAlias = str | Sequence[TextPart | ImagePart]
"""New input of the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of a turn."""

    on_busy: OnBusy = OnBusy.REJECT
    expected_revision: int | None = None
    args: Mapping[str, JsonValue] | None = None
    """Prompt arguments for this turn only."""
    language: str | None = None
    abandon_pending_calls: bool = False
    """Accept a new task although tool calls wait for results."""
    idempotency_key: str | None = None
    """None: the client creates one. It is needed to repeat a request whose answer was lost."""


def assistant_body(draft: AssistantDraft) -> dict[str, JsonValue]:
    """Build the body of POST and PUT of an assistant."""
    return {name: value for name, value in asdict(draft).items() if value is not None}


def conversation_body(draft: ConversationDraft) -> dict[str, JsonValue]:
    """Build the body of POST /v1/conversations."""
    return {name: value for name, value in asdict(draft).items() if value is not None and value != {}}


def change_body(change: ConversationChange) -> dict[str, JsonValue]:
    """Build the body of PATCH of a conversation."""
    body = {name: value for name, value in asdict(change).items() if value is not None and name != "latest"}
    return {**body, "assistant_version": "latest"} if change.latest else body


def turn_body(
    task: Task | None, tool_results: Sequence[ToolResult] | None, options: TurnOptions
) -> dict[str, JsonValue]:
    """Build the body of POST of a turn. Raises `ValueError` unless there is either a task or tool results."""
    if (task is None) == (tool_results is None):
        raise ValueError("a turn has either a task or tool results")
    body: dict[str, JsonValue] = {"on_busy": options.on_busy.value}
    if tool_results is not None:
        body["tool_results"] = [asdict(result) for result in tool_results]
    elif isinstance(task, str):
        body["input"] = task
    else:
        body["input"] = [_part(part) for part in task or ()]
    for name in ("expected_revision", "args", "language"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    if options.abandon_pending_calls:
        body["abandon_pending_calls"] = True
    return body


def _part(part: TextPart | ImagePart) -> dict[str, JsonValue]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():
            return {"type": "image", "data": base64.b64encode(part.data).decode()}
        case _:
            assert_never(part)
