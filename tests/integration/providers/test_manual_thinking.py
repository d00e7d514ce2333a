"""Claude 4.5 with a thinking budget accepts every history, also one whose open tool loop does not begin with
thinking.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.call import Call
from server.conversation.turn import TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support import turn_steps
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import EmulatedProviders

MODELS = ("claude-haiku-4-5", "claude-opus-4-5-20251101")
BUDGET: dict[str, Any] = {"thinking": 2048}


def switched_off(call: Call) -> list[int]:
    """The answers for which a call had thinking switched off."""
    return [warning["seq"] for warning in call.start.warnings if warning["kind"] == "thinking_switched_off"]


def thinks(emulated: EmulatedProviders) -> list[bool]:
    """The thinking settings of each request to Claude."""
    return ["thinking" in request["body"] for request in emulated[ANTHROPIC].requests()]


async def begin(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> ConversationDriver:
    return await start_driver(server.program, server.tenant.id, emulated, provider, **changes)


@pytest.mark.parametrize("model", MODELS)
async def test_an_abandoned_call_of_another_provider_switches_thinking_off(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, GEMINI)
    await driver.task("Task one.", tool_reply("Oslo"))
    driver.calm()  # Claude was not called.
    await driver.switch(ANTHROPIC, model, settings=BUDGET)
    ended = await driver.task("Never mind.", tool_reply("Bergen"), text_reply("Wet."), abandons_calls=True)
    assert ended.turn.state is TurnState.COMPLETE
    await driver.task("Task three.", tool_reply("Oslo"), text_reply("Cold."))
    assert thinks(emulated) == [False, False, True, True]
    assert [switched_off(call) for call in await driver.calls()] == [[], [2], [2, 4], [], []]
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("model", MODELS)
async def test_an_abandoned_call_from_before_thinking_was_switched_on_switches_it_off(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC, model=model)
    await driver.task("Task one.", tool_reply("Oslo"))
    await driver.switch(ANTHROPIC, model, settings=BUDGET)
    ended = await driver.task("Never mind.", text_reply("As you wish."), abandons_calls=True)
    assert ended.turn.state is TurnState.COMPLETE
    await driver.task("Task three.", text_reply("Cold."))
    assert thinks(emulated) == [False, False, True]
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("model", MODELS)
async def test_thinking_stays_on_for_its_own_calls(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC, model=model, settings=BUDGET)
    await driver.task("Task one.", tool_reply("Oslo"), tool_reply("Bergen"), text_reply("Cold and wet."))
    await driver.task("Task two.", tool_reply("Oslo"))
    await driver.task("Never mind.", tool_reply("Tromsø"), text_reply("As you wish."), abandons_calls=True)
    assert all(thinks(emulated))
    assert [switched_off(call) for call in await driver.calls()] == [[]] * 6
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("model", MODELS)
async def test_rejected_signatures_inside_a_loop_switch_thinking_off(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC, model=model, settings=BUDGET)
    await driver.task("Task one.", tool_reply("Oslo"))
    emulated[ANTHROPIC].state.signer.replace_secret()
    ended = await driver.answer(tool_reply("Bergen"))
    assert ended.turn.state is TurnState.COMPLETE
    assert (await driver.answer(text_reply("Wet."))).turn.state is TurnState.COMPLETE
    await driver.task("Task two.", text_reply("Fine."))
    assert thinks(emulated) == [True, True, False, False, True]
    assert [request["status"] for request in emulated[ANTHROPIC].requests()].count(400) == 1
    await assert_rebuilds(driver)


@settings(max_examples=12)
@given(
    first=st.sampled_from([GEMINI, ANTHROPIC]),
    model=st.sampled_from(MODELS),
    order=st.sampled_from(["layered", "append_only"]),
    before=st.lists(turn_steps.steps, max_size=4),
    after=st.lists(turn_steps.steps, min_size=1, max_size=4),
)
async def test_no_history_is_refused(
    strata_server: StrataServer,
    emulated: EmulatedProviders,
    first: str,
    model: str,
    order: str,
    before: list[Any],
    after: list[Any],
) -> None:
    driver = await begin(strata_server, emulated, first)
    for step in before:
        await turn_steps.take_step(driver, step)
    driver.calm()
    await driver.switch(ANTHROPIC, model, settings=BUDGET | {"layer_order": order})
    for step in after:
        await turn_steps.take_step(driver, step)
    driver.calm()
    await driver.task("And now?", tool_reply("Oslo"), text_reply("Now this."), abandons_calls=True)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(driver)
