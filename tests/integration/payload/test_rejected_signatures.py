"""A provider that rejects its own signatures costs one call, and neither a turn nor the conversation."""

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


async def begin(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> ConversationDriver:
    """A conversation with a tool loop followed by an answer."""
    driver = await start_driver(server.program, server.tenant.id, emulated, provider, **changes)
    await driver.task("Task one.", tool_reply("Oslo", "Bergen"), tool_reply("Tromsø"), text_reply("Answer one."))
    await driver.task("Task two.", text_reply("Answer two."))
    return driver


def reject_all_signatures(emulated: EmulatedProviders) -> None:
    for provider in BOTH:
        emulated[provider].state.signer.replace_secret()


async def calls_of_newest(driver: ConversationDriver) -> list[Call]:
    calls = await driver.calls()
    return [call for call in calls if call.turn_seq == calls[-1].turn_seq]


def is_complete(ended: TurnEnded) -> bool:
    return ended.turn.state is TurnState.COMPLETE


async def rejected_of(driver: ConversationDriver, provider: str) -> Rejected | None:
    source = await driver.program.store.load_payload_source(driver.tenant_id, driver.conversation_id)
    assert source.epoch is not None
    return source.epoch.rejected.get(provider)


@pytest.mark.parametrize("provider", BOTH)
async def test_rejected_signatures_cost_one_call_and_are_not_sent_again(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = await begin(strata_server, emulated, provider)
    natives = await driver.natives()
    old = signatures_in(list(natives.values()))
    reject_all_signatures(emulated)
    caplog.set_level(logging.WARNING, "strata.turn")
    ended = await driver.task("Task three.", tool_reply("Oslo"))
    assert is_complete(ended)
    failed, made = await calls_of_newest(driver)
    assert (failed.start.attempt, failed.end and failed.end.error_code) == (1, "signature_rejected")
    assert (made.start.attempt, made.end and made.end.error_code) == (2, None)
    assert (failed.start.epoch, made.start.epoch) == (1, 2)
    assert withheld_by(failed) == {}
    assert withheld_by(made) == {"rejected": [2, 4, 6, 8]}
    assert {"kind": "signatures_rejected", "code": "signature_rejected", "epoch": 2} in made.start.warnings
    assert [record.message for record in caplog.records] == ["turn.signatures_rejected"]

    # The loop continues with its later content, and so do the turns after it.
    await driver.answer(text_reply("Answer three."))
    await driver.task("Task four.", text_reply("Answer four."))
    requests = emulated[provider].requests()
    assert [request["status"] for request in requests].count(400) == 1
    sent = signatures_in(answers_in(provider, requests[-1]["body"]))
    assert set(old).isdisjoint(sent)
    natives = await driver.natives()
    assert [signature for signature in sent if signature != MARKER] == signatures_in([natives[10], natives[12]])
    assert signatures_in([natives[seq] for seq in (2, 4, 6, 8)]) == old
    assert [call.start.epoch for call in await driver.calls()] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert_no_break(await driver.calls())
    assert await rejected_of(driver, provider) == Rejected(signatures_through_seq=8)
    await assert_rebuilds(driver)


@pytest.mark.parametrize("provider", BOTH)
async def test_rejected_signatures_inside_a_tool_loop(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    await driver.task("Task one.", text_reply("Answer one."))
    await driver.task("Task two.", tool_reply("Oslo", "Bergen"), tool_reply("Tromsø"))
    reject_all_signatures(emulated)
    assert is_complete(await driver.answer(tool_reply("Oslo")))
    assert is_complete(await driver.answer(text_reply("Answer two.")))
    assert is_complete(await driver.task("Task three.", text_reply("Answer three.")))
    assert [request["status"] for request in emulated[provider].requests()].count(400) == 1
    assert_no_break(await driver.calls())
    await assert_rebuilds(driver)


@pytest.mark.parametrize(
    ("provider", "message"), [(provider, message) for provider in BOTH for message in MESSAGES[provider]]
)
async def test_every_known_rejection_is_recognised(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, message: str
) -> None:
    driver = await begin(strata_server, emulated, provider)
    emulated[provider].inject_fault(FaultKind.SIGNATURE_REJECTED, message=message)
    assert is_complete(await driver.task("Task three.", text_reply("Answer three.")))
    assert len(await calls_of_newest(driver)) == 2
    assert is_complete(await driver.task("Task four.", text_reply("Answer four.")))
    assert len(await calls_of_newest(driver)) == 1
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("provider", BOTH)
async def test_a_request_that_is_rejected_twice_fails_the_turn_and_not_the_next(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await begin(strata_server, emulated, provider)
    emulated[provider].inject_fault(FaultKind.SIGNATURE_REJECTED, times=2)
    ended = await driver.task("Task three.", text_reply("Never said."))
    assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, "signature_rejected")
    assert [call.start.epoch for call in await calls_of_newest(driver)] == [1, 2]
    driver.calm()
    ended = await driver.task("Task four.", tool_reply("Oslo"), text_reply("Answer four."))
    assert is_complete(ended)
    assert await rejected_of(driver, provider) == Rejected(signatures_through_seq=8, calls_through_seq=8)
    body = emulated[provider].requests()[-1]["body"]
    sent_answers = str(answers_in(provider, body))
    assert "[Call of the tool get_weather: " in sent_answers
    assert "Oslo" in sent_answers
    assert "[Result of the tool get_weather: " in str(body)
    newest = (await driver.calls())[-1]
    assert [repair["seq"] for repair in newest.start.repairs if repair["kind"] == "calls_as_text"] == [2, 4]
    assert newest.start.epoch == 3
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("provider", BOTH)
async def test_a_request_without_signatures_is_not_repeated(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    emulated[provider].inject_fault(FaultKind.SIGNATURE_REJECTED)
    ended = await driver.task("Task one.", text_reply("Never said."))
    assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, "signature_rejected")
    assert len(emulated[provider].requests()) == 1
    driver.calm()
    assert is_complete(await driver.task("Task two.", text_reply("Answer two.")))
    assert (await driver.calls())[-1].start.epoch == 1


@pytest.mark.parametrize("provider", BOTH)
async def test_rejected_signatures_stay_out_of_forks_and_after_compactions_and_switches(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    policy = {"compaction": {"policy": "off", "keep_exchanges": 2}}
    driver = await begin(strata_server, emulated, provider, settings=policy)
    reject_all_signatures(emulated)
    await driver.task("Task three.", tool_reply("Oslo"), text_reply("Answer three."))
    compactor = driver.program.compactor
    report = await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    assert (report.first_seq, report.last_seq) == (1, 6)
    await driver.task("Task four.", text_reply("Answer four."))
    await compactor.undo(driver.tenant_id, driver.conversation_id)
    fork = await driver.fork(14)
    await driver.switch(ANTHROPIC if provider == GEMINI else GEMINI)
    await driver.task("Task five.", text_reply("Answer five."))
    await driver.switch(provider)
    # The fork is in the epoch of its newest call, from before the undo.
    for each, seqs in ((driver, [2, 4, 6, 8]), (fork, [8])):
        await each.task("Task six.", tool_reply("Oslo"), text_reply("Answer six."))
        assert withheld_by((await each.calls())[-1])["rejected"] == seqs
        await assert_rebuilds(each)
    assert [request["status"] for request in emulated[provider].requests()].count(400) == 1


async def test_an_alias_of_another_family_is_recognised_by_the_version_that_answered(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    # The alias refers to a model of the fourth family.
    driver = await start_driver(
        strata_server.program, strata_server.tenant.id, emulated, GEMINI, model="gemini-pro-latest"
    )
    await driver.task("Task one.", tool_reply("Oslo"), tool_reply("Bergen"), text_reply("Answer one."))
    assert [withheld_by(call) for call in await driver.calls()] == [{}, {}, {}]
    await driver.switch(GEMINI)
    await driver.task("Task two.", tool_reply("Oslo"), text_reply("Answer two."))
    assert withheld_by((await driver.calls())[-1]) == {"family": [2, 4, 6]}
    await driver.switch(GEMINI, "gemini-4-argon")
    await driver.task("Task three.", text_reply("Answer three."))
    assert withheld_by((await driver.calls())[-1]) == {"family": [8, 10]}
    await driver.switch(GEMINI, "gemini-pro-latest")
    await driver.task("Task four.", text_reply("Answer four."))
    assert withheld_by((await driver.calls())[-1]) == {"family": [8, 10]}
    assert_all_accepted(emulated[GEMINI].requests())
    await assert_rebuilds(driver)


async def test_a_move_to_an_alias_of_an_unknown_family_costs_one_call(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated, GEMINI)
    await driver.switch(GEMINI, "gemini-pro-latest")
    assert is_complete(await driver.task("Task three.", tool_reply("Oslo"), text_reply("Answer three.")))
    assert is_complete(await driver.task("Task four.", text_reply("Answer four.")))
    await driver.switch(GEMINI)
    assert is_complete(await driver.task("Task five.", text_reply("Answer five.")))
    assert withheld_by((await driver.calls())[-1]) == {"rejected": [2, 4, 6, 8], "family": [10, 12, 14]}
    assert [request["status"] for request in emulated[GEMINI].requests()].count(400) == 1
    await assert_rebuilds(driver)


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
async def test_after_any_rejections_every_task_is_answered(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, steps: list[tuple[Any, ...]]
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    for step in steps:
        if step == ("reject",):
            reject_all_signatures(emulated)
        else:
            await turn_steps.take_step(driver, step)
    driver.calm()
    assert is_complete(await driver.task("And now?", tool_reply("Oslo"), text_reply("Now this."), abandons_calls=True))
    calls = await driver.calls()
    assert all(call.start.attempt <= 2 for call in calls)
    assert_no_break(calls)
    await assert_rebuilds(driver)


async def test_operators_see_a_rejection(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated, GEMINI)
    reject_all_signatures(emulated)
    await driver.task("Task three.", text_reply("Answer three."))
    async with open_operator(strata_server.url) as operator:
        await operator.log_in(strata_server.admin_key)
        path = f"/admin/conversations/{driver.conversation_id}"
        timeline = (await operator.get(path)).text
        assert "epoch 2: signatures rejected by the provider, left out from now on" in timeline
        call = (await operator.get(f"{path}/calls/10/2")).text
        assert "The previous attempt was rejected for its signatures" in call
        assert "the provider rejected signatures of this history" in call
        shown = (await operator.get(f"{path}/calls/10/2/json")).json()
        kinds = {warning["kind"]: warning for warning in shown["warnings"]}
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
async def test_an_answer_with_a_part_that_is_not_accepted_back_costs_one_call(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, body: bytes
) -> None:
    driver = await begin(strata_server, emulated, provider)
    emulated[provider].inject_fault(FaultKind.RAW, body=body)
    assert is_complete(await driver.task("Task three."))
    native = (await driver.natives())[10]
    assert "hologram" in json.dumps(native)

    assert is_complete(await driver.task("Task four.", text_reply("Answer four.")))

    failed, made = await calls_of_newest(driver)
    assert (failed.end and failed.end.error_code, made.end and made.end.error_code) == ("answer_rejected", None)
    assert {"kind": "signatures_rejected", "code": "answer_rejected", "epoch": 2} in made.start.warnings
    request = emulated[provider].requests()[-1]["body"]
    assert "hologram" not in json.dumps(request)
    assert "Answer three." in json.dumps(request)
    assert is_complete(await driver.task("Task five.", text_reply("Answer five.")))
    assert [request["status"] for request in emulated[provider].requests()].count(400) == 1
    assert (await driver.natives())[10] == native
    await assert_rebuilds(driver)
