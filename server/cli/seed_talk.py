"""Holds the conversations of a seed plan: through the whole program, with emulators for providers."""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.archive.seed_plan import Happening, SeedConversation, SeedExchange, SeedPlan
from server.conversation.block import Blob, Block, ImageBlock, TextBlock, ToolResultBlock
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.event import TurnEnded
from server.conversation.turn import TurnKind
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.gemini.app import build_gemini_app
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall, Turn
from server.emulator.script import Script
from server.emulator.server import emulating
from server.emulator.state import EmulatorState, build_state
from server.providers.choice import ANTHROPIC, GEMINI, KEY_VARIABLES, ProviderChoice
from server.turns.request import TurnRequest

_SEED_KEY: Final = "seed"
_PATIENCE_SECONDS: Final = 30.0
_HEARD_FIRST: Final = 3
_FAULTS: Final = {
    Happening.RETRIED: Fault(kind=FaultKind.RATE_LIMITED, retry_after_seconds=0.01),
    Happening.REFUSED: Fault(kind=FaultKind.REFUSAL),
    Happening.LENGTH: Fault(kind=FaultKind.MAX_TOKENS, after_chunks=6),
    Happening.CUT: Fault(kind=FaultKind.CUT, after_chunks=6),
    Happening.OVERLOADED: Fault(kind=FaultKind.OVERLOADED_MID_STREAM, after_chunks=4),
    Happening.UNAUTHENTICATED: Fault(kind=FaultKind.BAD_AUTH),
    Happening.EMPTY: Fault(kind=FaultKind.EMPTY_STOP),
    Happening.CANCELLED: Fault(kind=FaultKind.SILENCE, after_chunks=8),
}


class _Lines(Script):
    """What the model says next, written as the plan goes."""

    def __init__(self) -> None:
        super().__init__(())
        self.turns: deque[Turn] = deque()

    def take(self, request_number: int, prompt: str, *, after_tools: bool) -> Turn | None:  # noqa: ARG002  reason: the script's signature
        return self.turns.popleft() if self.turns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """The program, and both providers as emulators."""

    program: Program
    lines: Sequence[_Lines]
    states: Sequence[EmulatorState]

    def arm(self, turns: Sequence[Turn], fault: Fault | None) -> None:
        """Both are told, since the assistant decides which of them is asked."""
        for lines in self.lines:
            lines.turns.clear()
            lines.turns.extend(turns)
        for state in self.states:
            state.faults.clear()
            if fault is not None:
                state.faults.arm(fault)


@asynccontextmanager
async def open_talk(settings: Settings) -> AsyncIterator[Talk]:
    """The program on the database of the settings. It does no background work, and calls nobody but the emulators."""
    async with AsyncExitStack() as stack:
        lines = (_Lines(), _Lines())
        states = tuple(build_state(script=each) for each in lines)
        gemini = await stack.enter_async_context(emulating(build_gemini_app(states[0])))
        anthropic = await stack.enter_async_context(emulating(build_anthropic_app(states[1])))
        pointed = settings.model_copy(
            update={
                f"{GEMINI}_base_url": gemini,
                f"{ANTHROPIC}_base_url": anthropic,
                "worker_inside": False,
                "turn_attempts": 2,
                # Caches at an emulator end with it.
                "cache_storage_usd_per_hour": 0.0,
            }
        )
        environment = {names[0]: _SEED_KEY for names in KEY_VARIABLES.values()}
        choice = ProviderChoice(provider=GEMINI, api_key=_SEED_KEY)
        providers = await stack.enter_async_context(open_providers(pointed, choice, environment))
        program = await stack.enter_async_context(open_program(pointed, providers=providers))
        yield Talk(program=program, lines=lines, states=states)


async def hold_conversations(
    talk: Talk, tenant_id: str, plan: SeedPlan, *, turn_limit: int, on_turns: Callable[[int], None]
) -> list[str]:
    """Holds the conversations of a plan until there are so many turns. Gives their ids."""
    store = talk.program.store
    assistants = [await store.create_assistant(tenant_id, definition) for definition in plan.assistants]
    made: list[str] = []
    turn_count = 0
    for planned in plan.sample:
        if turn_count >= turn_limit:
            break
        conversation = await store.create_conversation(
            tenant_id,
            ConversationDraft(
                assistant_id=assistants[planned.assistant].id, identifier=planned.identifier, source="seed"
            ),
        )
        held = await _hold(talk, tenant_id, conversation, planned)
        turn_count += held
        on_turns(held)
        made.append(conversation.id)
    return made


async def _hold(talk: Talk, tenant_id: str, conversation: Conversation, planned: SeedConversation) -> int:
    """How many turns it has in the end."""
    turn_count = 0
    for exchange in planned.exchanges:
        ended = await _exchange(talk, tenant_id, conversation.id, exchange, planned.language)
        turn_count = ended.turn.seq
        if exchange.compacts:
            talk.arm((Reply(text="What was said before, in short."),), None)
            await talk.program.compactor.compact(tenant_id, conversation.id, force=True)
    return turn_count


async def _exchange(
    talk: Talk, tenant_id: str, conversation_id: str, exchange: SeedExchange, language: str | None
) -> TurnEnded:
    answer = Reply(thinking=exchange.thinking, text=exchange.reply)
    calls = tuple(ToolCall(name=name, arguments={"query": exchange.task[:40]}) for name in exchange.tool_names)
    replies = (Reply(thinking=exchange.thinking, tool_calls=calls), answer) if calls else (answer,)
    talk.arm(replies, _FAULTS.get(exchange.happening))
    service = talk.program.turn_service
    handle = await service.take_turn(tenant_id, _task(conversation_id, exchange, language))
    if exchange.happening is Happening.CANCELLED:
        reader = handle.read()
        heard = 0
        while heard < _HEARD_FIRST and (events := await reader.next(_PATIENCE_SECONDS)):
            heard += len(events)
        reader.close()
        await service.cancel_turn(tenant_id, conversation_id)
    ended = await handle.wait()
    while ended.conversation.pending_calls:
        ids = tuple(call.id for call in ended.conversation.pending_calls)
        ended = await (await service.take_turn(tenant_id, _results(conversation_id, ids, exchange))).wait()
    return ended


def _task(conversation_id: str, exchange: SeedExchange, language: str | None) -> TurnRequest:
    blocks: tuple[Block, ...] = (TextBlock(text=exchange.task),)
    blobs: tuple[Blob, ...] = ()
    if exchange.picture is not None:
        digest = hashlib.sha256(exchange.picture)
        blobs = (Blob(sha256=digest.digest(), media_type="image/png", data=exchange.picture),)
        size = len(exchange.picture)
        blocks += (ImageBlock(media_type="image/png", sha256=digest.hexdigest(), size_bytes=size),)
    return TurnRequest(
        conversation_id=conversation_id,
        kind=TurnKind.USER_TASK,
        blocks=blocks,
        blobs=blobs,
        body_hash=hashlib.sha256(exchange.task.encode()).digest(),
        language=language,
        abandons_calls=True,
    )


def _results(conversation_id: str, call_ids: tuple[str, ...], exchange: SeedExchange) -> TurnRequest:
    return TurnRequest(
        conversation_id=conversation_id,
        kind=TurnKind.TOOL_RESPONSE,
        blocks=tuple(
            ToolResultBlock(tool_call_id=call_id, output={"found": exchange.reply[:80]}) for call_id in call_ids
        ),
        answers=call_ids,
        body_hash=hashlib.sha256(repr(call_ids).encode()).digest(),
    )
