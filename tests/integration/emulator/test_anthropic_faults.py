"""Faults of the emulator, observed with the stock SDK."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest

from tests.support.anthropic_emulator import (
    FABLE,
    MANUAL,
    WEATHER,
    AnthropicEmulator,
    anthropic_emulator,
    asking,
    assistant_message,
    user,
)

HELLO = user("Tell me a story.")


@pytest.fixture(scope="module")
async def emulator() -> AsyncIterator[AnthropicEmulator]:
    async with anthropic_emulator() as running:
        yield running


async def read_events(
    emulator: AnthropicEmulator, body: dict[str, Any], fault: str = "", **options: Any
) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: names and data."""
    response = await emulator.post({**body, "stream": True}, fault=fault, **options)
    assert response.status_code == 200, response.text
    events = []
    for record in response.text.split("\n\n"):
        if record:
            name, data = record.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


async def drain(client: anthropic.AsyncAnthropic, fault: str, seen: list[str]) -> None:
    """Read a stream to its end, and record its events."""
    headers = {"x-emulator-fault": fault}
    async for event in await client.messages.create(**asking(HELLO), stream=True, extra_headers=headers):
        seen.append(event.type)  # noqa: PERF401  reason: the events before an error are needed


@pytest.mark.parametrize(
    ("fault", "kind", "status", "type_", "retry_after"),
    [
        ("rate_limited;retry_after=3", anthropic.RateLimitError, 429, "rate_limit_error", "3"),
        ("rate_limited", anthropic.RateLimitError, 429, "rate_limit_error", "1"),
        ("rate_limited_no_delay", anthropic.RateLimitError, 429, "rate_limit_error", None),
        ("internal", anthropic.InternalServerError, 500, "api_error", None),
        ("unavailable", anthropic.APIStatusError, 503, "api_error", None),
        ("gateway_timeout", anthropic.APIStatusError, 504, "timeout_error", None),
        ("overloaded", anthropic.APIStatusError, 529, "overloaded_error", None),
        ("bad_auth", anthropic.AuthenticationError, 401, "authentication_error", None),
        ("no_credit", anthropic.BadRequestError, 400, "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_refused_request_has_a_reason_and_a_delay(
    emulator: AnthropicEmulator,
    fault: str,
    kind: type[anthropic.APIStatusError],
    status: int,
    type_: str,
    retry_after: str | None,
    is_stream: bool,  # noqa: FBT001  reason: a parameter of the test
) -> None:
    with pytest.raises(kind) as caught:
        await emulator.client().messages.create(
            **asking(HELLO), stream=is_stream, extra_headers={"x-emulator-fault": fault}
        )
    error = caught.value
    assert (error.status_code, error.type) == (status, type_)
    assert error.response.headers.get("retry-after") == retry_after
    assert error.request_id == error.response.headers["request-id"]
    assert error.request_id
    assert error.request_id.startswith("req_")


@pytest.mark.parametrize(
    ("fault", "type_"), [("overloaded_mid_stream", "overloaded_error"), ("error_mid_stream", "api_error")]
)
async def test_an_error_in_mid_stream_is_an_event(emulator: AnthropicEmulator, fault: str, type_: str) -> None:
    seen: list[str] = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        await drain(emulator.client(), f"{fault};after_chunks=4", seen)
    assert (caught.value.status_code, caught.value.type) == (200, type_)
    assert seen[0] == "message_start"
    assert seen.count("content_block_delta") == 4
    assert "message_stop" not in seen


async def test_the_same_fault_without_a_stream_is_a_status(emulator: AnthropicEmulator) -> None:
    response = await emulator.post(asking(HELLO), fault="overloaded_mid_stream")
    assert response.status_code == 529


async def test_a_cut_connection_is_not_a_proper_end(emulator: AnthropicEmulator) -> None:
    seen: list[str] = []
    with pytest.raises(httpx2.RemoteProtocolError):
        await drain(emulator.client(), "cut;after_chunks=3", seen)
    assert seen.count("content_block_delta") == 3
    with pytest.raises((httpx2.RemoteProtocolError, anthropic.APIConnectionError)):
        await emulator.client().messages.create(**asking(HELLO), extra_headers={"x-emulator-fault": "cut"})


async def test_an_early_end_looks_clean(emulator: AnthropicEmulator) -> None:
    headers = {"x-emulator-fault": "early_end;after_chunks=3"}
    async with emulator.client().messages.stream(**asking(HELLO), extra_headers=headers) as stream:
        message = await stream.get_final_message()
    assert message.stop_reason is None


async def test_an_empty_stream_has_no_events(emulator: AnthropicEmulator) -> None:
    assert await read_events(emulator, asking(HELLO), "empty_stream") == []


@pytest.mark.parametrize("fault", ["silence", "silence;after_chunks=2"])
async def test_silence_lasts_until_the_client_disconnects(emulator: AnthropicEmulator, fault: str) -> None:
    with pytest.raises((httpx2.ReadTimeout, anthropic.APITimeoutError)):
        await drain(emulator.client(timeout=0.3), fault, [])


async def test_slowness_is_seconds_between_chunks(emulator: AnthropicEmulator) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await emulator.post(asking(HELLO), fault="slow")


async def test_malformed_json_comes_in_a_well_formed_stream(emulator: AnthropicEmulator) -> None:
    response = await emulator.post(asking(HELLO, stream=True), fault="malformed_json;after_chunks=2")
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    broken = []
    for line in data:
        try:
            json.loads(line)
        except ValueError:
            broken.append(line)
    assert len(broken) == 1
    assert json.loads(data[-1]) == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("fault", "stop_reason"),
    [
        ("refusal", "refusal"),
        ("pause", "pause_turn"),
        ("max_tokens", "max_tokens"),
        ("empty_stop", "end_turn"),
        ("context_exceeded", "model_context_window_exceeded"),
    ],
)
async def test_a_turn_can_end_in_many_ways(emulator: AnthropicEmulator, fault: str, stop_reason: str) -> None:
    headers = {"x-emulator-fault": fault}
    async with emulator.client().messages.stream(**asking(HELLO), extra_headers=headers) as stream:
        streamed = await stream.get_final_message()
    whole = await emulator.client().messages.create(**asking(HELLO), extra_headers=headers)
    assert (streamed.stop_reason, whole.stop_reason) == (stop_reason, stop_reason)
    assert [one.type for one in streamed.content] == [one.type for one in whole.content]
    if fault in {"refusal", "empty_stop"}:
        assert not streamed.content
    if fault == "refusal":
        assert streamed.stop_details
        assert streamed.stop_details.type == "refusal"
        assert whole.stop_details == streamed.stop_details


async def test_a_paused_turn_is_sent_back_and_continues(emulator: AnthropicEmulator) -> None:
    paused = await emulator.accepts(asking(HELLO), fault="pause")
    again = asking(HELLO, assistant_message(paused))
    answer = await emulator.accepts(again)
    assert answer["stop_reason"] == "end_turn"
    # The continuation belongs to the same message, whether the client joins the two or not.
    joined = {"role": "assistant", "content": [*paused["content"], *answer["content"]]}
    await emulator.accepts(asking(HELLO, joined, user("Thanks.")))
    await emulator.accepts(asking(HELLO, assistant_message(paused), assistant_message(answer), user("Thanks.")))
    edited = [*paused["content"][:-1], {"type": "text", "text": "I never said that."}]
    assert "prefill" in await emulator.refusal(asking(HELLO, {"role": "assistant", "content": edited}))


async def test_the_token_limit_breaks_a_tool_call_in_two(emulator: AnthropicEmulator) -> None:
    body = asking(user("What is the weather in Paris?"), tools=[WEATHER])
    events = await read_events(emulator, body, "max_tokens")
    written = "".join(
        data["delta"]["partial_json"] for _, data in events if data.get("delta", {}).get("type") == "input_json_delta"
    )
    assert written
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|delimiter"):
        json.loads(written)
    assert events[-2][1]["delta"]["stop_reason"] == "max_tokens"


async def test_the_token_limit_of_the_request_holds(emulator: AnthropicEmulator) -> None:
    answer = await emulator.accepts({**asking(HELLO, model=MANUAL), "max_tokens": 5})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 5)


async def test_a_stop_sequence_ends_the_answer(emulator: AnthropicEmulator) -> None:
    answer = await emulator.accepts(asking(HELLO, stop_sequences=["emulated"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "emulated")
    assert "emulated" not in answer["content"][-1]["text"]


async def test_unknown_content_is_sent_to_test_clients(emulator: AnthropicEmulator) -> None:
    events = await read_events(emulator, asking(HELLO), "unknown_parts")
    names = {name for name, _ in events}
    assert "emulated_novelty" in names
    assert "emulated_note" in events[0][1]["message"]
    assert any(data.get("delta", {}).get("type") == "novelty_delta" for _, data in events)
    headers = {"x-emulator-fault": "unknown_parts"}
    message = await emulator.client().messages.create(**asking(HELLO), extra_headers=headers)
    assert message.content[-1].type == "emulated_novelty"
    # It is accepted when it is sent back unchanged.
    await emulator.client().messages.create(**asking(HELLO, message.to_param(), user("More")))


async def test_a_transcript_with_reasoning_in_it_is_refused(emulator: AnthropicEmulator) -> None:
    answer = await emulator.accepts(asking(user("Earlier:\nuser: hi\nthink: they greet me\nassistant: hello")))
    assert answer["stop_reason"] == "refusal"
    assert answer["stop_details"]["category"] == "reasoning_extraction"


async def test_a_script_can_fail_and_then_continue() -> None:
    script = """
- fault: overloaded
  times: 2
  then: {text: At last.}
"""
    async with anthropic_emulator(script) as emulator:
        message = await emulator.client(max_retries=2).messages.create(**asking(HELLO))
        assert message.content[-1].type == "text"
        assert message.content[-1].text == "At last."
        assert emulator.state.request_log.list()[0]["fault"] == "overloaded"


async def test_armed_faults_apply_to_the_next_requests(emulator: AnthropicEmulator) -> None:
    await emulator.http.post("/__faults", json={"kind": "internal", "times": 2})
    statuses = [(await emulator.post(asking(HELLO))).status_code for _ in range(3)]
    assert statuses == [500, 500, 200]


async def test_the_stream_has_the_documented_order(emulator: AnthropicEmulator) -> None:
    body = asking(user("What is the weather in Paris and Rome?"), tools=[WEATHER])
    events = await read_events(emulator, body)
    names = [name for name, _ in events if name != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert ("ping", {"type": "ping"}) in events
    blocks = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [one["type"] for one in blocks] == ["thinking", "tool_use", "tool_use"]
    assert blocks[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert all(one["input"] == {} for one in blocks[1:])
    first = [data["delta"]["type"] for name, data in events if name == "content_block_delta" and data["index"] == 0]
    assert first == ["signature_delta"]  # the text of its thinking is omitted
    pieces = [data["delta"]["partial_json"] for _, data in events if data.get("index") == 1 and "delta" in data]
    assert pieces[0] == ""
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    usage = events[-2][1]["usage"]
    assert usage["output_tokens"] > usage["output_tokens_details"]["thinking_tokens"] > 0
    assert events[0][1]["message"]["usage"]["input_tokens"] == usage["input_tokens"]


async def test_shown_thinking_comes_in_pieces_before_its_one_signature(emulator: AnthropicEmulator) -> None:
    body = asking(HELLO, model=FABLE, thinking={"type": "adaptive", "display": "summarized"})
    events = await read_events(emulator, body)
    kinds = [data["delta"]["type"] for name, data in events if name == "content_block_delta" and data["index"] == 0]
    assert len(kinds) > 2
    assert set(kinds[:-1]) == {"thinking_delta"}
    assert kinds[-1] == "signature_delta"


async def test_the_stream_and_the_message_are_the_same() -> None:
    async with anthropic_emulator() as one, anthropic_emulator() as other:
        body = asking(user("What is the weather in Paris and Rome?"), tools=[WEATHER])
        whole = await one.client().messages.create(**body)
        async with other.client().messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    assert streamed.to_dict() == whole.to_dict()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_raw_bytes_arrive_unchanged(emulator: AnthropicEmulator, *, is_stream: bool) -> None:
    order = {"kind": "raw", "body_base64": "/wCA", "status": 502, "content_type": "text/html"}
    await emulator.http.post("/__faults", json=order)
    response = await emulator.post({**asking(HELLO), "stream": is_stream})
    assert (response.status_code, response.content) == (502, b"\xff\x00\x80")
    assert response.headers["content-type"] == "text/html"
