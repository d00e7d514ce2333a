"""The bytes on the wire: frames, the order of chunks, positions of signatures, and consistent token counts."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.genai import types

from tests.support.gemini_emulator import MODEL, GeminiEmulator, asking, gemini_emulator, parts_of, user

SCRIPT = """
- when: talk
  times: always
  thinking: Let me think about this.
  text: Here is my answer to you.
- when: act
  times: always
  thinking: I need both.
  text: I look it up.
  tool_calls: [{name: f, arguments: {a: 1}}, {name: g}]
"""
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


@pytest.fixture
async def emulator() -> AsyncIterator[GeminiEmulator]:
    async with gemini_emulator(SCRIPT) as running:
        yield running


async def stream(emulator: GeminiEmulator, text: str, **more: Any) -> list[dict[str, Any]]:
    response = await emulator.call("streamGenerateContent", asking(user(text), **more))
    assert response.headers["content-type"] == "text/event-stream"
    *frames, rest = response.content.split(b"\r\n\r\n")
    assert rest == b""
    assert all(frame.startswith(b"data: {") for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def parts(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for chunk in chunks for part in chunk["candidates"][0]["content"].get("parts", [])]


async def test_a_text_ends_with_a_signed_empty_part_next_to_the_finish_reason(emulator: GeminiEmulator) -> None:
    chunks = await stream(emulator, "talk")

    *texts, last = parts(chunks)
    assert "".join(part["text"] for part in texts) == "Here is my answer to you."
    assert not any("thoughtSignature" in part for part in texts)
    assert last["text"] == ""
    assert last["thoughtSignature"]
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["STOP"]


async def test_thoughts_come_first_and_only_on_request(emulator: GeminiEmulator) -> None:
    shown = parts(await stream(emulator, "talk", generationConfig=THOUGHTS))
    hidden = parts(await stream(emulator, "talk"))

    flags = [part.get("thought", False) for part in shown]
    assert flags == sorted(flags, reverse=True)
    assert "".join(part["text"] for part in shown if part.get("thought")) == "Let me think about this."
    assert not any(part.get("thought") for part in hidden)


async def test_parallel_calls_are_in_separate_chunks(emulator: GeminiEmulator) -> None:
    chunks = await stream(emulator, "act")

    calls = [part for part in parts(chunks) if "functionCall" in part]
    assert [[part["functionCall"]["name"] for part in parts([chunk])] for chunk in chunks[-2:]] == [["f"], ["g"]]
    assert ["thoughtSignature" in part for part in calls] == [True, False]
    assert sum("thoughtSignature" in part for part in parts(chunks)) == 1
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


async def test_usage_grows_and_adds_up(emulator: GeminiEmulator) -> None:
    chunks = await stream(emulator, "talk", generationConfig=THOUGHTS)

    usages = [chunk["usageMetadata"] for chunk in chunks]
    for usage in usages:
        counted = [usage.get(f"{name}TokenCount", 0) for name in ("prompt", "candidates", "thoughts")]
        assert usage["totalTokenCount"] == sum(counted)
    totals = [usage["totalTokenCount"] for usage in usages]
    assert totals == sorted(totals)
    assert usages[-1]["candidatesTokenCount"] == 7
    assert usages[-1]["thoughtsTokenCount"] == 6
    assert {chunk["modelVersion"] for chunk in chunks} == {MODEL}
    assert len({chunk["responseId"] for chunk in chunks}) == 1


async def test_a_unary_answer_has_the_same_content_in_whole_parts(emulator: GeminiEmulator) -> None:
    answer = await emulator.accepts(asking(user("talk"), generationConfig=THOUGHTS))
    act = await emulator.accepts(asking(user("act")))

    thought, text = parts_of(answer)
    assert thought == {"text": "Let me think about this.", "thought": True}
    assert text["text"] == "Here is my answer to you."
    assert text["thoughtSignature"]
    assert [sorted(part) for part in parts_of(act)] == [
        ["text"],
        ["functionCall", "thoughtSignature"],
        ["functionCall"],
    ]
    assert answer["candidates"][0]["finishReason"] == "STOP"


async def test_the_token_limit_cuts_the_answer_off(emulator: GeminiEmulator) -> None:
    config = types.GenerateContentConfig(max_output_tokens=9)
    chunks = [
        chunk
        async for chunk in await emulator.client().aio.models.generate_content_stream(
            model=MODEL, contents="talk", config=config
        )
    ]

    end = chunks[-1]
    assert end.candidates
    assert end.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
    assert end.usage_metadata
    assert (end.usage_metadata.thoughts_token_count, end.usage_metadata.candidates_token_count) == (6, 3)
    assert "".join(chunk.text or "" for chunk in chunks) == "Here is my "


async def test_thinking_alone_can_use_up_the_limit(emulator: GeminiEmulator) -> None:
    answer = await emulator.accepts(asking(user("talk"), generationConfig={"maxOutputTokens": 3}))

    assert answer["candidates"][0] == {"content": {"role": "model"}, "finishReason": "MAX_TOKENS", "index": 0}
    assert answer["usageMetadata"]["thoughtsTokenCount"] == 3


async def test_a_stop_sequence_ends_the_text(emulator: GeminiEmulator) -> None:
    answer = await emulator.accepts(asking(user("talk"), generationConfig={"stopSequences": ["answer"]}))

    assert parts_of(answer)[0]["text"] == "Here is my "


async def test_without_sse_the_stream_is_a_json_array(emulator: GeminiEmulator) -> None:
    url = f"/v1/models/{MODEL}:streamGenerateContent?key=k"
    good = await emulator.http.post(url, json=asking(user("talk")))
    bad = await emulator.http.post(url, json=asking())

    assert good.json()[-1]["candidates"][0]["finishReason"] == "STOP"
    assert bad.json()[0]["error"]["status"] == "INVALID_ARGUMENT"


async def test_the_same_requests_get_the_same_bytes() -> None:
    answers = []
    for _ in range(2):
        async with gemini_emulator(SCRIPT) as emulator:
            requests = [asking(user(text)) for text in ("talk", "act", "improvise something")]
            answers.append([(await emulator.call("streamGenerateContent", body)).content for body in requests])

    assert answers[0] == answers[1]
