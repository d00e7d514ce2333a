"""Uses the turn service as the HTTP layer does, for tests without HTTP."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from server.app.wiring import Program
from server.conversation.assistant import Tool
from server.conversation.block import Block, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.event import TurnEnded, TurnEvent
from server.conversation.store import Store
from server.conversation.turn import TurnKind
from server.turns.handle import EventReader, TurnHandle
from server.turns.request import TurnRequest
from server.turns.service import TurnService
from tests.support.builders import definition
from tests.support.emulators import MODELS

WAIT_SECONDS = 30.0
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="get_weather", description="The weather in a city", parameters=_CITY)


async def open_conversation(store: Store, tenant_id: str, provider: str, **changes: Any) -> Conversation:
    """Open a conversation with an assistant of the provider that has one tool."""
    values = {"provider": provider, "model": MODELS[provider], "tools": (WEATHER,), "settings": {}} | changes
    assistant = await store.create_assistant(tenant_id, definition(**values))
    return await store.create_conversation(tenant_id, ConversationDraft(assistant_id=assistant.id))


def user_task(conversation_id: str, text: str = "Tell me a story.", **changes: Any) -> TurnRequest:
    return _request(conversation_id, TurnKind.USER_TASK, **{"blocks": (TextBlock(text=text),)} | changes)


def tool_results(conversation_id: str, call_ids: Sequence[str], **changes: Any) -> TurnRequest:
    blocks = tuple(ToolResultBlock(tool_call_id=call_id, output={"celsius": 4}) for call_id in call_ids)
    given = {"blocks": blocks, "answers": tuple(call_ids)}
    return _request(conversation_id, TurnKind.TOOL_RESPONSE, **given | changes)


def _request(conversation_id: str, kind: TurnKind, *, blocks: tuple[Block, ...], **changes: Any) -> TurnRequest:
    body_hash = hashlib.sha256(json.dumps([repr(block) for block in blocks]).encode()).digest()
    values: dict[str, Any] = {
        "conversation_id": conversation_id,
        "kind": kind,
        "blocks": blocks,
        "body_hash": body_hash,
    }
    return TurnRequest(**values | changes)


async def say(service: TurnService, tenant_id: str, request: TurnRequest) -> TurnEnded:
    """Take the turn and wait for its end."""
    return await (await service.take_turn(tenant_id, request)).wait()


async def answer_tools(service: TurnService, tenant_id: str, ended: TurnEnded) -> TurnEnded:
    """Send results until the model makes no more calls."""
    while ended.conversation.pending_calls:
        ids = [call.id for call in ended.conversation.pending_calls]
        ended = await say(service, tenant_id, tool_results(ended.conversation.id, ids))
    return ended


async def read_all(handle: TurnHandle, after: int = 0) -> list[tuple[int, TurnEvent]]:
    """Every event after this number."""
    return await drain(handle.read(after))


async def read_events(handle: TurnHandle, count: int) -> list[tuple[int, TurnEvent]]:
    """The first events, at least this many."""
    reader = handle.read()
    received: list[tuple[int, TurnEvent]] = []
    while len(received) < count:
        events = await reader.next(WAIT_SECONDS)
        assert events, "nothing came for too long"
        received.extend(events)
    reader.close()
    return received


async def drain(reader: EventReader) -> list[tuple[int, TurnEvent]]:
    received: list[tuple[int, TurnEvent]] = []
    while (events := await reader.next(WAIT_SECONDS)) is not None:
        assert events, "nothing came for too long"
        received.extend(events)
    return received


async def settle(program: Program) -> None:
    """Wait until no turn runs in the process: a turn that has sent its end may still be cleaning up."""
    while program.running_turns.count:  # noqa: ASYNC110  reason: the server has no event for this, and needs none
        await asyncio.sleep(0)


def text_of(ended: TurnEnded) -> str:
    return "".join(block.text for block in ended.turn.blocks if isinstance(block, TextBlock))


def calls_of(ended: TurnEnded) -> list[str]:
    return [block.id for block in ended.turn.blocks if isinstance(block, ToolCallBlock)]
