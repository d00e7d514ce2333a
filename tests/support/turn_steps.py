"""What may happen to a conversation, for tests that hold of all of them."""

from typing import Any

from hypothesis import strategies as st

from server.conversation.turn import TurnState
from tests.support.conversation_driver import Walk, asks, tells
from tests.support.emulators import BOTH

TEXT = "One two three four five six seven eight."

texts = st.text(st.characters(codec=None), max_size=20)
steps = st.one_of(
    st.tuples(st.just("task"), texts, st.booleans()),
    st.tuples(st.just("tools"), texts, st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 6)),
    st.tuples(st.just("fail"), st.integers(1, 7)),
    st.tuples(st.just("leave"), st.integers(1, 2)),
    st.tuples(st.just("switch"), st.sampled_from(BOTH)),
    st.tuples(st.just("context"), texts),
    st.tuples(st.just("args"), texts),
)


async def take_step(walk: Walk, step: tuple[Any, ...]) -> None:
    match step:
        case ("task", text, picture):
            ended = await walk.task(text, tells(TEXT), picture=picture, abandons_calls=True)
            assert ended.turn.state is TurnState.COMPLETE
        case ("tools", text, count):
            cities = [f"city {number}" for number in range(count)]
            ended = await walk.task(text, asks(*cities), asks("Oslo"), tells(TEXT), abandons_calls=True)
            assert ended.turn.state is TurnState.COMPLETE
        case ("cancel", after_events):
            await _finish_calls(walk)
            ended = await walk.cancel("Cancelled.", tells(TEXT), after_events=after_events)
            assert ended.turn.state is TurnState.CANCELLED
        case ("fail", after_chunks):
            await _finish_calls(walk)
            ended = await walk.fail("Broken.", asks("Oslo", "Bergen"), after_chunks=after_chunks)
            assert ended.turn.error_code == "provider_disconnected"
        case ("leave", count):
            await walk.task("Given up.", asks(*["Oslo", "Bergen"][:count]), abandons_calls=True)
            # The provider that was not asked would say it the next time.
            walk.calm()
        case ("switch", provider):
            await walk.switch(provider)
        case ("context", text):
            await walk.change(context={"todos": [text]})
        case ("args", text):
            await walk.change(args={"tone": text})
        case _:
            raise AssertionError(step)


async def _finish_calls(walk: Walk) -> None:
    if walk.ended is not None and walk.ended.conversation.pending_calls:
        await walk.answer(tells("Thanks."))
