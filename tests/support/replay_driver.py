"""Replays conversations of a test in the process of the test."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from server.app.wiring import Program
from server.conversation.audit import OPERATOR
from server.conversation.block import TextBlock, ThinkingBlock, ToolCallBlock
from server.conversation.call import Call
from server.conversation.turn import ModelResponseTurn, Turn, TurnState
from server.emulator.reply import Reply, ToolCall
from server.replay.rerun.replay import Candidate, Replay, ReplayDraft, ReplayItem, Selection
from server.replay.rerun.result import ResultFilter, TurnResult
from server.replay.rerun.source import list_turns
from tests.support.emulators import BOTH, EmulatedProviders


def draft_of(conversation_ids: Sequence[str], candidate: Candidate | None = None, **changes: Any) -> ReplayDraft:
    draft = ReplayDraft(
        name="A try", selection=Selection(conversation_ids=tuple(conversation_ids)), candidate=candidate or Candidate()
    )
    return replace(draft, **changes)


async def create_replay(program: Program, tenant_id: str, draft: ReplayDraft) -> Replay:
    replays = program.replays.replays
    ids = await replays.select_conversations(tenant_id, draft.selection)
    return await replays.create_replay(tenant_id, draft, ids, actor=OPERATOR)


async def run_replay(program: Program, tenant_id: str, draft: ReplayDraft) -> Replay:
    """Create the replay, and run all its items here, one after the other."""
    replay = await create_replay(program, tenant_id, draft)
    await program.replays.items.run_all(replay.id)
    return await program.replays.replays.load_replay(tenant_id, replay.id)


async def results_of(program: Program, replay: Replay, number: int | None = None) -> list[TurnResult]:
    """All results, item by item."""
    replays = program.replays.replays
    results: list[TurnResult] = []
    cursor = None
    while True:
        page = await replays.list_results(
            replay.tenant_id, replay.id, wanted=ResultFilter(number=number), cursor=cursor, limit=100
        )
        results.extend(stored.result for stored in page.items)
        cursor = page.next_cursor
        if cursor is None:
            return results


async def items_of(program: Program, replay: Replay) -> list[ReplayItem]:
    items: list[ReplayItem] = []
    cursor = None
    while True:
        page = await program.replays.replays.list_items(replay.tenant_id, replay.id, cursor=cursor, limit=100)
        items.extend(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return items


async def shadow_turns(program: Program, replay: Replay, number: int = 1) -> list[Turn]:
    item = await program.replays.replays.load_item(replay.tenant_id, replay.id, number)
    assert item.replay_conversation_id is not None
    return await list_turns(program.replays.replay_store, replay.tenant_id, item.replay_conversation_id)


async def shadow_calls(program: Program, replay: Replay, number: int = 1) -> dict[int, Call]:
    """The last call of each turn, by the turn's number."""
    item = await program.replays.replays.load_item(replay.tenant_id, replay.id, number)
    assert item.replay_conversation_id is not None
    turns = await list_turns(program.replays.replay_store, replay.tenant_id, item.replay_conversation_id)
    found: dict[int, Call] = {}
    for turn in turns:
        if isinstance(turn, ModelResponseTurn):
            for call in await program.replays.replay_store.list_calls(
                replay.tenant_id, item.replay_conversation_id, turn.seq
            ):
                found[turn.seq] = call
    return found


def arm_again(emulated: EmulatedProviders, turns: Sequence[Turn], changed: Mapping[int, Reply] | None = None) -> None:
    """Queue the recorded answers as replies of the providers, except for those in `changed`, by the number of the
    answer.
    """
    for name in BOTH:
        emulated[name].lines.turns.clear()
    for turn in turns:
        if isinstance(turn, ModelResponseTurn) and turn.state is TurnState.COMPLETE:
            emulated[turn.provider].queue_replies((changed or {}).get(turn.seq) or reply_of(turn))


def reply_of(turn: ModelResponseTurn) -> Reply:
    thinking = "".join(block.text for block in turn.blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in turn.blocks if isinstance(block, TextBlock))
    calls = tuple(
        ToolCall(name=block.name, arguments=dict(block.arguments))
        for block in turn.blocks
        if isinstance(block, ToolCallBlock)
    )
    return Reply(thinking=thinking, text=text, tool_calls=calls)
