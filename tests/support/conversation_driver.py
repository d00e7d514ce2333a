"""A conversation that is walked through step by step, and what must hold of all that was sent for it."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.app.wiring import Program
from server.conversation.block import Blob, Block, ImageBlock, TextBlock
from server.conversation.call import Call
from server.conversation.event import TurnEnded
from server.conversation.payload import Payload
from server.conversation.store import ConversationChange
from server.conversation.turn import ModelResponseTurn, Turn
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.inspection.past_payload import rebuild_call
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.providers.choice import ANTHROPIC, GEMINI
from server.replay.verify.verifier import Verifier, VerifyOptions
from server.turns.handle import TurnHandle
from tests.support.builders import definition
from tests.support.emulators import BOTH, MODELS, EmulatedProviders
from tests.support.turn_service_driver import WEATHER, open_conversation, say, tool_results, user_task

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)
_DIGEST = hashlib.sha256(PNG)
PICTURE = ImageBlock(media_type="image/png", sha256=_DIGEST.hexdigest(), size_bytes=len(PNG))
PICTURE_BLOB = Blob(sha256=_DIGEST.digest(), media_type="image/png", data=PNG)


def asks(*cities: str) -> Reply:
    """The model wants the weather of these cities, all at once."""
    calls = tuple(ToolCall(name="get_weather", arguments={"city": city}) for city in cities)
    return Reply(thinking=f"I have to know about {' and '.join(cities)}.", tool_calls=calls)


def tells(text: str) -> Reply:
    return Reply(thinking="That is easy.", text=text)


@dataclass(slots=True, kw_only=True)
class Walk:
    """One conversation with an assistant that has one tool."""

    program: Program
    tenant_id: str
    emulated: EmulatedProviders
    conversation_id: str
    assistant_id: str
    ended: TurnEnded | None = field(default=None)
    """Of the newest turn."""

    async def task(self, text: str, *replies: Reply, picture: bool = False, **changes: Any) -> TurnEnded:
        """Says something, and answers the model's calls until it has given all these replies."""
        self._arm(replies)
        blocks: tuple[Block, ...] = (TextBlock(text=text), *([PICTURE] if picture else []))
        blobs = (PICTURE_BLOB,) if picture else ()
        await self._say(user_task(self.conversation_id, blocks=blocks, blobs=blobs, **changes))
        for _ in replies[1:]:
            await self.answer()
        assert self.ended is not None
        return self.ended

    async def answer(self, *replies: Reply) -> TurnEnded:
        """The results that the model waits for."""
        assert self.ended is not None
        return await self.answer_calls([call.id for call in self.ended.conversation.pending_calls], *replies)

    async def answer_calls(self, call_ids: Sequence[str], *replies: Reply) -> TurnEnded:
        """The results of these calls."""
        self._arm(replies)
        return await self._say(tool_results(self.conversation_id, call_ids))

    async def fail(self, text: str, reply: Reply, *, after_chunks: int) -> TurnEnded:
        """A task whose answer breaks off on the way."""
        self._arm([reply])
        self._spoil(FaultKind.CUT, after_chunks=after_chunks)
        return await self._say(user_task(self.conversation_id, text))

    async def cancel(self, text: str, reply: Reply, *, after_events: int) -> TurnEnded:
        """A task whose answer is cancelled when so many of its events have come."""
        self._arm([reply])
        self._spoil(FaultKind.SILENCE, after_chunks=after_events + 2)
        handle = await self.program.turn_service.take_turn(self.tenant_id, user_task(self.conversation_id, text))
        await until_asked(self.emulated)
        await hear(handle, after_events)
        await self.program.turn_service.cancel_turn(self.tenant_id, self.conversation_id)
        self.ended = await handle.wait()
        self.calm()
        return self.ended

    async def switch(self, provider: str, model: str | None = None, **changes: Any) -> None:
        """Another model from the next task on."""
        values = {"provider": provider, "model": model or MODELS[provider], "tools": (WEATHER,), "settings": {}}
        revised = await self.program.store.revise_assistant(
            self.tenant_id, self.assistant_id, definition(**values | changes)
        )
        await self.change(assistant_version=revised.version)

    async def change(self, **changes: Any) -> None:
        await self.program.store.change_conversation(
            self.tenant_id, self.conversation_id, ConversationChange(**changes)
        )

    async def turns(self) -> list[Turn]:
        return await list_all_turns(self.program, self.tenant_id, self.conversation_id)

    async def calls(self) -> list[Call]:
        """Every call of a turn of the conversation, oldest first."""
        store = self.program.store
        answers = [turn for turn in await self.turns() if isinstance(turn, ModelResponseTurn)]
        return [
            call for turn in answers for call in await store.list_calls(self.tenant_id, self.conversation_id, turn.seq)
        ]

    async def background_calls(self) -> list[Call]:
        """Every call of no turn, oldest first."""
        store = self.program.store
        epoch = (await store.load_conversation(self.tenant_id, self.conversation_id)).epoch
        return [
            call
            for number in range(1, epoch + 1)
            for call in await store.list_calls(self.tenant_id, self.conversation_id, -number)
        ]

    async def natives(self) -> dict[int, Any]:
        """The answers that have something to send back, as their providers spoke them."""
        found = {}
        for turn in await self.turns():
            if isinstance(turn, ModelResponseTurn):
                native = await self.program.store.load_native(self.tenant_id, self.conversation_id, turn.seq)
                if native.data:
                    found[turn.seq] = json.loads(native.data)
        return found

    async def fork(self, at_seq: int) -> "Walk":
        made = await self.program.store.fork_conversation(self.tenant_id, self.conversation_id, at_seq)
        return Walk(
            program=self.program,
            tenant_id=self.tenant_id,
            emulated=self.emulated,
            conversation_id=made.id,
            assistant_id=self.assistant_id,
        )

    async def _say(self, request: Any) -> TurnEnded:
        self.ended = await say(self.program.turn_service, self.tenant_id, request)
        if not self.ended.conversation.pending_calls:
            self.calm()
        return self.ended

    # Both providers are told, since it is not the test that decides which of them is asked.

    def _arm(self, replies: Sequence[Reply]) -> None:
        for name in BOTH:
            self.emulated[name].says(*replies)

    def _spoil(self, kind: FaultKind, **options: Any) -> None:
        for name in BOTH:
            self.emulated[name].fails(kind, **options)

    def calm(self) -> None:
        for name in BOTH:
            self.emulated[name].lines.turns.clear()
            self.emulated[name].state.faults.clear()


async def begin_walk(
    program: Program, tenant_id: str, emulated: EmulatedProviders, provider: str, **changes: Any
) -> Walk:
    conversation = await open_conversation(program.store, tenant_id, provider, **changes)
    walk = Walk(
        program=program,
        tenant_id=tenant_id,
        emulated=emulated,
        conversation_id=conversation.id,
        assistant_id=conversation.assistant_id,
    )
    # What a walk before this one has left unsaid is not for this one.
    walk.calm()
    return walk


async def until_asked(emulated: EmulatedProviders) -> None:
    """Until a provider has met the fault that waits for it: a request that arrives later would meet the next one's."""

    async def met() -> bool:
        return any(not emulated[name].state.faults for name in BOTH)

    await eventually(met)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Looks often, and not for ever."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110  reason: what is waited for tells nobody
            await asyncio.sleep(0.005)


async def hear(handle: TurnHandle, event_count: int) -> None:
    """Until so many events of the answer have come."""
    reader = handle.read()
    heard = 0
    while heard < event_count + 1:
        events = await reader.next(10)
        assert events, "nothing came for too long"
        heard += len(events)


async def list_all_turns(program: Program, tenant_id: str, conversation_id: str) -> list[Turn]:
    turns: list[Turn] = []
    cursor = None
    while True:
        page = await program.store.list_turns(tenant_id, conversation_id, cursor=cursor, limit=100)
        turns.extend(page.items)
        if page.next_cursor is None:
            return turns
        cursor = page.next_cursor


def assert_all_accepted(requests: Sequence[Mapping[str, Any]]) -> None:
    """No provider has refused a request, but where it was told to. One that it has not answered yet has no status."""
    refused = [
        (request["number"], request["status"], request["body"])
        for request in requests
        if request["fault"] is None and request["status"] not in {None, 200}
    ]
    assert refused == []


def assert_no_break(calls: Sequence[Call]) -> None:
    """No request has begun otherwise than the one before it."""
    assert [call for call in calls if any(warning["kind"] == "prefix_break" for warning in call.start.warnings)] == []


def withheld_by(call: Call) -> dict[str, list[int]]:
    """By reason the turns whose signatures a call went without."""
    return {
        str(warning["reason"]): list(warning["seqs"])
        for warning in call.start.warnings
        if warning["kind"] == "signatures_withheld"
    }


async def assert_rebuilds(walk: Walk) -> int:
    """Every request that was sent for the conversation can be made again, to the byte, and whoever verifies what is
    stored of it finds nothing wrong. How many there were.
    """
    calls = [*await walk.calls(), *await walk.background_calls()]
    for call in calls:
        if not call.start.request_hash:
            # Recovery wrote this row: the server died after it had sent the request and before the row was stored.
            continue
        _, body = await rebuild(walk, call)
        assert hashlib.sha256(body).digest() == call.start.request_hash, (call.turn_seq, call.start.attempt)
    verifier = Verifier(PostgresRecordedCalls(walk.program.database), walk.program.providers.by_name, VerifyOptions())
    verified = await verifier.verify([walk.conversation_id])
    assert verified.mismatches == ()
    assert verified.counts.call_count == len(calls)
    return len(calls)


async def rebuild(walk: Walk, call: Call) -> tuple[Payload, bytes]:
    """A past request: as a payload, and as the bytes that left."""
    source = await walk.program.store.load_rebuild_source(
        walk.tenant_id, walk.conversation_id, call.turn_seq, call.start.attempt
    )
    provider = walk.program.providers.by_name[call.start.provider]
    payload = rebuild_call(source, provider=provider)
    return payload, await provider.encode_request(payload)


def messages_of(provider: str, body: Mapping[str, Any]) -> list[Any]:
    """The messages of a request, without cache markers: those wander."""
    messages: list[Any] = _unmarked(body[{GEMINI: "contents", ANTHROPIC: "messages"}[provider]])
    return messages


def answers_in(provider: str, body: Mapping[str, Any]) -> list[Any]:
    """What the model has said, as a request has it."""
    role = {GEMINI: "model", ANTHROPIC: "assistant"}[provider]
    return [message for message in messages_of(provider, body) if message["role"] == role]


def signatures_in(value: Any) -> list[str]:
    """Every signature in there, in order."""
    if isinstance(value, list):
        return [found for item in value for found in signatures_in(item)]
    if not isinstance(value, dict):
        return []
    own = [value[name] for name in ("thoughtSignature", "signature") if name in value]
    return own + [found for item in value.values() for found in signatures_in(item)]


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if isinstance(value, dict):
        return {name: _unmarked(item) for name, item in value.items() if name != "cache_control"}
    return value
