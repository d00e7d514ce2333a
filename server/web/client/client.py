"""The client: one method per route under `/v1`."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar
from urllib.parse import quote
from uuid import uuid4

from server.conversation.assistant import Assistant
from server.conversation.block import JsonValue
from server.conversation.conversation import ConversationDraft
from server.web.client.answers import (
    Compaction,
    CompactionReport,
    Conversation,
    Erasure,
    Turn,
    TurnEnded,
    TurnStart,
    assistant_from_json,
    compaction_from_json,
    compaction_report_from_json,
    conversation_from_json,
    erasure_from_json,
    turn_from_json,
    turn_start_from_json,
)
from server.web.client.connection import Connection, OnRetry, Request, RetryBudget, Timeouts, decoding
from server.web.client.requests import (
    AssistantDraft,
    ConversationChange,
    Task,
    ToolResult,
    TurnOptions,
    assistant_body,
    change_body,
    conversation_body,
    turn_body,
)
from server.web.client.stream import TurnStream
from server.web.client.tool_loop import ToolFunction, ToolLoop

Item = TypeVar("Item")

_ASSISTANTS: Final = "/v1/assistants"
_CONVERSATIONS: Final = "/v1/conversations"
_PAGE_LIMIT: Final = 100
_MAX_ROUNDS: Final = 50


class StrataClient:
    """A client of one server with one key. Use it as an async context manager, from one event loop.

    Every method raises `ClientError`: `StrataProblem` if the server refuses the request, `ServerUnreachable` if it does
    not answer. Requests that are safe to repeat are repeated within the retry budget. Lists are read page by page as
    they are iterated.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeouts: Timeouts | None = None,
        retry_budget: RetryBudget | None = None,
        on_retry: OnRetry | None = None,
    ) -> None:
        self._connection = Connection(
            base_url,
            api_key,
            timeouts=timeouts or Timeouts(),
            retry_budget=retry_budget or RetryBudget(),
            on_retry=on_retry,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    # --- assistants

    async def create_assistant(self, draft: AssistantDraft) -> Assistant:
        request = Request(method="POST", path=_ASSISTANTS, body=assistant_body(draft))
        return await self._one(request, assistant_from_json)

    async def revise_assistant(self, assistant_id: str, draft: AssistantDraft) -> Assistant:
        """Create the next version, or return the current one if nothing differs."""
        request = Request(method="PUT", path=_assistant(assistant_id), body=assistant_body(draft), repeatable=True)
        return await self._one(request, assistant_from_json)

    async def load_assistant(self, assistant_id: str, version: int | None = None) -> Assistant:
        """Load the newest version, or the given one."""
        query = _given(version=version)
        return await self._one(_get(_assistant(assistant_id), query), assistant_from_json)

    def list_assistants(self) -> AsyncIterator[Assistant]:
        """List all assistants in their newest versions."""
        return self._pages(_ASSISTANTS, {}, assistant_from_json)

    # --- conversations

    async def create_conversation(self, draft: ConversationDraft) -> Conversation:
        request = Request(method="POST", path=_CONVERSATIONS, body=conversation_body(draft))
        return await self._one(request, conversation_from_json)

    async def load_conversation(self, conversation_id: str) -> Conversation:
        return await self._one(_get(_conversation(conversation_id)), conversation_from_json)

    def list_conversations(
        self,
        *,
        assistant_id: str | None = None,
        identifier: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> AsyncIterator[Conversation]:
        """List the conversations that match all filters, newest first."""
        query = _given(
            assistant_id=assistant_id,
            identifier=identifier,
            created_after=created_after.isoformat() if created_after else None,
            created_before=created_before.isoformat() if created_before else None,
        )
        return self._pages(_CONVERSATIONS, query, conversation_from_json)

    async def change_conversation(self, conversation_id: str, change: ConversationChange) -> Conversation:
        request = Request(method="PATCH", path=_conversation(conversation_id), body=change_body(change))
        return await self._one(request, conversation_from_json)

    async def replace_context(
        self, conversation_id: str, context: Mapping[str, JsonValue], *, expected_revision: int | None = None
    ) -> Conversation:
        """Replace the content of the dynamic layer."""
        headers = {"if-match": f'"{expected_revision}"'} if expected_revision is not None else {}
        request = Request(
            method="PUT",
            path=f"{_conversation(conversation_id)}/context",
            body=dict(context),
            headers=headers,
            repeatable=expected_revision is None,
        )
        return await self._one(request, conversation_from_json)

    async def delete_conversation(self, conversation_id: str, *, dry_run: bool = False) -> Erasure:
        """Erase a conversation; with `dry_run` only count the rows."""
        request = Request(
            method="DELETE",
            path=_conversation(conversation_id),
            query={"dry_run": "true"} if dry_run else {},
            repeatable=dry_run,
        )
        return await self._one(request, erasure_from_json)

    async def fork_conversation(self, conversation_id: str, at_seq: int) -> Conversation:
        """Create a conversation with the turns up to and including `at_seq`."""
        request = Request(method="POST", path=f"{_conversation(conversation_id)}/fork", body={"at_seq": at_seq})
        return await self._one(request, conversation_from_json)

    # --- compactions

    async def compact_conversation(
        self, conversation_id: str, *, force: bool = False, dry_run: bool = False
    ) -> CompactionReport:
        """Apply the compaction policy now; with `force` move every exchange that may be moved."""
        request = Request(
            method="POST",
            path=_compactions(conversation_id),
            body={"force": force, "dry_run": dry_run},
            repeatable=dry_run,
        )
        return await self._one(request, compaction_report_from_json)

    def list_compactions(self, conversation_id: str) -> AsyncIterator[Compaction]:
        """List all compactions, newest first."""
        return self._pages(_compactions(conversation_id), {}, compaction_from_json)

    async def undo_compaction(self, conversation_id: str) -> CompactionReport:
        """Undo the latest compaction."""
        request = Request(method="DELETE", path=f"{_compactions(conversation_id)}/latest")
        return await self._one(request, compaction_report_from_json)

    # --- turns

    def list_turns(self, conversation_id: str, *, order: Literal["asc", "desc"] = "asc") -> AsyncIterator[Turn]:
        """List all turns."""
        return self._pages(_turns(conversation_id), {"order": order}, turn_from_json)

    async def load_turn(self, conversation_id: str, seq: int) -> Turn:
        """Load one turn. The state of a running one is `running`."""
        return await self._one(_get(f"{_turns(conversation_id)}/{seq}"), turn_from_json)

    async def send(
        self,
        conversation_id: str,
        task: Task | None = None,
        *,
        tool_results: Sequence[ToolResult] | None = None,
        options: TurnOptions | None = None,
    ) -> TurnEnded:
        """Take a turn and wait for its end. Raises `TurnFailed` if it failed.

        Reads the stream, so that a connection that breaks during a long wait does not matter.
        """
        async with self.stream(conversation_id, task, tool_results=tool_results, options=options) as stream:
            return await stream.result()

    def stream(
        self,
        conversation_id: str,
        task: Task | None = None,
        *,
        tool_results: Sequence[ToolResult] | None = None,
        options: TurnOptions | None = None,
    ) -> TurnStream:
        """Return a context manager that takes a turn when it is entered and iterates over its events."""
        return TurnStream(self._connection, _take(conversation_id, task, tool_results, options or TurnOptions()))

    async def start(
        self,
        conversation_id: str,
        task: Task | None = None,
        *,
        tool_results: Sequence[ToolResult] | None = None,
        options: TurnOptions | None = None,
    ) -> TurnStart:
        """Take a turn without waiting for it. Use `follow` or `load_turn` for its result."""
        request = _take(conversation_id, task, tool_results, options or TurnOptions(), prefer="respond-async")
        answer, headers = await self._connection.fetch_with_headers(request)
        with decoding("turn"):
            return turn_start_from_json(answer, replayed="idempotency-replayed" in headers)

    def follow(self, conversation_id: str, seq: int, *, after: int = 0) -> TurnStream:
        """Return the events of a running or ended turn that come after number `after`."""
        request = _get(f"{_turns(conversation_id)}/{seq}/events")
        return TurnStream(self._connection, request, seq=seq, last_event_id=after)

    async def cancel(self, conversation_id: str, turn_seq: int | None = None) -> TurnStart:
        """Cancel the running turn and keep the part that has arrived. Its state is `running` if it has not ended."""
        request = Request(
            method="POST", path=f"{_conversation(conversation_id)}/cancel", body=_given(turn_seq=turn_seq)
        )
        return await self._one(request, lambda answer: turn_start_from_json(answer, replayed=False))

    def run_tools(
        self,
        conversation_id: str,
        task: Task,
        tools: Mapping[str, ToolFunction],
        *,
        options: TurnOptions | None = None,
        max_rounds: int = _MAX_ROUNDS,
    ) -> ToolLoop:
        """Take a turn, run the tools that the model calls, send their results, and repeat until it calls none."""
        return ToolLoop(
            partial(self.stream, conversation_id), task, tools, options=options or TurnOptions(), max_rounds=max_rounds
        )

    async def _one(self, request: Request, decode: Callable[[Mapping[str, Any]], Item]) -> Item:
        answer = await self._connection.fetch(request)
        with decoding(f"answer to {request.method} {request.path}"):
            return decode(answer)

    async def _pages(
        self, path: str, query: Mapping[str, str | int], decode: Callable[[Mapping[str, Any]], Item]
    ) -> AsyncIterator[Item]:
        cursor: str | None = None
        while True:
            page = await self._connection.fetch(_get(path, {**query, "limit": _PAGE_LIMIT, **_given(cursor=cursor)}))
            with decoding(f"list at {path}"):
                items = [decode(item) for item in page["data"]]
                cursor = page["next_cursor"]
            for item in items:
                yield item
            if cursor is None:
                return


def _take(
    conversation_id: str,
    task: Task | None,
    tool_results: Sequence[ToolResult] | None,
    options: TurnOptions,
    prefer: str | None = None,
) -> Request:
    headers = {"idempotency-key": options.idempotency_key or str(uuid4())}
    if prefer is not None:
        headers["prefer"] = prefer
    return Request(
        method="POST",
        path=_turns(conversation_id),
        body=turn_body(task, tool_results, options),
        headers=headers,
        repeatable=True,
    )


def _get(path: str, query: Mapping[str, str | int] | None = None) -> Request:
    return Request(method="GET", path=path, query=query or {}, repeatable=True)


def _given(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _assistant(assistant_id: str) -> str:
    return f"{_ASSISTANTS}/{quote(assistant_id, safe='')}"


def _conversation(conversation_id: str) -> str:
    return f"{_CONVERSATIONS}/{quote(conversation_id, safe='')}"


def _compactions(conversation_id: str) -> str:
    return f"{_conversation(conversation_id)}/compactions"


def _turns(conversation_id: str) -> str:
    return f"{_conversation(conversation_id)}/turns"
