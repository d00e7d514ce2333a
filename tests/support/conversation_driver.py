"""Drives a conversation step by step, and asserts what must hold for all requests of it."""

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


def tool_reply(*cities: str) -> Reply:
    """A reply that calls the weather tool for each of these cities in parallel."""
    calls = tuple(ToolCall(name="get_weather", arguments={"city": city}) for city in cities)
    return Reply(thinking=f"I have to know about {' and '.join(cities)}.", tool_calls=calls)


def text_reply(text: str) -> Reply:
    return Reply(thinking="That is easy.", text=text)


@dataclass(slots=True, kw_only=True)
class ConversationDriver:
    """Drives one conversation with an assistant that has one tool."""

    program: Program
    tenant_id: str
    emulated: EmulatedProviders
    conversation_id: str
    assistant_id: str
    ended: TurnEnded | None = field(default=None)
    """The end of the newest turn."""

    async def task(self, text: str, *replies: Reply, picture: bool = False, **changes: Any) -> TurnEnded:
        """Send a task, and answer the tool calls of the model until it has given all these replies."""
        self._arm(replies)
        blocks: tuple[Block, ...] = (TextBlock(text=text), *([PICTURE] if picture else []))
        blobs = (PICTURE_BLOB,) if picture else ()
        await self._say(user_task(self.conversation_id, blocks=blocks, blobs=blobs, **changes))
        for _ in replies[1:]:
            await self.answer()
        assert self.ended is not None
        return self.ended

    async def answer(self, *replies: Reply) -> TurnEnded:
        """Send the results of all pending calls."""
        assert self.ended is not None
        return await self.answer_calls([call.id for call in self.ended.conversation.pending_calls], *replies)

    async def answer_calls(self, call_ids: Sequence[str], *replies: Reply) -> TurnEnded:
        """Send the results of these calls."""
        self._arm(replies)
        return await self._say(tool_results(self.conversation_id, call_ids))

    async def fail(self, text: str, reply: Reply, *, after_chunks: int) -> TurnEnded:
        """Send a task whose answer is cut off after a number of chunks."""
        self._arm([reply])
        self._spoil(FaultKind.CUT, after_chunks=after_chunks)
        return await self._say(user_task(self.conversation_id, text))

    async def cancel(self, text: str, reply: Reply, *, after_events: int) -> TurnEnded:
        """Send a task, and cancel its answer after a number of events."""
        self._arm([reply])
        self._spoil(FaultKind.SILENCE, after_chunks=after_events + 2)
        handle = await self.program.turn_service.take_turn(self.tenant_id, user_task(self.conversation_id, text))
        await until_asked(self.emulated)
        await read_events(handle, after_events)
        await self.program.turn_service.cancel_turn(self.tenant_id, self.conversation_id)
        self.ended = await handle.wait()
        self.calm()
        return self.ended

    async def switch(self, provider: str, model: str | None = None, **changes: Any) -> None:
        """Change the model from the next task on."""
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
        """Every background call, oldest first."""
        store = self.program.store
        epoch = (await store.load_conversation(self.tenant_id, self.conversation_id)).epoch
        return [
            call
            for number in range(1, epoch + 1)
            for call in await store.list_calls(self.tenant_id, self.conversation_id, -number)
        ]

    async def natives(self) -> dict[int, Any]:
        """The native messages of all answers that have one."""
        found = {}
        for turn in await self.turns():
            if isinstance(turn, ModelResponseTurn):
                native = await self.program.store.load_native(self.tenant_id, self.conversation_id, turn.seq)
                if native.data:
                    found[turn.seq] = json.loads(native.data)
        return found

    async def fork(self, at_seq: int) -> "ConversationDriver":
        made = await self.program.store.fork_conversation(self.tenant_id, self.conversation_id, at_seq)
        return ConversationDriver(
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

    # Both providers get the replies and faults, since the test does not decide which of them is called.

    def _arm(self, replies: Sequence[Reply]) -> None:
        for name in BOTH:
            self.emulated[name].queue_replies(*replies)

    def _spoil(self, kind: FaultKind, **options: Any) -> None:
        for name in BOTH:
            self.emulated[name].inject_fault(kind, **options)

    def calm(self) -> None:
        for name in BOTH:
            self.emulated[name].lines.turns.clear()
            self.emulated[name].state.faults.clear()


async def start_driver(
    program: Program, tenant_id: str, emulated: EmulatedProviders, provider: str, **changes: Any
) -> ConversationDriver:
    conversation = await open_conversation(program.store, tenant_id, provider, **changes)
    driver = ConversationDriver(
        program=program,
        tenant_id=tenant_id,
        emulated=emulated,
        conversation_id=conversation.id,
        assistant_id=conversation.assistant_id,
    )
    # Replies and faults left over from an earlier driver are not for this one.
    driver.calm()
    return driver


async def until_asked(emulated: EmulatedProviders) -> None:
    """Wait until a provider has used up its fault: a request that arrives later would get the fault of the next one."""

    async def met() -> bool:
        return any(not emulated[name].state.faults for name in BOTH)

    await eventually(met)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll the condition until it holds, up to a generous limit."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.005)


async def read_events(handle: TurnHandle, event_count: int) -> None:
    """Read events of the turn until this many of its answer have come."""
    reader = handle.read()
    received = 0
    while received < event_count + 1:
        events = await reader.next(10)
        assert events, "nothing came for too long"
        received += len(events)


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
    """Assert that no provider has refused a request without a fault. A request that is not answered yet has no
    status.
    """
    refused = [
        (request["number"], request["status"], request["body"])
        for request in requests
        if request["fault"] is None and request["status"] not in {None, 200}
    ]
    assert refused == []


def assert_no_break(calls: Sequence[Call]) -> None:
    """Assert that every request begins with the previous one."""
    assert [call for call in calls if any(warning["kind"] == "prefix_break" for warning in call.start.warnings)] == []


def withheld_by(call: Call) -> dict[str, list[int]]:
    """The turns whose signatures a call has withheld, by reason."""
    return {
        str(warning["reason"]): list(warning["seqs"])
        for warning in call.start.warnings
        if warning["kind"] == "signatures_withheld"
    }


async def assert_rebuilds(driver: ConversationDriver) -> int:
    """Rebuild every request of the conversation byte for byte, and verify everything that is stored of it.

    Returns the number of calls.
    """
    calls = [*await driver.calls(), *await driver.background_calls()]
    for call in calls:
        if not call.start.request_hash:
            # Recovery wrote this row: the server died after it had sent the request and before the row was stored.
            continue
        _, body = await rebuild(driver, call)
        assert hashlib.sha256(body).digest() == call.start.request_hash, (call.turn_seq, call.start.attempt)
    verifier = Verifier(
        PostgresRecordedCalls(driver.program.database), driver.program.providers.by_name, VerifyOptions()
    )
    verified = await verifier.verify([driver.conversation_id])
    assert verified.mismatches == ()
    assert verified.counts.call_count == len(calls)
    return len(calls)


async def rebuild(driver: ConversationDriver, call: Call) -> tuple[Payload, bytes]:
    """Rebuild a past request, as a payload and as bytes."""
    source = await driver.program.store.load_rebuild_source(
        driver.tenant_id, driver.conversation_id, call.turn_seq, call.start.attempt
    )
    provider = driver.program.providers.by_name[call.start.provider]
    payload = rebuild_call(source, provider=provider)
    return payload, await provider.encode_request(payload)


def messages_of(provider: str, body: Mapping[str, Any]) -> list[Any]:
    """The messages of a request without cache markers, which move from request to request."""
    messages: list[Any] = _unmarked(body[{GEMINI: "contents", ANTHROPIC: "messages"}[provider]])
    return messages


def answers_in(provider: str, body: Mapping[str, Any]) -> list[Any]:
    """The answers of the model in a request."""
    role = {GEMINI: "model", ANTHROPIC: "assistant"}[provider]
    return [message for message in messages_of(provider, body) if message["role"] == role]


def signatures_in(value: Any) -> list[str]:
    """Every signature in the value, in order."""
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
