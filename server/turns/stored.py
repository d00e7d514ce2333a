"""A turn as it is in the store: one that has ended, or one that another process runs.

What has arrived of the answer is read as bytes and folded here, by the same fold that the running process uses, so the
events and their numbers are the same. While the turn runs, the store says that there is more; when it has ended, the
rest comes from the call's own bytes.
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
"""How often the store is asked when no news comes: news may be lost."""
_OK: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLibrary:
    """What reading stored turns takes."""

    store: Store
    notifications: Notifications
    folds: Mapping[str, OpenFold]
    """By provider; of all that there are, whether or not this process has their keys."""
    _shared: "WeakValueDictionary[tuple[str, str, int], StoredEvents]" = field(default_factory=WeakValueDictionary)

    def share_events(self, handle: "StoredHandle") -> "StoredEvents":
        """The events of the turn: those that others read already, for as long as anybody does."""
        key = (handle.tenant_id, handle.conversation_id, handle.seq)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = StoredEvents(handle)
        return shared

    async def find_answer(self, tenant_id: str, conversation_id: str, seq: int) -> ModelResponseTurn | None:
        """The answer, if it is durable.

        Raises `ConversationNotFound`; `TurnNotFound` where the number is an input's.
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
    """The bytes of the calls that a call continues, in order; None where they are gone. `calls`: of the same turn."""
    ends = {other.start.attempt: other.end for other in calls}
    found = [ends.get(attempt) for attempt in continued_attempts(call.start)]
    return [None if end is None else end.raw_response for end in found]


def is_stream(call: Call) -> bool:
    """Whether the call's bytes are a stream of the model's, and not the body of an error."""
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
    """How far the bytes of the running call have been read."""

    attempt: int = 1
    offset: int = 0
    fold: Fold | None = None
    readable: bool = True
    """False once the stream has said something that ends it."""
    said: bool = False
    """Whether the call has said anything."""
    held: list[ProviderEvent] = field(default_factory=list)
    """Usage that was reported before anything was said: until then the call may still be made again."""


class StoredEvents:
    """The events of a stored turn as far as this process knows them.

    All readers of the turn share them, so that its bytes are read and folded once, and not for each of them.
    """

    def __init__(self, handle: StoredHandle) -> None:
        self.events: list[TurnEvent] = [
            TurnStarted(conversation_id=handle.conversation_id, input_seq=handle.input_seq, seq=handle.seq)
        ]
        self.encodings: dict[int, bytes] = {}
        """See `server.turns.handle.EventReader`."""
        self.ended: TurnEnded | None = None
        """Once it is the last of the events."""
        self._handle = handle
        self._body = _Body()
        self._looking = asyncio.Lock()

    @property
    def _given_count(self) -> int:
        """How many events of the model are known."""
        return len(self.events) - 1

    async def look(self, known: int) -> None:
        """Asks the store for more events than the `known` ones. A look that is cancelled loses none."""
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
        """What the running call has said since the last look; of a new attempt from its beginning."""
        handle, body = self._handle, self._body
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

    def _fold(self, piece: bytes) -> list[ProviderEvent]:
        body = self._body
        if body.fold is None or not body.readable:
            return []
        events, body.readable = fold_events(body.fold, piece)
        body.offset += len(piece)
        if not body.said:
            body.held.extend(events)
            if all(isinstance(event, UsageReported) for event in events):
                return []
            body.said = True
            events, body.held = body.held, []
        return events

    async def _open_fold(self, attempt: int) -> tuple[Fold | None, list[ProviderEvent]]:
        """A fold for the bytes of an attempt, and the events of the paused attempts that it continues, if any."""
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
        # What was folded is as large as the answer, and of no use any more.
        self._body = _Body()

    async def _rest_of(self, turn: ModelResponseTurn) -> list[ProviderEvent]:
        """What the answer's bytes say beyond what was given out; from the turn itself where the bytes are gone."""
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
        body.said, held = True, body.held
        return [*held, *self._fold(raw[body.offset :])]


class StoredReader:
    """Implements `server.turns.handle.EventReader`."""

    def __init__(self, handle: StoredHandle, after: int) -> None:
        self._handle = handle
        self._place = max(after, 0)
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
        """The next events that are known; none after the last one, with which the reader closes. None: not yet."""
        if self._done:
            return ()
        shared, first = self._shared, self._place
        if first < len(shared.events):
            self._place = min(first + MAX_BATCH, len(shared.events))
            found = list(enumerate(shared.events[first : self._place], start=first + 1))
        elif shared.ended is None:
            return None
        elif shared.ended.turn.state is TurnState.INTERRUPTED:
            # The process that died had given out more than it had written down. The listener must hear the end all the
            # same, under a number that it has not heard.
            found = [(first + 1, shared.ended)]
        else:
            found = []
        if shared.ended is not None and self._place >= len(shared.events):
            self.close()
        return found


def events_of_blocks(turn: ModelResponseTurn) -> Iterator[ProviderEvent]:
    """A turn told in whole blocks. Their numbers are not those of the stream that it once was."""
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
