"""Everything that may happen to a conversation, as steps for property tests."""

from typing import Any

from hypothesis import strategies as st

from server.conversation.turn import TurnState
from tests.support.conversation_driver import ConversationDriver, text_reply, tool_reply
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


async def take_step(driver: ConversationDriver, step: tuple[Any, ...]) -> None:
    match step:
        case ("task", text, picture):
            ended = await driver.task(text, text_reply(TEXT), picture=picture, abandons_calls=True)
            assert ended.turn.state is TurnState.COMPLETE
        case ("tools", text, count):
            cities = [f"city {number}" for number in range(count)]
            ended = await driver.task(
                text, tool_reply(*cities), tool_reply("Oslo"), text_reply(TEXT), abandons_calls=True
            )
            assert ended.turn.state is TurnState.COMPLETE
        case ("cancel", after_events):
            await _finish_calls(driver)
            ended = await driver.cancel("Cancelled.", text_reply(TEXT), after_events=after_events)
            assert ended.turn.state is TurnState.CANCELLED
        case ("fail", after_chunks):
            await _finish_calls(driver)
            ended = await driver.fail("Broken.", tool_reply("Oslo", "Bergen"), after_chunks=after_chunks)
            assert ended.turn.error_code == "provider_disconnected"
        case ("leave", count):
            await driver.task("Given up.", tool_reply(*["Oslo", "Bergen"][:count]), abandons_calls=True)
            # Otherwise the provider that was not called would use it the next time.
            driver.calm()
        case ("switch", provider):
            await driver.switch(provider)
        case ("context", text):
            await driver.change(context={"todos": [text]})
        case ("args", text):
            await driver.change(args={"tone": text})
        case _:
            raise AssertionError(step)


async def _finish_calls(driver: ConversationDriver) -> None:
    if driver.ended is not None and driver.ended.conversation.pending_calls:
        await driver.answer(text_reply("Thanks."))
