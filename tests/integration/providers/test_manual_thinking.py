"""Claude 4.5 with a thinking budget takes every history, also one whose open tool loop does not begin with thinking."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.call import Call
from server.conversation.turn import TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support import turn_steps
from tests.support.conversation_driver import Walk, asks, assert_all_accepted, assert_rebuilds, begin_walk, tells
from tests.support.emulators import EmulatedProviders

MODELS = ("claude-haiku-4-5", "claude-opus-4-5-20251101")
BUDGET: dict[str, Any] = {"thinking": 2048}


def switched_off(call: Call) -> list[int]:
    """The answers that a call had thinking switched off for."""
    return [warning["seq"] for warning in call.start.warnings if warning["kind"] == "thinking_switched_off"]


def thinks(emulated: EmulatedProviders) -> list[bool]:
    """Of each request to Claude."""
    return ["thinking" in request["body"] for request in emulated[ANTHROPIC].requests()]


async def begin(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> Walk:
    return await begin_walk(server.program, server.tenant.id, emulated, provider, **changes)


@pytest.mark.parametrize("model", MODELS)
async def test_an_abandoned_call_of_another_provider(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, GEMINI)
    await walk.task("Task one.", asks("Oslo"))
    walk.calm()  # Claude was not asked
    await walk.switch(ANTHROPIC, model, settings=BUDGET)
    ended = await walk.task("Never mind.", asks("Bergen"), tells("Wet."), abandons_calls=True)
    assert ended.turn.state is TurnState.COMPLETE
    await walk.task("Task three.", asks("Oslo"), tells("Cold."))
    assert thinks(emulated) == [False, False, True, True]
    assert [switched_off(call) for call in await walk.calls()] == [[], [2], [2, 4], [], []]
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(walk)


@pytest.mark.parametrize("model", MODELS)
async def test_an_abandoned_call_from_before_thinking_was_switched_on(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC, model=model)
    await walk.task("Task one.", asks("Oslo"))
    await walk.switch(ANTHROPIC, model, settings=BUDGET)
    ended = await walk.task("Never mind.", tells("As you wish."), abandons_calls=True)
    assert ended.turn.state is TurnState.COMPLETE
    await walk.task("Task three.", tells("Cold."))
    assert thinks(emulated) == [False, False, True]
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(walk)


@pytest.mark.parametrize("model", MODELS)
async def test_thinking_stays_on_for_its_own_calls(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC, model=model, settings=BUDGET)
    await walk.task("Task one.", asks("Oslo"), asks("Bergen"), tells("Cold and wet."))
    await walk.task("Task two.", asks("Oslo"))
    await walk.task("Never mind.", asks("Tromsø"), tells("As you wish."), abandons_calls=True)
    assert all(thinks(emulated))
    assert [switched_off(call) for call in await walk.calls()] == [[]] * 6
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(walk)


@pytest.mark.parametrize("model", MODELS)
async def test_signatures_that_are_rejected_inside_a_loop(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC, model=model, settings=BUDGET)
    await walk.task("Task one.", asks("Oslo"))
    emulated[ANTHROPIC].state.signer.replace_secret()
    ended = await walk.answer(asks("Bergen"))
    assert ended.turn.state is TurnState.COMPLETE
    assert (await walk.answer(tells("Wet."))).turn.state is TurnState.COMPLETE
    await walk.task("Task two.", tells("Fine."))
    assert thinks(emulated) == [True, True, False, False, True]
    assert [request["status"] for request in emulated[ANTHROPIC].requests()].count(400) == 1
    await assert_rebuilds(walk)


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
    walk = await begin(strata_server, emulated, first)
    for step in before:
        await turn_steps.take_step(walk, step)
    walk.calm()
    await walk.switch(ANTHROPIC, model, settings=BUDGET | {"layer_order": order})
    for step in after:
        await turn_steps.take_step(walk, step)
    walk.calm()
    await walk.task("And now?", asks("Oslo"), tells("Now this."), abandons_calls=True)
    assert_all_accepted(emulated[ANTHROPIC].requests())
    await assert_rebuilds(walk)
