"""A task with tools that run here: the model asks, they answer, until it has nothing more to ask."""

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.turn import TurnState
from server.web.client.answers import TurnEnded
from server.web.client.errors import AnswerMalformed, ToolRoundsExceeded, TurnFailed
from server.web.client.event import ClientEvent
from server.web.client.requests import Task, ToolResult, TurnOptions
from server.web.client.turn_stream import TurnStream

ToolFunction: TypeAlias = Callable[..., Awaitable[JsonValue] | JsonValue]
"""Called with the model's arguments by name. A plain function runs in a thread, so it may wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRan:
    """A tool gave its result, which goes to the model with those of the other calls."""

    call: ToolCallBlock
    result: ToolResult


LoopEvent: TypeAlias = ClientEvent | ToolRan


class OpensStreams(Protocol):
    """What a loop needs of a client."""

    def stream(
        self,
        conversation_id: str,
        task: Task | None = None,
        *,
        tool_results: Sequence[ToolResult] | None = None,
        options: TurnOptions | None = None,
    ) -> AbstractAsyncContextManager[TurnStream]: ...


class ToolLoop:
    """Gives the events of every turn of the loop, and between turns a `ToolRan` for each call.

    What a tool raises is a result too, marked as an error: the model can do something about it. Calls of one turn run
    side by side and their results go back in one request, in the order of the calls.
    """

    def __init__(self, opener: OpensStreams, start: "LoopStart", tools: Mapping[str, ToolFunction]) -> None:
        self._opener = opener
        self._start = start
        self._tools = tools
        self._ended: TurnEnded | None = None
        self._events = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._events.aclose()

    def __aiter__(self) -> AsyncIterator[LoopEvent]:
        return self._events

    async def result(self) -> TurnEnded:
        """Reads to the end and gives how the last turn ended. Raises `TurnFailed` where it failed."""
        async for _ in self._events:
            pass
        if self._ended is None:
            raise AnswerMalformed("The loop was left before a turn had ended.")
        if self._ended.turn.state in {TurnState.FAILED, TurnState.INTERRUPTED}:
            raise TurnFailed(self._ended)
        return self._ended

    async def _run(self) -> AsyncGenerator[LoopEvent, None]:
        task: Task | None = self._start.task
        results: list[ToolResult] | None = None
        for number in range(self._start.max_rounds):
            async with self._opener.stream(
                self._start.conversation_id, task, tool_results=results, options=self._start.options_of(number)
            ) as stream:
                async for event in stream:
                    if isinstance(event, TurnEnded):
                        self._ended = event
                    yield event
            calls = self._ended.conversation.pending_tool_calls if self._ended is not None else ()
            if not calls:
                return
            task, results = None, []
            for call, result in zip(
                calls, await asyncio.gather(*(call_tool(self._tools, call) for call in calls)), strict=True
            ):
                results.append(result)
                yield ToolRan(call=call, result=result)
        raise ToolRoundsExceeded(
            f"The model has asked for tools {self._start.max_rounds} times in a row.",
            hint="Send the results of its last calls, or a new task that abandons them.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStart:
    """What a loop begins with."""

    conversation_id: str
    task: Task
    options: TurnOptions
    max_rounds: int

    def options_of(self, number: int) -> TurnOptions:
        """The revision is expected of the first turn alone, and each has a key of its own."""
        if number == 0:
            return self.options
        key = f"{self.options.idempotency_key}.{number}" if self.options.idempotency_key else None
        return replace(self.options, expected_revision=None, abandon_pending_calls=False, idempotency_key=key)


async def call_tool(tools: Mapping[str, ToolFunction], call: ToolCallBlock) -> ToolResult:
    """The result of one call, an error or not. Never raises but for cancellation."""
    tool = tools.get(call.name)
    if tool is None:
        return _failure(call, f"There is no tool called {call.name}.")
    try:
        output = await _run_function(tool, call.arguments)
        json.dumps(output, allow_nan=False)
    # A tool is a stranger's code: whatever it raises is an answer that the model can read and act on.
    except Exception as error:  # noqa: BLE001  reason: handed to the model
        return _failure(call, f"{type(error).__name__}: {error}")
    return ToolResult(tool_call_id=call.id, output=output)


async def _run_function(tool: ToolFunction, arguments: Mapping[str, JsonValue]) -> JsonValue:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    given: Any = await asyncio.to_thread(tool, **arguments)
    return await given if inspect.isawaitable(given) else given


def _failure(call: ToolCallBlock, sentence: str) -> ToolResult:
    return ToolResult(tool_call_id=call.id, output=sentence, is_error=True)
