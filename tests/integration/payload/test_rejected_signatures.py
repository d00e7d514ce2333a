"""A provider that rejects what it has signed itself costs one call, and neither a turn nor the conversation."""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.call import Call
from server.conversation.epoch import Rejected
from server.conversation.event import TurnEnded
from server.conversation.turn import TurnState
from server.emulator.reply import FaultKind
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support import turn_steps
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
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.page_driver import open_operator

MARKER = "c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I="
MESSAGES = {
    GEMINI: (
        "Corrupted thought signature.",
        "Invalid thought signature.",
        "Function call is missing a thought_signature in functionCall parts. Additional data, function call `f` .",
        "Function call `FC1` in the `1.` content block is missing a `thought_signature`.",
    ),
    ANTHROPIC: (
        "messages.1.content.0: Invalid `signature` in `thinking` block",
        "messages.1.content.0: Invalid `data` in `redacted_thinking` block",
        "messages.1.content.0: Invalid `signature` in `thinking`. The block is bound to a different conversation.",
        "messages.1.content.0: `thinking` blocks in the latest assistant message cannot be modified.",
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`.",
    ),
}


async def begin(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> Walk:
    """A conversation with a tool loop and an answer behind it."""
    walk = await begin_walk(server.program, server.tenant.id, emulated, provider, **changes)
    await walk.task("Task one.", asks("Oslo", "Bergen"), asks("Tromsø"), tells("Answer one."))
    await walk.task("Task two.", tells("Answer two."))
    return walk


def reject_all_signatures(emulated: EmulatedProviders) -> None:
    for provider in BOTH:
        emulated[provider].state.signer.replace_secret()


async def calls_of_newest(walk: Walk) -> list[Call]:
    calls = await walk.calls()
    return [call for call in calls if call.turn_seq == calls[-1].turn_seq]


def is_complete(ended: TurnEnded) -> bool:
    return ended.turn.state is TurnState.COMPLETE


async def rejected_of(walk: Walk, provider: str) -> Rejected | None:
    source = await walk.program.store.load_payload_source(walk.tenant_id, walk.conversation_id)
    assert source.epoch is not None
    return source.epoch.rejected.get(provider)


@pytest.mark.parametrize("provider", BOTH)
async def test_rejected_signatures_cost_one_call_and_are_not_sent_again(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    walk = await begin(strata_server, emulated, provider)
    natives = await walk.natives()
    old = signatures_in(list(natives.values()))
    reject_all_signatures(emulated)
    caplog.set_level(logging.WARNING, "strata.turn")
    ended = await walk.task("Task three.", asks("Oslo"))
    assert is_complete(ended)
    failed, made = await calls_of_newest(walk)
    assert (failed.start.attempt, failed.end and failed.end.error_code) == (1, "signature_rejected")
    assert (made.start.attempt, made.end and made.end.error_code) == (2, None)
    assert (failed.start.epoch, made.start.epoch) == (1, 2)
    assert withheld_by(failed) == {}
    assert withheld_by(made) == {"rejected": [2, 4, 6, 8]}
    assert {"kind": "signatures_rejected", "code": "signature_rejected", "epoch": 2} in made.start.warnings
    assert [record.message for record in caplog.records] == ["turn.signatures_rejected"]

    # The loop goes on with what it was given since, and so do the turns after it.
    await walk.answer(tells("Answer three."))
    await walk.task("Task four.", tells("Answer four."))
    requests = emulated[provider].requests()
    assert [request["status"] for request in requests].count(400) == 1
    sent = signatures_in(answers_in(provider, requests[-1]["body"]))
    assert set(old).isdisjoint(sent)
    natives = await walk.natives()
    assert [signature for signature in sent if signature != MARKER] == signatures_in([natives[10], natives[12]])
    assert signatures_in([natives[seq] for seq in (2, 4, 6, 8)]) == old
    assert [call.start.epoch for call in await walk.calls()] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert_no_break(await walk.calls())
    assert await rejected_of(walk, provider) == Rejected(signatures_through_seq=8)
    await assert_rebuilds(walk)


@pytest.mark.parametrize("provider", BOTH)
async def test_signatures_that_are_rejected_inside_a_tool_loop(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    await walk.task("Task one.", tells("Answer one."))
    await walk.task("Task two.", asks("Oslo", "Bergen"), asks("Tromsø"))
    reject_all_signatures(emulated)
    assert is_complete(await walk.answer(asks("Oslo")))
    assert is_complete(await walk.answer(tells("Answer two.")))
    assert is_complete(await walk.task("Task three.", tells("Answer three.")))
    assert [request["status"] for request in emulated[provider].requests()].count(400) == 1
    assert_no_break(await walk.calls())
    await assert_rebuilds(walk)


@pytest.mark.parametrize(
    ("provider", "message"), [(provider, message) for provider in BOTH for message in MESSAGES[provider]]
)
async def test_every_known_rejection_is_recognised(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, message: str
) -> None:
    walk = await begin(strata_server, emulated, provider)
    emulated[provider].fails(FaultKind.SIGNATURE_REJECTED, message=message)
    assert is_complete(await walk.task("Task three.", tells("Answer three.")))
    assert len(await calls_of_newest(walk)) == 2
    assert is_complete(await walk.task("Task four.", tells("Answer four.")))
    assert len(await calls_of_newest(walk)) == 1
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(walk)


@pytest.mark.parametrize("provider", BOTH)
async def test_a_request_that_is_rejected_twice_fails_the_turn_and_not_the_next(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin(strata_server, emulated, provider)
    emulated[provider].fails(FaultKind.SIGNATURE_REJECTED, times=2)
    ended = await walk.task("Task three.", tells("Never said."))
    assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, "signature_rejected")
    assert [call.start.epoch for call in await calls_of_newest(walk)] == [1, 2]
    walk.calm()
    ended = await walk.task("Task four.", asks("Oslo"), tells("Answer four."))
    assert is_complete(ended)
    assert await rejected_of(walk, provider) == Rejected(signatures_through_seq=8, calls_through_seq=8)
    body = emulated[provider].requests()[-1]["body"]
    said = str(answers_in(provider, body))
    assert "[Call of the tool get_weather: " in said
    assert "Oslo" in said
    assert "[Result of the tool get_weather: " in str(body)
    newest = (await walk.calls())[-1]
    assert [repair["seq"] for repair in newest.start.repairs if repair["kind"] == "calls_as_text"] == [2, 4]
    assert newest.start.epoch == 3
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(walk)


@pytest.mark.parametrize("provider", BOTH)
async def test_nothing_is_sent_twice_if_there_is_nothing_to_leave_out(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    emulated[provider].fails(FaultKind.SIGNATURE_REJECTED)
    ended = await walk.task("Task one.", tells("Never said."))
    assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, "signature_rejected")
    assert len(emulated[provider].requests()) == 1
    walk.calm()
    assert is_complete(await walk.task("Task two.", tells("Answer two.")))
    assert (await walk.calls())[-1].start.epoch == 1


@pytest.mark.parametrize("provider", BOTH)
async def test_what_was_rejected_stays_out_of_forks_and_after_compactions_and_switches(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    policy = {"compaction": {"policy": "off", "keep_exchanges": 2}}
    walk = await begin(strata_server, emulated, provider, settings=policy)
    reject_all_signatures(emulated)
    await walk.task("Task three.", asks("Oslo"), tells("Answer three."))
    compactor = walk.program.compactor
    report = await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
    assert (report.first_seq, report.last_seq) == (1, 6)
    await walk.task("Task four.", tells("Answer four."))
    await compactor.undo(walk.tenant_id, walk.conversation_id)
    fork = await walk.fork(14)
    await walk.switch(ANTHROPIC if provider == GEMINI else GEMINI)
    await walk.task("Task five.", tells("Answer five."))
    await walk.switch(provider)
    # The fork is in the epoch of its newest call, from before the undo.
    for each, seqs in ((walk, [2, 4, 6, 8]), (fork, [8])):
        await each.task("Task six.", asks("Oslo"), tells("Answer six."))
        assert withheld_by((await each.calls())[-1])["rejected"] == seqs
        await assert_rebuilds(each)
    assert [request["status"] for request in emulated[provider].requests()].count(400) == 1


async def test_an_alias_of_another_family_is_known_by_the_version_that_answered(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    # The alias stands for a model of the fourth family.
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, GEMINI, model="gemini-pro-latest")
    await walk.task("Task one.", asks("Oslo"), asks("Bergen"), tells("Answer one."))
    assert [withheld_by(call) for call in await walk.calls()] == [{}, {}, {}]
    await walk.switch(GEMINI)
    await walk.task("Task two.", asks("Oslo"), tells("Answer two."))
    assert withheld_by((await walk.calls())[-1]) == {"family": [2, 4, 6]}
    await walk.switch(GEMINI, "gemini-4-argon")
    await walk.task("Task three.", tells("Answer three."))
    assert withheld_by((await walk.calls())[-1]) == {"family": [8, 10]}
    await walk.switch(GEMINI, "gemini-pro-latest")
    await walk.task("Task four.", tells("Answer four."))
    assert withheld_by((await walk.calls())[-1]) == {"family": [8, 10]}
    assert_all_accepted(emulated[GEMINI].requests())
    await assert_rebuilds(walk)


async def test_a_move_to_an_alias_of_an_unknown_family_costs_one_call(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated, GEMINI)
    await walk.switch(GEMINI, "gemini-pro-latest")
    assert is_complete(await walk.task("Task three.", asks("Oslo"), tells("Answer three.")))
    assert is_complete(await walk.task("Task four.", tells("Answer four.")))
    await walk.switch(GEMINI)
    assert is_complete(await walk.task("Task five.", tells("Answer five.")))
    assert withheld_by((await walk.calls())[-1]) == {"rejected": [2, 4, 6, 8], "family": [10, 12, 14]}
    assert [request["status"] for request in emulated[GEMINI].requests()].count(400) == 1
    await assert_rebuilds(walk)


STEPS = st.sampled_from(
    [
        ("task", "A task.", True),
        ("tools", "A task.", 2),
        ("leave", 2),
        ("switch", GEMINI),
        ("switch", ANTHROPIC),
        ("context", "Rain."),
        ("reject",),
    ]
)


@settings(max_examples=12)
@given(provider=st.sampled_from(BOTH), steps=st.lists(STEPS, min_size=2, max_size=8))
async def test_whatever_is_rejected_and_when_every_task_is_answered(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, steps: list[tuple[Any, ...]]
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider)
    for step in steps:
        if step == ("reject",):
            reject_all_signatures(emulated)
        else:
            await turn_steps.take_step(walk, step)
    walk.calm()
    assert is_complete(await walk.task("And now?", asks("Oslo"), tells("Now this."), abandons_calls=True))
    calls = await walk.calls()
    assert all(call.start.attempt <= 2 for call in calls)
    assert_no_break(calls)
    await assert_rebuilds(walk)


async def test_operators_see_a_rejection(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await begin(strata_server, emulated, GEMINI)
    reject_all_signatures(emulated)
    await walk.task("Task three.", tells("Answer three."))
    async with open_operator(strata_server.url) as operator:
        await operator.log_in(strata_server.admin_key)
        path = f"/admin/conversations/{walk.conversation_id}"
        timeline = (await operator.get(path)).text
        assert "epoch 2: signatures rejected by the provider, left out from now on" in timeline
        call = (await operator.get(f"{path}/calls/10/2")).text
        assert "The previous attempt was rejected for its signatures" in call
        assert "the provider rejected signatures of this history" in call
        told = (await operator.get(f"{path}/calls/10/2/json")).json()
        kinds = {warning["kind"]: warning for warning in told["warnings"]}
        assert kinds["signatures_rejected"]["code"] == "signature_rejected"
        assert kinds["signatures_withheld"]["reason"] == "rejected"


def _frames(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event.get("type", "").encode(), json.dumps(event).encode()) for event in events
    )


def _gemini_answer(part: Mapping[str, Any]) -> bytes:
    content = {"role": "model", "parts": [part, {"text": "Answer three."}]}
    return _frames([{"candidates": [{"content": content, "finishReason": "STOP"}], "usageMetadata": {}}])


def _claude_answer(block: Mapping[str, Any]) -> bytes:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": [], "usage": {}}
    blocks = [block, {"type": "text", "text": "Answer three."}]
    return _frames(
        [
            {"type": "message_start", "message": message},
            *(
                event
                for index, block in enumerate(blocks)
                for event in (
                    {"type": "content_block_start", "index": index, "content_block": block},
                    {"type": "content_block_stop", "index": index},
                )
            ),
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
            {"type": "message_stop"},
        ]
    )


@pytest.mark.parametrize(
    ("provider", "body"),
    [
        (GEMINI, _gemini_answer({"hologram": {"width": 3}})),
        (GEMINI, _gemini_answer({"text": "So:", "hologram": 3})),
        (ANTHROPIC, _claude_answer({"type": "hologram", "width": 3})),
        (ANTHROPIC, _claude_answer({"type": "text", "text": "So:", "hologram": 3})),
    ],
)
async def test_an_answer_with_a_part_that_is_not_taken_back_costs_one_call(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, body: bytes
) -> None:
    walk = await begin(strata_server, emulated, provider)
    emulated[provider].fails(FaultKind.RAW, body=body)
    assert is_complete(await walk.task("Task three."))
    native = (await walk.natives())[10]
    assert "hologram" in json.dumps(native)

    assert is_complete(await walk.task("Task four.", tells("Answer four.")))

    failed, made = await calls_of_newest(walk)
    assert (failed.end and failed.end.error_code, made.end and made.end.error_code) == ("answer_rejected", None)
    assert {"kind": "signatures_rejected", "code": "answer_rejected", "epoch": 2} in made.start.warnings
    request = emulated[provider].requests()[-1]["body"]
    assert "hologram" not in json.dumps(request)
    assert "Answer three." in json.dumps(request)
    assert is_complete(await walk.task("Task five.", tells("Answer five.")))
    assert [request["status"] for request in emulated[provider].requests()].count(400) == 1
    assert (await walk.natives())[10] == native
    await assert_rebuilds(walk)
