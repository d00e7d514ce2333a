"""Another model or another provider in mid-conversation works, and after switching back the old signatures are sent."""

import pytest

from server.conversation.turn import TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    ConversationDriver,
    answers_in,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    signatures_in,
    start_driver,
    text_reply,
    tool_reply,
    withheld_by,
)
from tests.support.emulators import MODELS, EmulatedProviders

GEMINI_4 = "gemini-4-argon"
SONNET = "claude-sonnet-5-5"


async def _exchange(driver: ConversationDriver, name: str) -> None:
    """A task with a loop of two steps, the first of them with two calls."""
    ended = await driver.task(
        f"Task {name}.", tool_reply("Oslo", "Bergen"), tool_reply("Tromsø"), text_reply(f"Answer {name}.")
    )
    assert ended.turn.state is TurnState.COMPLETE


async def _begin(server: StrataServer, emulated: EmulatedProviders, provider: str) -> ConversationDriver:
    driver = await start_driver(server.program, server.tenant.id, emulated, provider)
    await _exchange(driver, "one")
    return driver


def _assert_accepted(emulated: EmulatedProviders) -> None:
    for side in (emulated.gemini, emulated.anthropic):
        assert_all_accepted(side.requests())


async def _signatures(driver: ConversationDriver, *seqs: int) -> list[str]:
    natives = await driver.natives()
    return [signature for seq in seqs for signature in signatures_in(natives[seq])]


def _sent_signatures(emulated: EmulatedProviders, provider: str) -> list[str]:
    """The signatures in the newest request."""
    return signatures_in(answers_in(provider, emulated[provider].requests()[-1]["body"]))


async def test_from_one_family_of_gemini_to_the_next_and_back(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await _begin(strata_server, emulated, GEMINI)
    await driver.switch(GEMINI, GEMINI_4)
    await _exchange(driver, "two")
    old, new = await _signatures(driver, 2, 4, 6), await _signatures(driver, 8, 10)
    assert old
    assert new
    assert set(old).isdisjoint(sent := _sent_signatures(emulated, GEMINI))
    assert [signature for signature in sent if signature in new] == new
    assert withheld_by((await driver.calls())[-1]) == {"family": [2, 4, 6]}

    await driver.switch(GEMINI)
    await driver.task("Task three.", text_reply("Answer three."))
    assert _sent_signatures(emulated, GEMINI)[: len(old)] == old
    assert set(new).isdisjoint(_sent_signatures(emulated, GEMINI))
    assert withheld_by((await driver.calls())[-1]) == {"family": [8, 10, 12]}
    _assert_accepted(emulated)
    await assert_rebuilds(driver)


@pytest.mark.parametrize("first", [GEMINI, ANTHROPIC])
async def test_to_the_other_provider_and_back(
    strata_server: StrataServer, emulated: EmulatedProviders, first: str
) -> None:
    second = ANTHROPIC if first == GEMINI else GEMINI
    driver = await _begin(strata_server, emulated, first)
    old = await _signatures(driver, 2, 4, 6)
    assert len(old) >= 3

    await driver.switch(second)
    await _exchange(driver, "two")
    assert set(old).isdisjoint(_sent_signatures(emulated, second))
    assert withheld_by((await driver.calls())[-1]) == {"provider": [2, 4, 6]}
    foreign = await _signatures(driver, 8, 10, 12)
    assert len(foreign) >= 3

    await driver.switch(first)
    await _exchange(driver, "three")
    sent = _sent_signatures(emulated, first)
    own = await _signatures(driver, 14, 16)
    assert sent[: len(old)] == old
    assert sent[-len(own) :] == own
    assert set(foreign).isdisjoint(sent)
    assert withheld_by((await driver.calls())[-1]) == {"provider": [8, 10, 12]}

    await driver.switch(second)
    await driver.task("Task four.", text_reply("Answer four."))
    assert set(foreign) <= set(_sent_signatures(emulated, second))
    assert_no_break(await driver.calls())
    _assert_accepted(emulated)
    await assert_rebuilds(driver)


async def test_from_opus_to_sonnet_and_back_keeps_every_signature(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await _begin(strata_server, emulated, ANTHROPIC)
    await driver.switch(ANTHROPIC, SONNET)
    await _exchange(driver, "two")
    await driver.switch(ANTHROPIC)
    await driver.task("Task three.", text_reply("Answer three."))
    assert _sent_signatures(emulated, ANTHROPIC) == await _signatures(driver, 2, 4, 6, 8, 10, 12)
    calls = await driver.calls()
    assert [call.start.model for call in calls] == [MODELS[ANTHROPIC]] * 3 + [SONNET] * 3 + [MODELS[ANTHROPIC]]
    assert [withheld_by(call) for call in calls] == [{}] * 7
    assert_no_break(calls)
    _assert_accepted(emulated)
    await assert_rebuilds(driver)


@pytest.mark.parametrize("first", [GEMINI, ANTHROPIC])
async def test_an_open_loop_is_finished_by_the_provider_that_began_it(
    strata_server: StrataServer, emulated: EmulatedProviders, first: str
) -> None:
    second = ANTHROPIC if first == GEMINI else GEMINI
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, first)
    await driver.task("Task one.", tool_reply("Oslo"))
    await driver.switch(second)
    ended = await driver.answer(text_reply("Cold."))
    assert (ended.turn.state, ended.turn.provider) == (TurnState.COMPLETE, first)
    ended = await driver.task("Task two.", tool_reply("Bergen"), text_reply("Wet."))
    assert (ended.turn.state, ended.turn.provider) == (TurnState.COMPLETE, second)
    _assert_accepted(emulated)
    await assert_rebuilds(driver)


@pytest.mark.parametrize("first", [GEMINI, ANTHROPIC])
async def test_a_switch_after_abandoned_calls_and_failed_answers(
    strata_server: StrataServer, emulated: EmulatedProviders, first: str
) -> None:
    second = ANTHROPIC if first == GEMINI else GEMINI
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, first)
    await driver.fail("Task one.", text_reply("One two three four five six seven."), after_chunks=5)
    await driver.cancel("Task two.", tool_reply("Oslo", "Bergen"), after_events=4)
    await driver.task("Task three.", tool_reply("Oslo", "Bergen"))
    for provider in (second, first):
        await driver.switch(provider)
        ended = await driver.task("Never mind.", tool_reply("Tromsø"), abandons_calls=True)
        assert (ended.turn.state, ended.turn.provider) == (TurnState.COMPLETE, provider)
    _assert_accepted(emulated)
    await assert_rebuilds(driver)
