"""A turn as it is in the store: one that has ended, or one that another process runs.

The stored bytes of the answer are folded here by the same fold that the running process uses, so the events and their
numbers are the same. While the turn runs, its checkpoints are read; after it has ended, the rest is read from the bytes
of the call.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from server.conversation.block import Block, TextBlock, ThinkingBlock, ToolCallBlock
from server.conversation.call import Call
from server.conversation.errors import TurnNotFound
from server.conversation.event import (
    ProviderEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallEnd,
    TurnEnded,
    TurnEvent,
    TurnStarted,
    UsageReported,
    build_turn_ended,
)
from server.conversation.notifications import Notification, Notifications, Watch
from server.conversation.store import Store
from server.conversation.turn import ModelResponseTurn, TurnState
from server.providers.continuation import continued_attempts, fold_earlier, fold_events
from server.providers.provider import Fold
from server.turns.handle import MAX_BATCH

OpenFold: TypeAlias = Callable[[], Fold]

_LOOK_SECONDS: Final = 1.0
"""The store is read at least this often, because notifications may be lost."""
_GROWTH_SECONDS: Final = 30.0
"""How long the store announces the growth of a running turn after it was asked to."""
_REQUEST_SECONDS: Final = 10.0
"""How often the store is asked to, while the turn is read."""
_OK: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLibrary:
    """What is needed to read stored turns."""

    store: Store
    notifications: Notifications
    folds: Mapping[str, OpenFold]
    """By provider; of all providers, also of those that this process has no key for."""
    _shared: "WeakValueDictionary[tuple[str, str, int], StoredEvents]" = field(default_factory=WeakValueDictionary)

    def share_events(self, handle: "StoredHandle") -> "StoredEvents":
        """Return the events of the turn. All readers share them, as long as there is at least one reader."""
        key = (handle.tenant_id, handle.conversation_id, handle.seq)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = StoredEvents(handle)
        return shared

    async def find_answer(self, tenant_id: str, conversation_id: str, seq: int) -> ModelResponseTurn | None:
        """Return the answer, or None if it is not durable yet.

        Raises `ConversationNotFound`, and `TurnNotFound` if the number is that of an input.
        """
        try:
            turn = await self.store.load_turn(tenant_id, conversation_id, seq)
        except TurnNotFound:
            return None
        if not isinstance(turn, ModelResponseTurn):
            raise TurnNotFound(
                "This turn is input; it has no events.", hint=f"The answer to it is turn {seq + 1}: listen to that one."
            )
        return turn


def bodies_before(call: Call, calls: Sequence[Call]) -> list[bytes | None]:
    """Return the bytes of the calls that a call continues, in order; None for each whose bytes were deleted.

    `calls`: of the same turn.
    """
    ends = {other.start.attempt: other.end for other in calls}
    found = [ends.get(attempt) for attempt in continued_attempts(call.start)]
    return [None if end is None else end.raw_response for end in found]


def is_stream(call: Call) -> bool:
    """Return whether the bytes of the call are a stream, and not the body of an error."""
    return call.end is not None and call.end.status in {None, _OK}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHandle:
    """Implements `server.turns.handle.TurnHandle`."""

    library: TurnLibrary
    tenant_id: str
    conversation_id: str
    seq: int
    duplicate: bool = False

    @property
    def input_seq(self) -> int:
        return self.seq - 1

    def read(self, after: int = 0) -> "StoredReader":
        return StoredReader(self, after)

    async def wait(self) -> TurnEnded:
        library = self.library
        with library.notifications.watch(self.conversation_id, Notification.ENDED) as watch:
            while True:
                turn = await library.find_answer(self.tenant_id, self.conversation_id, self.seq)
                if turn is not None:
                    return build_turn_ended(self.conversation_id, turn)
                await watch.wait(_LOOK_SECONDS)


@dataclass(slots=True)
class _Body:
    """The progress of reading the bytes of the running call."""

    attempt: int = 1
    offset: int = 0
    fold: Fold | None = None
    readable: bool = True
    """False after an error in the stream."""
    has_content: bool = False
    """Whether the call has had an event other than usage."""
    held: list[ProviderEvent] = field(default_factory=list)
    """Usage that was reported before any content. Until there is content, the call may be retried."""


class StoredEvents:
    """The events of a stored turn that this process has read so far.

    All readers of the turn share them, so that its bytes are read and folded once.
    """

    def __init__(self, handle: StoredHandle) -> None:
        self.events: list[TurnEvent] = [
            TurnStarted(conversation_id=handle.conversation_id, input_seq=handle.input_seq, seq=handle.seq)
        ]
        self.encodings: dict[int, bytes] = {}
        """See `server.turns.handle.EventReader`."""
        self.ended: TurnEnded | None = None
        """Set when it is the last of the events."""
        self._handle = handle
        self._body = _Body()
        self._looking = asyncio.Lock()
        self._requested_at: float | None = None
        """When the store was last asked to announce growth."""

    @property
    def _given_count(self) -> int:
        """The number of events of the model that were read."""
        return len(self.events) - 1

    async def look(self, known: int) -> None:
        """Read more events from the store, unless there are more than `known` already. Cancelling it loses none."""
        handle = self._handle
        async with self._looking:
            if self.ended is not None or len(self.events) > known:
                return
            turn = await handle.library.find_answer(handle.tenant_id, handle.conversation_id, handle.seq)
            if turn is None:
                await self._read_chunks()
            else:
                await self._finish(turn)

    async def _read_chunks(self) -> None:
        """Read the new bytes of the running call; those of a new attempt from its beginning."""
        handle, body = self._handle, self._body
        await self._request_notifications()
        chunks = await handle.library.store.list_chunks(
            handle.tenant_id, handle.conversation_id, handle.seq, attempt=body.attempt, from_offset=body.offset
        )
        for chunk in chunks:
            if chunk.attempt != body.attempt or body.fold is None:
                fold, earlier = await self._open_fold(chunk.attempt)
                self.events.extend(earlier[self._given_count :])
                body = self._body = _Body(attempt=chunk.attempt, fold=fold)
            if chunk.offset == body.offset and body.fold is not None:
                self.events.extend(self._fold(chunk.data))

    async def _request_notifications(self) -> None:
        """Have the store announce growth from now on. Before the chunks are read, so that none is missed in between."""
        now = time.monotonic()
        if self._requested_at is not None and now - self._requested_at < _REQUEST_SECONDS:
            return
        handle = self._handle
        await handle.library.store.request_growth_notifications(
            handle.tenant_id, handle.conversation_id, handle.seq, seconds=_GROWTH_SECONDS
        )
        self._requested_at = now

    def _fold(self, piece: bytes) -> list[ProviderEvent]:
        body = self._body
        if body.fold is None or not body.readable:
            return []
        events, body.readable = fold_events(body.fold, piece)
        body.offset += len(piece)
        if not body.has_content:
            body.held.extend(events)
            if all(isinstance(event, UsageReported) for event in events):
                return []
            body.has_content = True
            events, body.held = body.held, []
        return events

    async def _open_fold(self, attempt: int) -> tuple[Fold | None, list[ProviderEvent]]:
        """Return a fold for the bytes of an attempt, and the events of the paused attempts that it continues."""
        handle = self._handle
        calls = await handle.library.store.list_calls(handle.tenant_id, handle.conversation_id, handle.seq)
        call = next((call for call in calls if call.start.attempt == attempt), None)
        open_fold = None if call is None else handle.library.folds.get(call.start.provider)
        if call is None or open_fold is None:
            return None, []
        fold, bodies = open_fold(), bodies_before(call, calls)
        return fold, fold_earlier(fold, [body or b"" for body in bodies])

    async def _finish(self, turn: ModelResponseTurn) -> None:
        rest = await self._rest_of(turn)
        self.ended = build_turn_ended(self._handle.conversation_id, turn)
        self.events.extend([*rest, self.ended])
        # The fold is as large as the answer and is no longer needed.
        self._body = _Body()

    async def _rest_of(self, turn: ModelResponseTurn) -> list[ProviderEvent]:
        """Return the events that were not read yet; from the blocks of the turn if its bytes were deleted."""
        handle, body = self._handle, self._body
        calls = await handle.library.store.list_calls(handle.tenant_id, handle.conversation_id, handle.seq)
        call = next((call for call in calls if call.start.attempt == turn.attempt), None)
        raw = None if call is None or call.end is None else call.end.raw_response
        earlier = [] if call is None else bodies_before(call, calls)
        if call is None or raw is None or None in earlier or call.start.provider not in handle.library.folds:
            return [] if self._given_count or call is None else list(events_of_blocks(turn))
        if earlier:
            fold = handle.library.folds[call.start.provider]()
            events = fold_earlier(fold, [body or b"" for body in earlier])
            events += fold_events(fold, raw)[0] if is_stream(call) else []
            return events[self._given_count :]
        if not is_stream(call):
            return []
        if body.fold is None or body.attempt != call.start.attempt:
            body = self._body = _Body(attempt=call.start.attempt, fold=handle.library.folds[call.start.provider]())
        body.has_content, held = True, body.held
        return [*held, *self._fold(raw[body.offset :])]


class StoredReader:
    """Implements `server.turns.handle.EventReader`."""

    def __init__(self, handle: StoredHandle, after: int) -> None:
        self._handle = handle
        self._index = max(after, 0)
        self._shared = handle.library.share_events(handle)
        self._watch: Watch | None = None
        self._done = False

    @property
    def encodings(self) -> dict[int, bytes]:
        return self._shared.encodings

    async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        if self._done:
            return None
        watch = self._watch or self._open_watch()
        deadline = time.monotonic() + limit_seconds
        looked = False
        while (found := self._take()) is None:
            left = deadline - time.monotonic()
            if looked and left <= 0:
                return ()
            if looked:
                await watch.wait(min(left, _LOOK_SECONDS))
            await self._shared.look(len(self._shared.events))
            looked = True
        return found or None

    def close(self) -> None:
        self._done = True
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def _open_watch(self) -> Watch:
        handle = self._handle
        self._watch = handle.library.notifications.watch(handle.conversation_id, Notification.GROWN, Notification.ENDED)
        self._watch.__enter__()
        return self._watch

    def _take(self) -> Sequence[tuple[int, TurnEvent]] | None:
        """Return the next events that were read; an empty list after the last one, and None if there are none yet.

        Closes the reader with the last event.
        """
        if self._done:
            return ()
        shared, first = self._shared, self._index
        if first < len(shared.events):
            self._index = min(first + MAX_BATCH, len(shared.events))
            found = list(enumerate(shared.events[first : self._index], start=first + 1))
        elif shared.ended is None:
            return None
        elif shared.ended.turn.state is TurnState.INTERRUPTED:
            # The process that died had sent more events than it had stored. The listener must get the end nevertheless,
            # with a number that it has not received.
            found = [(first + 1, shared.ended)]
        else:
            found = []
        if shared.ended is not None and self._index >= len(shared.events):
            self.close()
        return found


def events_of_blocks(turn: ModelResponseTurn) -> Iterator[ProviderEvent]:
    """Yield the events of a turn in whole blocks. Their numbers are not those of the original stream."""
    for block in turn.blocks:
        yield from _events_of(block)
    yield UsageReported(usage=turn.usage)


def _events_of(block: Block) -> Iterator[ProviderEvent]:
    match block:
        case TextBlock() if block.text:
            yield TextDelta(text=block.text)
        case ThinkingBlock() if block.text:
            yield ThinkingDelta(text=block.text)
        case ToolCallBlock():
            yield ToolCallBegin(call_id=block.id, name=block.name)
            yield ToolCallEnd(call_id=block.id, name=block.name, arguments=block.arguments)
        case _:
            return
