"""A typed, async Python client for a Strata server, which resumes broken streams.

    async with StrataClient("http://127.0.0.1:8400", key) as client:
        async with client.stream(conversation_id, "Hello") as stream:
            async for event in stream:
                ...

`client` has one method per route, `stream` the events of a turn, `tool_loop` a task with local tools, `connection` HTTP
and retries, `requests` and `answers` the values that are sent and received. The names in `__all__` are the public
surface; `strata chat` uses nothing else. docs/guides/python-client.md is the guide.
"""

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions, Tool
from server.conversation.conversation import ConversationDraft, OnBusy
from server.conversation.event import (
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    TurnStarted,
    UsageReported,
)
from server.web.client.answers import (
    Compaction,
    CompactionReport,
    Conversation,
    ConversationStatus,
    Erasure,
    Turn,
    TurnEnded,
    TurnError,
    TurnStart,
)
from server.web.client.client import StrataClient
from server.web.client.connection import RetryBudget, Timeouts
from server.web.client.errors import (
    AnswerMalformed,
    ClientError,
    ServerUnreachable,
    StrataProblem,
    ToolRoundsExceeded,
    TurnFailed,
)
from server.web.client.requests import (
    AssistantDraft,
    ConversationChange,
    ImagePart,
    Task,
    TextPart,
    ToolResult,
    TurnOptions,
)
from server.web.client.stream import ClientEvent, TurnStream, UnknownEvent
from server.web.client.tool_loop import ToolFunction, ToolLoop, ToolRan, call_tool

__all__ = [
    "AnswerMalformed",
    "Assistant",
    "AssistantDefinition",
    "AssistantDraft",
    "ClientError",
    "ClientEvent",
    "Compaction",
    "CompactionReport",
    "Conversation",
    "ConversationChange",
    "ConversationDraft",
    "ConversationStatus",
    "Erasure",
    "ImagePart",
    "Instructions",
    "OnBusy",
    "RetryBudget",
    "ServerUnreachable",
    "StrataClient",
    "StrataProblem",
    "Task",
    "TextDelta",
    "TextPart",
    "ThinkingDelta",
    "Timeouts",
    "Tool",
    "ToolCallBegin",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolFunction",
    "ToolLoop",
    "ToolRan",
    "ToolResult",
    "ToolRoundsExceeded",
    "Turn",
    "TurnEnded",
    "TurnError",
    "TurnFailed",
    "TurnOptions",
    "TurnStart",
    "TurnStarted",
    "TurnStream",
    "UnknownEvent",
    "UsageReported",
    "call_tool",
]
