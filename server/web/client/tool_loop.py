"""A task whose tools run in the client: call the model, run the tools that it calls, send their results, repeat."""

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from server.conversation.block import JsonValue, ToolCallBlock
from server.web.client.answers import TurnEnded
from server.web.client.errors import ToolRoundsExceeded
from server.web.client.requests import Task, ToolResult, TurnOptions
from server.web.client.stream import ClientEvent, TurnStream, check_ended

ToolFunction: TypeAlias = Callable[..., Awaitable[JsonValue] | JsonValue]
"""Called with the model's arguments as keywords. A plain function runs in a thread, so it may block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRan:
    """A tool has returned; its result is sent together with those of the other calls."""

    call: ToolCallBlock
    result: ToolResult


LoopEvent: TypeAlias = ClientEvent | ToolRan


class ToolLoop:
    """An iterator over the events of every turn of the loop and, between turns, a `ToolRan` for each call.

    An exception of a tool becomes a result that is marked as an error, so that the model can react to it. The calls of
    one turn run concurrently; their results are sent in one request, in the order of the calls. Iterating raises
    `ToolRoundsExceeded` after `max_rounds` turns that end with calls.
    """

    def __init__(
        self,
        open_stream: Callable[..., TurnStream],
        task: Task,
        tools: Mapping[str, ToolFunction],
        *,
        options: TurnOptions,
        max_rounds: int,
    ) -> None:
        """`open_stream` is `StrataClient.stream` for one conversation."""
        self._open_stream = open_stream
        self._task = task
        self._tools = tools
        self._options = options
        self._max_rounds = max_rounds
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
        """Read to the end and return how the last turn ended. Raises `TurnFailed` if it failed."""
        async for _ in self._events:
            pass
        return check_ended(self._ended)

    async def _run(self) -> AsyncGenerator[LoopEvent, None]:
        task: Task | None = self._task
        results: list[ToolResult] | None = None
        for number in range(self._max_rounds):
            async with self._open_stream(task, tool_results=results, options=self._options_of(number)) as stream:
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
            f"The model has called tools in {self._max_rounds} turns in a row.",
            hint="Send the results of its last calls, or a new task that abandons them.",
        )

    def _options_of(self, number: int) -> TurnOptions:
        """Return the options of a round. Only the first expects a revision, and each has its own idempotency key."""
        if number == 0:
            return self._options
        key = f"{self._options.idempotency_key}.{number}" if self._options.idempotency_key else None
        return replace(self._options, expected_revision=None, abandon_pending_calls=False, idempotency_key=key)


async def call_tool(tools: Mapping[str, ToolFunction], call: ToolCallBlock) -> ToolResult:
    """Run the tool of a call and return its result. Its exceptions become results that are marked as errors."""
    tool = tools.get(call.name)
    if tool is None:
        return _failure(call, f"There is no tool called {call.name}.")
    try:
        output = await _run_function(tool, call.arguments)
        json.dumps(output, allow_nan=False)
    # A tool may raise anything; the model gets the error as its result.
    except Exception as error:  # noqa: BLE001  reason: handed to the model
        return _failure(call, f"{type(error).__name__}: {error}")
    return ToolResult(tool_call_id=call.id, output=output)


async def _run_function(tool: ToolFunction, arguments: Mapping[str, JsonValue]) -> JsonValue:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    returned: Any = await asyncio.to_thread(tool, **arguments)
    return await returned if inspect.isawaitable(returned) else returned


def _failure(call: ToolCallBlock, message: str) -> ToolResult:
    return ToolResult(tool_call_id=call.id, output=message, is_error=True)
