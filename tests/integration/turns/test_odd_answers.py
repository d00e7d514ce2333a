"""Answers that must not be sent back, on strict providers: they are stored, and the conversation continues without
them.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from server.conversation.block import ToolCallBlock
from server.conversation.errors import ProviderCallMalformed
from server.conversation.turn import StopReason, TurnState
from server.emulator.reply import FaultKind
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    messages_of,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import EmulatedProviders
from tests.unit.providers.wire.generated import anthropic_events, gemini_chunk

SECRET = "Half of a forbidden thing"
THINKING = (
    {"type": "thinking", "thinking": "", "signature": ""},
    [{"type": "thinking_delta", "thinking": SECRET}, {"type": "signature_delta", "signature": "c2ln"}],
)
TEXT = ({"type": "text", "text": ""}, [{"type": "text_delta", "text": SECRET}])


def call(arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    shell = {"type": "tool_use", "id": "toolu_odd", "name": "get_weather", "input": {}}
    return shell, [{"type": "input_json_delta", "partial_json": arguments}]


def claude(*blocks: Any, reason: str) -> bytes:
    events = anthropic_events([*blocks], reason)
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def gemini(*parts: dict[str, Any], reason: str) -> bytes:
    return b"data: " + json.dumps(gemini_chunk([*parts], reason, {})).encode() + b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    provider: str
    body: bytes
    state: TurnState
    stop_reason: StopReason
    error_code: str | None = None


GEMINI_CALL = {"functionCall": {"id": "odd", "name": "get_weather", "args": {}}}
CASES = {
    "claude thinking alone": Case(
        provider=ANTHROPIC,
        body=claude(THINKING, reason="max_tokens"),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.LENGTH,
    ),
    "gemini thinking alone": Case(
        provider=GEMINI,
        body=gemini({"text": SECRET, "thought": True}, reason="MAX_TOKENS"),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.LENGTH,
    ),
    "claude refusal": Case(
        provider=ANTHROPIC,
        body=claude(THINKING, TEXT, call("{}"), reason="refusal"),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.REFUSAL,
    ),
    "gemini refusal": Case(
        provider=GEMINI,
        body=gemini({"text": SECRET}, GEMINI_CALL, reason="PROHIBITED_CONTENT"),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.REFUSAL,
    ),
    "claude malformed call": Case(
        provider=ANTHROPIC,
        body=claude(THINKING, call('{"city": "Os'), reason="tool_use"),
        state=TurnState.FAILED,
        stop_reason=StopReason.ERROR,
        error_code=ProviderCallMalformed.code,
    ),
    "gemini malformed call": Case(
        provider=GEMINI,
        body=gemini(reason="MALFORMED_FUNCTION_CALL"),
        state=TurnState.FAILED,
        stop_reason=StopReason.ERROR,
        error_code=ProviderCallMalformed.code,
    ),
}


def break_off(driver: ConversationDriver, case: Case) -> None:
    """Answer the next turn with the bytes of the case."""
    driver.emulated[case.provider].inject_fault(FaultKind.RAW, body=case.body)


@pytest.mark.parametrize("after_results", [False, True], ids=["to a task", "to results"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_an_answer_that_must_not_be_sent_back_is_stored_and_the_conversation_continues_without_it(
    strata_server: StrataServer, emulated: EmulatedProviders, case: Case, *, after_results: bool
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, case.provider)
    await driver.task("One.", text_reply("Yes."))
    if after_results:
        await driver.task("Two.", tool_reply("Oslo"))
        break_off(driver, case)
        ended = await driver.answer()
    else:
        break_off(driver, case)
        ended = await driver.task("Two.")
    odd = ended.turn
    assert (odd.state, odd.stop_reason, odd.error_code) == (case.state, case.stop_reason, case.error_code)
    assert not any(isinstance(block, ToolCallBlock) for block in odd.blocks)
    assert ended.conversation.pending_calls == ()
    [*_, kept] = await driver.program.store.list_calls(driver.tenant_id, driver.conversation_id, odd.seq)
    assert kept.end is not None
    assert kept.end.raw_response == case.body
    ended = await driver.task("Three.", text_reply("Of course."))
    assert ended.turn.state is TurnState.COMPLETE
    newest = (await driver.calls())[-1]
    assert {"kind": "answer_left_out", "seq": odd.seq, "ids": []} in newest.start.repairs
    requests = emulated[case.provider].requests()
    assert SECRET not in json.dumps(messages_of(case.provider, requests[-1]["body"]))
    assert_all_accepted(requests)
    assert_no_break(await driver.calls())
    assert await assert_rebuilds(driver) == len(requests)


@pytest.mark.parametrize("provider", [GEMINI, ANTHROPIC])
async def test_the_output_of_a_refusal_is_sent_to_no_other_provider_and_is_in_no_history(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider)
    case = CASES["gemini refusal" if provider == GEMINI else "claude refusal"]
    break_off(driver, case)
    await driver.task("One.")
    other = ANTHROPIC if provider == GEMINI else GEMINI
    await driver.switch(other)
    await driver.task("Two.", text_reply("Yes."))
    assert SECRET not in json.dumps(emulated[other].requests()[-1]["body"])
    for number in range(3, 6):
        await driver.task(f"{number}.", text_reply("Yes."))
    await driver.program.compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    await driver.task("Six.", text_reply("Yes."))
    body = emulated[other].requests()[-1]["body"]
    assert SECRET not in json.dumps(body)
    assert "nothing was said" in json.dumps(body)
    await assert_rebuilds(driver)


async def test_calls_without_an_id_of_gemini_are_sent_back_without_one(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await start_driver(
        strata_server.program, strata_server.tenant.id, emulated, GEMINI, model="gemini-2.5-flash"
    )
    ended = await driver.task("One.", tool_reply("Oslo", "Bergen"), text_reply("Cold."))
    assert ended.turn.state is TurnState.COMPLETE
    call_turn = (await driver.turns())[1]
    ids = [block.id for block in call_turn.blocks if isinstance(block, ToolCallBlock)]
    assert len({*ids}) == 2
    _, called, answered = messages_of(GEMINI, emulated.gemini.requests()[-1]["body"])[-3:]
    calls = [part["functionCall"] for part in called["parts"] if "functionCall" in part]
    results = [part["functionResponse"] for part in answered["parts"]]
    assert [("id" in one, one["name"]) for one in (*calls, *results)] == [(False, "get_weather")] * 4
    # The generated id is used by the client and the other provider.
    await driver.switch(ANTHROPIC)
    await driver.task("Two.", text_reply("Yes."))
    sent = json.dumps(emulated.anthropic.requests()[-1]["body"])
    assert all(sent.count(call_id) == 2 for call_id in ids)
    await driver.switch(GEMINI, "gemini-2.5-flash")
    await driver.task("Three.", text_reply("Yes."))
    assert not any(call_id in json.dumps(emulated.gemini.requests()[-1]["body"]) for call_id in ids)
    for provider in (GEMINI, ANTHROPIC):
        assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(driver)


async def test_gemini_gets_no_text_next_to_function_responses(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    """What changes during a tool loop is sent with the next task, with either provider."""
    settings = {"layer_order": "append_only"}
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, ANTHROPIC, settings=settings)

    async def loop(number: int) -> None:
        await driver.task(f"{number}.", tool_reply("Oslo"))
        await driver.change(context={"todos": [f"after the call {number}"]})
        await driver.answer(text_reply("Cold."))

    await loop(1)
    await driver.switch(GEMINI, settings=settings)
    await loop(2)
    warnings = [warning["kind"] for warning in (await driver.calls())[-1].start.warnings]
    assert "dynamic_postponed" in warnings
    await driver.task("Three.", text_reply("Yes."))
    contents = messages_of(GEMINI, emulated.gemini.requests()[-1]["body"])
    beside = [content for content in contents if any("functionResponse" in part for part in content["parts"])]
    assert len(beside) == 2
    assert all(list(part) == ["functionResponse"] for content in beside for part in content["parts"])
    assert "after the call 2" in json.dumps(contents[-1])
    assert_all_accepted(emulated.gemini.requests())
    assert_no_break(await driver.calls())
    await assert_rebuilds(driver)
