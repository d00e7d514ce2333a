"""Another model or another provider in mid-conversation: it works, and on the way back the old signatures are there."""

import pytest

from server.conversation.turn import TurnState
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    Walk,
    answers_in,
    asks,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    begin_walk,
    signatures_in,
    tells,
    withheld_by,
)
from tests.support.emulators import MODELS, EmulatedProviders

GEMINI_4 = "gemini-4-argon"
SONNET = "claude-sonnet-5-5"


async def _exchange(walk: Walk, name: str) -> None:
    """A task with a loop of two steps, the first of them with two calls."""
    ended = await walk.task(f"Task {name}.", asks("Oslo", "Bergen"), asks("Tromsø"), tells(f"Answer {name}."))
    assert ended.turn.state is TurnState.COMPLETE


async def _begin(server: StrataServer, emulated: EmulatedProviders, provider: str) -> Walk:
    walk = await begin_walk(server.program, server.tenant.id, emulated, provider)
    await _exchange(walk, "one")
    return walk


def _assert_accepted(emulated: EmulatedProviders) -> None:
    for side in (emulated.gemini, emulated.anthropic):
        assert_all_accepted(side.requests())


async def _signatures(walk: Walk, *seqs: int) -> list[str]:
    natives = await walk.natives()
    return [signature for seq in seqs for signature in signatures_in(natives[seq])]


def _sent_signatures(emulated: EmulatedProviders, provider: str) -> list[str]:
    """Those in the newest request."""
    return signatures_in(answers_in(provider, emulated[provider].requests()[-1]["body"]))


async def test_from_one_family_of_gemini_to_the_next_and_back(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await _begin(strata_server, emulated, GEMINI)
    await walk.switch(GEMINI, GEMINI_4)
    await _exchange(walk, "two")
    old, new = await _signatures(walk, 2, 4, 6), await _signatures(walk, 8, 10)
    assert old
    assert new
    assert set(old).isdisjoint(sent := _sent_signatures(emulated, GEMINI))
    assert [signature for signature in sent if signature in new] == new
    assert withheld_by((await walk.calls())[-1]) == {"family": [2, 4, 6]}

    await walk.switch(GEMINI)
    await walk.task("Task three.", tells("Answer three."))
    assert _sent_signatures(emulated, GEMINI)[: len(old)] == old
    assert set(new).isdisjoint(_sent_signatures(emulated, GEMINI))
    assert withheld_by((await walk.calls())[-1]) == {"family": [8, 10, 12]}
    _assert_accepted(emulated)
    await assert_rebuilds(walk)


@pytest.mark.parametrize("first", [GEMINI, ANTHROPIC])
async def test_to_the_other_provider_and_back(
    strata_server: StrataServer, emulated: EmulatedProviders, first: str
) -> None:
    second = ANTHROPIC if first == GEMINI else GEMINI
    walk = await _begin(strata_server, emulated, first)
    old = await _signatures(walk, 2, 4, 6)
    assert len(old) >= 3

    await walk.switch(second)
    await _exchange(walk, "two")
    assert set(old).isdisjoint(_sent_signatures(emulated, second))
    assert withheld_by((await walk.calls())[-1]) == {"provider": [2, 4, 6]}
    foreign = await _signatures(walk, 8, 10, 12)
    assert len(foreign) >= 3

    await walk.switch(first)
    await _exchange(walk, "three")
    sent = _sent_signatures(emulated, first)
    own = await _signatures(walk, 14, 16)
    assert sent[: len(old)] == old
    assert sent[-len(own) :] == own
    assert set(foreign).isdisjoint(sent)
    assert withheld_by((await walk.calls())[-1]) == {"provider": [8, 10, 12]}

    await walk.switch(second)
    await walk.task("Task four.", tells("Answer four."))
    assert set(foreign) <= set(_sent_signatures(emulated, second))
    assert_no_break(await walk.calls())
    _assert_accepted(emulated)
    await assert_rebuilds(walk)


async def test_from_opus_to_sonnet_and_back_keeps_every_signature(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await _begin(strata_server, emulated, ANTHROPIC)
    await walk.switch(ANTHROPIC, SONNET)
    await _exchange(walk, "two")
    await walk.switch(ANTHROPIC)
    await walk.task("Task three.", tells("Answer three."))
    assert _sent_signatures(emulated, ANTHROPIC) == await _signatures(walk, 2, 4, 6, 8, 10, 12)
    calls = await walk.calls()
    assert [call.start.model for call in calls] == [MODELS[ANTHROPIC]] * 3 + [SONNET] * 3 + [MODELS[ANTHROPIC]]
    assert [withheld_by(call) for call in calls] == [{}] * 7
    assert_no_break(calls)
    _assert_accepted(emulated)
    await assert_rebuilds(walk)


@pytest.mark.parametrize("first", [GEMINI, ANTHROPIC])
async def test_an_open_loop_is_finished_by_who_began_it(
    strata_server: StrataServer, emulated: EmulatedProviders, first: str
) -> None:
    second = ANTHROPIC if first == GEMINI else GEMINI
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, first)
    await walk.task("Task one.", asks("Oslo"))
    await walk.switch(second)
    ended = await walk.answer(tells("Cold."))
    assert (ended.turn.state, ended.turn.provider) == (TurnState.COMPLETE, first)
    ended = await walk.task("Task two.", asks("Bergen"), tells("Wet."))
    assert (ended.turn.state, ended.turn.provider) == (TurnState.COMPLETE, second)
    _assert_accepted(emulated)
    await assert_rebuilds(walk)


@pytest.mark.parametrize("first", [GEMINI, ANTHROPIC])
async def test_a_switch_after_given_up_calls_and_broken_answers(
    strata_server: StrataServer, emulated: EmulatedProviders, first: str
) -> None:
    second = ANTHROPIC if first == GEMINI else GEMINI
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, first)
    await walk.fail("Task one.", tells("One two three four five six seven."), after_chunks=5)
    await walk.cancel("Task two.", asks("Oslo", "Bergen"), after_events=4)
    await walk.task("Task three.", asks("Oslo", "Bergen"))
    for provider in (second, first):
        await walk.switch(provider)
        ended = await walk.task("Never mind.", asks("Tromsø"), abandons_calls=True)
        assert (ended.turn.state, ended.turn.provider) == (TurnState.COMPLETE, provider)
    _assert_accepted(emulated)
    await assert_rebuilds(walk)
