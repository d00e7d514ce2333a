import asyncio

import pytest

from server.conversation.block import TextBlock
from server.conversation.errors import TurnStalled
from server.conversation.event import TextDelta, TurnStarted, build_turn_ended
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import Usage
from server.turns.live import LiveHandle, LiveTurn
from tests.support.builders import A_TIME

STARTED = TurnStarted(conversation_id="conv_1", input_seq=1, seq=2)
ENDED = build_turn_ended(
    "conv_1",
    ModelResponseTurn(
        seq=2,
        created_at=A_TIME,
        blocks=(TextBlock(text="ab"),),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.END_TURN,
        error_code=None,
        provider="gemini",
        model="gemini-3.1-pro-preview",
        usage=Usage(),
        cost_usd=None,
        attempt=1,
        revision=2,
    ),
)
A, B = TextDelta(text="a"), TextDelta(text="b")


def open_turn() -> LiveTurn:
    return LiveTurn(tenant_id="t", conversation_id="conv_1", input_seq=1, seq=2)


async def test_events_that_are_added_without_a_wait_are_read_together() -> None:
    live = open_turn()
    reader = LiveHandle(live=live).read()
    assert await reader.next(0) == [(1, STARTED)]
    reading = asyncio.create_task(reader.next(60))
    await asyncio.sleep(0)
    live.append([A])
    live.append([B])
    assert await reading == [(2, A), (3, B)]


async def test_a_late_listener_gets_the_same_numbers() -> None:
    live = open_turn()
    live.append([A, B])
    assert await LiveHandle(live=live).read(2).next(0) == [(3, B)]
    live.end(ENDED)
    reader = LiveHandle(live=live).read(1)
    assert await reader.next(0) == [(2, A), (3, B), (4, ENDED)]
    assert await reader.next(0) is None


async def test_a_reader_gets_nothing_when_its_time_is_over_and_can_go_on() -> None:
    live = open_turn()
    reader = LiveHandle(live=live).read(1)
    assert await reader.next(0.01) == ()
    reading = asyncio.create_task(reader.next(60))
    await asyncio.sleep(0)
    live.append([A])
    assert await reading == [(2, A)]


async def test_a_cancelled_reader_does_not_disturb_the_others() -> None:
    live = open_turn()
    reading = [asyncio.create_task(LiveHandle(live=live).read(1).next(60)) for _ in range(3)]
    await asyncio.sleep(0)
    reading[1].cancel()
    live.append([A])
    assert [await reading[0], await reading[2]] == [[(2, A)], [(2, A)]]
    with pytest.raises(asyncio.CancelledError):
        await reading[1]


async def test_the_end_is_returned_to_all_who_wait_for_it() -> None:
    live = open_turn()
    waiting = [asyncio.create_task(LiveHandle(live=live).wait()) for _ in range(2)]
    await asyncio.sleep(0)
    live.append([A])
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    live.end(ENDED)
    assert [await each for each in waiting] == [ENDED, ENDED]
    assert await LiveHandle(live=live).wait() == ENDED


async def test_a_lost_turn_raises_its_error_after_the_events_that_there_are() -> None:
    live = open_turn()
    waiting = asyncio.create_task(LiveHandle(live=live).wait())
    reader = LiveHandle(live=live).read(1)
    live.append([A])
    live.lose(TurnStalled())
    assert await reader.next(60) == [(2, A)]
    with pytest.raises(TurnStalled):
        await reader.next(60)
    with pytest.raises(TurnStalled):
        await waiting
