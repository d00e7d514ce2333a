"""Talking to the turn service as the HTTP layer does, for tests that need no HTTP."""

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

PATIENCE_SECONDS = 10.0
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="get_weather", description="The weather in a city", parameters=_CITY)


async def open_conversation(store: Store, tenant_id: str, provider: str, **changes: Any) -> Conversation:
    """A conversation with an assistant of the provider's that has one tool."""
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
    """Takes the turn and waits for its end."""
    return await (await service.take_turn(tenant_id, request)).wait()


async def answer_tools(service: TurnService, tenant_id: str, ended: TurnEnded) -> TurnEnded:
    """Goes on with results until the model asks for no more."""
    while ended.conversation.pending_calls:
        ids = [call.id for call in ended.conversation.pending_calls]
        ended = await say(service, tenant_id, tool_results(ended.conversation.id, ids))
    return ended


async def read_all(handle: TurnHandle, after: int = 0) -> list[tuple[int, TurnEvent]]:
    """Every event behind the number, to the last."""
    return await drain(handle.read(after))


async def hear(handle: TurnHandle, count: int) -> list[tuple[int, TurnEvent]]:
    """The first events, at least so many of them."""
    reader = handle.read()
    heard: list[tuple[int, TurnEvent]] = []
    while len(heard) < count:
        events = await reader.next(PATIENCE_SECONDS)
        assert events, "nothing came for too long"
        heard.extend(events)
    reader.close()
    return heard


async def drain(reader: EventReader) -> list[tuple[int, TurnEvent]]:
    heard: list[tuple[int, TurnEvent]] = []
    while (events := await reader.next(PATIENCE_SECONDS)) is not None:
        assert events, "nothing came for too long"
        heard.extend(events)
    return heard


async def settle(program: Program) -> None:
    """Until no turn runs in the process any more: one that has told its end may still be tidying up."""
    while program.running_turns.count:  # noqa: ASYNC110  reason: the product has no event for this, and needs none
        await asyncio.sleep(0)


def text_of(ended: TurnEnded) -> str:
    return "".join(block.text for block in ended.turn.blocks if isinstance(block, TextBlock))


def calls_of(ended: TurnEnded) -> list[str]:
    return [block.id for block in ended.turn.blocks if isinstance(block, ToolCallBlock)]
