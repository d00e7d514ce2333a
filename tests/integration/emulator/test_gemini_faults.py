"""All faults of the emulator, observed with the stock SDK where possible."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from google.genai import errors, types

from server.emulator.reply import FaultKind
from tests.support.gemini_emulator import MODEL, GeminiEmulator, asking, gemini_emulator, parts_of, user


@pytest.fixture
async def emulator() -> AsyncIterator[GeminiEmulator]:
    async with gemini_emulator() as running:
        yield running


async def stream(emulator: GeminiEmulator, fault: str, **config: Any) -> list[types.GenerateContentResponse]:
    """All chunks of a streamed answer with a fault."""
    # Only silence may time out, after two seconds: a busy machine must not turn another fault into a timeout.
    limit_ms = 2_000 if fault.startswith("silence") else 60_000
    options = types.HttpOptions(headers={"x-emulator-fault": fault}, timeout=limit_ms)
    call = emulator.client().aio.models.generate_content_stream(
        model=MODEL, contents="hello", config=types.GenerateContentConfig(http_options=options, **config)
    )
    return [chunk async for chunk in await call]


def finish_reasons(chunks: list[types.GenerateContentResponse]) -> list[Any]:
    return [chunk.candidates[0].finish_reason for chunk in chunks if chunk.candidates]


@pytest.mark.parametrize(
    ("fault", "error", "code", "status", "text"),
    [
        ("internal", errors.ServerError, 500, "INTERNAL", "An internal error has occurred."),
        ("unavailable", errors.ServerError, 503, "UNAVAILABLE", "The service is currently unavailable."),
        ("overloaded", errors.ServerError, 503, "UNAVAILABLE", "The model is overloaded. Please try again later."),
        ("gateway_timeout", errors.ServerError, 504, "DEADLINE_EXCEEDED", "timed out"),
        ("rate_limited", errors.ClientError, 429, "RESOURCE_EXHAUSTED", "Please retry in 3s."),
        ("rate_limited_no_delay", errors.ClientError, 429, "RESOURCE_EXHAUSTED", "You exceeded your current quota"),
        ("bad_auth", errors.ClientError, 401, "UNAUTHENTICATED", "API key not valid."),
        ("context_exceeded", errors.ClientError, 400, "INVALID_ARGUMENT", "exceeds the maximum number of tokens"),
        ("overloaded_mid_stream;after_chunks=2", errors.ServerError, 503, "UNAVAILABLE", "The model is overloaded."),
        ("error_mid_stream;after_chunks=2", errors.ServerError, 500, "INTERNAL", "An internal error"),
    ],
)
async def test_an_error_has_the_format_of_the_api(
    emulator: GeminiEmulator, fault: str, error: type[errors.APIError], code: int, status: str, text: str
) -> None:
    with pytest.raises(error) as caught:
        await stream(emulator, fault)

    assert (caught.value.code, caught.value.status) == (code, status)
    assert text in (caught.value.message or "")


@pytest.mark.parametrize(
    ("fault", "delay"), [("rate_limited;retry_after=1.5", "1.5s"), ("rate_limited_no_delay", None)]
)
async def test_a_rate_limit_has_a_delay_or_not(emulator: GeminiEmulator, fault: str, delay: str | None) -> None:
    response = await emulator.call("streamGenerateContent", asking(user("hi")), fault=fault)

    details = {detail["@type"].rpartition(".")[2]: detail for detail in response.json()["error"]["details"]}
    assert details.get("RetryInfo", {}).get("retryDelay") == delay
    assert {"QuotaFailure", "Help"} <= set(details)
    assert "retry-after" not in response.headers


async def test_an_error_in_mid_stream_follows_good_chunks(emulator: GeminiEmulator) -> None:
    response = await emulator.call(
        "streamGenerateContent", asking(user("hi")), fault="overloaded_mid_stream;after_chunks=2"
    )

    frames = response.text.split("\r\n\r\n")
    assert response.status_code == 200
    assert [frame.startswith('data: {"error":') for frame in frames] == [False, False, True, False]


async def test_a_cut_connection_breaks_the_body(emulator: GeminiEmulator) -> None:
    with pytest.raises(httpx2.RemoteProtocolError):
        await stream(emulator, "cut;after_chunks=3")


async def test_a_cut_is_in_the_middle_of_an_event(emulator: GeminiEmulator) -> None:
    received = bytearray()

    async def read() -> None:
        headers = {"x-goog-api-key": "k", "x-emulator-fault": "cut;after_chunks=1"}
        url = f"/v1/models/{MODEL}:streamGenerateContent?alt=sse"
        async with emulator.http.stream("POST", url, json=asking(user("hi")), headers=headers) as response:
            async for data in response.aiter_raw():
                received.extend(data)

    with pytest.raises(httpx2.RemoteProtocolError):
        await read()

    whole, part = received.split(b"\r\n\r\n")
    assert whole.endswith(b"}")
    assert part.startswith(b"data: {")


@pytest.mark.parametrize(("fault", "count"), [("early_end;after_chunks=3", 3), ("empty_stream", 0), ("early_end", 0)])
async def test_a_clean_end_before_the_answer_is_no_error_to_the_sdk(
    emulator: GeminiEmulator, fault: str, count: int
) -> None:
    chunks = await stream(emulator, fault)

    assert finish_reasons(chunks) == [None] * count


@pytest.mark.parametrize("fault", ["silence", "silence;after_chunks=2"])
async def test_silence_lasts_until_the_client_disconnects(emulator: GeminiEmulator, fault: str) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        await stream(emulator, fault)

    await asyncio.sleep(0.05)
    logged = emulator.state.request_log.list()[-1]
    assert logged["fault"] == "silence"
    assert logged["status"] == (None if fault == "silence" else 200)


async def test_a_slow_answer_arrives_completely(emulator: GeminiEmulator) -> None:
    started = time.monotonic()
    response = await emulator.call("generateContent", asking(user("hi")), fault="slow")

    assert response.status_code == 200
    assert time.monotonic() - started >= 2


async def test_a_malformed_event_is_invalid_json(emulator: GeminiEmulator) -> None:
    with pytest.raises(errors.UnknownApiResponseError):
        await stream(emulator, "malformed_json;after_chunks=1")


@pytest.mark.parametrize(("fault", "reason"), [("refusal", "SAFETY"), ("max_tokens", "MAX_TOKENS")])
async def test_an_answer_can_end_early_for_a_reason(emulator: GeminiEmulator, fault: str, reason: str) -> None:
    chunks = await stream(emulator, f"{fault};after_chunks=3")

    assert finish_reasons(chunks)[-1] == reason
    assert "".join(chunk.text or "" for chunk in chunks)


async def test_a_blocked_prompt_has_no_candidates(emulator: GeminiEmulator) -> None:
    (chunk,) = await stream(emulator, "blocked_prompt")

    assert chunk.candidates is None
    assert chunk.prompt_feedback
    assert chunk.prompt_feedback.block_reason is types.BlockedReason.PROHIBITED_CONTENT


async def test_an_empty_stop_shows_nothing(emulator: GeminiEmulator) -> None:
    thinking = types.ThinkingConfig(include_thoughts=True)
    chunks = await stream(emulator, "empty_stop", thinking_config=thinking)

    assert finish_reasons(chunks)[-1] == "STOP"
    assert not any(chunk.text for chunk in chunks)
    assert chunks[-1].usage_metadata
    assert chunks[-1].usage_metadata.thoughts_token_count


async def test_a_pause_is_continued_by_its_token(emulator: GeminiEmulator) -> None:
    whole = await emulator.accepts(asking(user("hello")))
    paused = await emulator.accepts(asking(user("hello")), fault="pause;after_chunks=4")
    candidate = paused["candidates"][0]
    rest = await emulator.accepts(asking(user("hello"), continuationToken=candidate["continuationToken"]))

    assert candidate["finishReason"] == "CONTINUATION"
    assert parts_of(paused)[0]["text"] + parts_of(rest)[0]["text"] == parts_of(whole)[0]["text"]
    assert await emulator.refusal(asking(user("hello"), continuationToken="AAAA")) == "Invalid continuation token."


async def test_the_sdk_continues_a_pause_itself(emulator: GeminiEmulator) -> None:
    await emulator.http.post("/__faults", json={"kind": "pause", "after_chunks": 4})
    call = emulator.client().aio.models.generate_content_stream(model=MODEL, contents="hello")
    chunks = [chunk async for chunk in await call]

    whole = parts_of(await emulator.accepts(asking(user("hello"))))[0]["text"]
    assert "".join(chunk.text or "" for chunk in chunks) == whole
    assert [one["method"] for one in emulator.state.request_log.list()].count("POST") == 3


async def test_unknown_parts_and_fields_are_accepted_when_sent_back(emulator: GeminiEmulator) -> None:
    answer = await emulator.accepts(asking(user("hi")), fault="unknown_parts")

    content = answer["candidates"][0]["content"]
    assert "futureContent" in content["parts"][0]
    assert "futureMetadata" in answer
    assert await emulator.accepts(asking(user("hi"), content, user("more")))


async def test_the_sdk_ignores_unknown_parts(emulator: GeminiEmulator) -> None:
    chunks = await stream(emulator, "unknown_parts")

    assert finish_reasons(chunks)[-1] == "STOP"


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind not in {FaultKind.SILENCE, FaultKind.SLOW}])
async def test_every_fault_is_possible_in_a_unary_call(emulator: GeminiEmulator, kind: FaultKind) -> None:
    try:
        response = await emulator.call("generateContent", asking(user("hi")), fault=kind)
    except httpx2.RemoteProtocolError:
        assert kind is FaultKind.CUT
    else:
        assert response.status_code == 200 or response.json()["error"]["code"] == response.status_code
    assert emulator.state.request_log.list()[-1]["fault"] == kind


async def test_raw_bytes_arrive_unchanged(emulator: GeminiEmulator) -> None:
    order = {"kind": "raw", "times": 2, "body_base64": "/wCA", "status": 502, "content_type": "text/html"}
    await emulator.http.post("/__faults", json=order)
    for method in ("generateContent", "streamGenerateContent"):
        response = await emulator.call(method, asking(user("hi")))
        assert (response.status_code, response.content) == (502, b"\xff\x00\x80")
        assert response.headers["content-type"] == "text/html"


async def test_armed_faults_apply_to_the_next_requests_to_the_model(emulator: GeminiEmulator) -> None:
    order = {"kind": "rate_limited", "times": 2, "retry_after_seconds": 7}
    armed = await emulator.http.post("/__faults", json=order)
    headers = {"x-goog-api-key": "k"}
    listed = await emulator.http.get("/v1/models", headers=headers)
    statuses = [(await emulator.call("generateContent", asking(user("hi")))).status_code for _ in range(3)]

    assert armed.json() == {"armed": 2}
    assert listed.status_code == 200
    assert statuses == [429, 429, 200]


@pytest.mark.parametrize(
    "order", [{"kind": "nonsense"}, {"kind": "cut", "after": 1}, [], {"kind": "cut", "times": "x"}]
)
async def test_an_impossible_fault_is_refused(emulator: GeminiEmulator, order: Any) -> None:
    by_body = await emulator.http.post("/__faults", json=order)
    by_header = await emulator.call("generateContent", asking(user("hi")), fault="cut;often=1")

    assert by_body.status_code == by_header.status_code == 400


async def test_a_script_mixes_answers_and_faults() -> None:
    script = """
    - fault: rate_limited
      retry_after: 2
      then:
        text: Here I am again.
    - {fault: overloaded, message: Not now.}
    """
    async with gemini_emulator(script) as emulator:
        answers = [await emulator.call("generateContent", asking(user("hi"))) for _ in range(4)]

    assert [answer.status_code for answer in answers] == [429, 200, 503, 200]
    assert parts_of(answers[1].json())[0]["text"] == "Here I am again."
    assert answers[2].json()["error"]["message"] == "Not now."
