"""A long tool loop with the stock SDK, and each way to invalidate its signatures."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from tests.support.gemini_emulator import MODEL, WEATHER, GeminiEmulator, asking, call, gemini_emulator, model, user

STEPS = 10
SCRIPT = "\n".join(
    f"""
- thinking: Step {step} needs two cities.
  tool_calls:
    - {{name: get_weather, arguments: {{city: City {step} A, day: {step}}}}}
    - {{name: get_weather, arguments: {{city: City {step} B, day: {step}}}}}
"""
    for step in range(STEPS)
)
CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=[WEATHER])],
    thinking_config=types.ThinkingConfig(include_thoughts=True),
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)
MISSING = (
    "Function call is missing a thought_signature in functionCall parts. This is required for tools to work correctly,"
    " and missing thought_signature may lead to degraded model performance. Additional data, function call"
    " `default_api:get_weather` , position {}. Please refer to"
    " https://ai.google.dev/gemini-api/docs/thought-signatures for more details."
)
CORRUPTED = "Corrupted thought signature."


@pytest.fixture
async def emulator() -> AsyncIterator[GeminiEmulator]:
    async with gemini_emulator(SCRIPT) as running:
        yield running


async def stream_step(client: genai.Client, contents: list[types.Content]) -> types.Content:
    """One model response, its parts in the order of the chunks."""
    parts: list[types.Part] = []
    async for chunk in await client.aio.models.generate_content_stream(
        model=MODEL, contents=list(contents), config=CONFIG
    ):
        assert chunk.candidates
        content = chunk.candidates[0].content
        assert content is not None
        parts += content.parts or []
    return types.Content(role="model", parts=parts)


def answers_to(content: types.Content) -> types.Content:
    calls = [part.function_call for part in content.parts or [] if part.function_call]
    return types.Content(
        role="user",
        parts=[
            types.Part(function_response=types.FunctionResponse(id=one.id, name=one.name, response={"output": "sunny"}))
            for one in calls
        ],
    )


async def run_loop(client: genai.Client) -> list[types.Content]:
    """The conversation up to the last function responses; the emulator accepted each of its steps."""
    contents = [types.Content(role="user", parts=[types.Part(text="Compare the weather everywhere")])]
    for _ in range(STEPS):
        answer = await stream_step(client, contents)
        contents += [answer, answers_to(answer)]
    return contents


def signed_calls(contents: list[types.Content]) -> list[types.Part]:
    return [part for one in contents for part in one.parts or [] if part.function_call and part.thought_signature]


async def refusal(client: genai.Client, contents: list[types.Content]) -> str | None:
    with pytest.raises(errors.ClientError) as caught:
        await stream_step(client, contents)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    return caught.value.message


async def test_ten_steps_of_parallel_calls_are_accepted(emulator: GeminiEmulator) -> None:
    client = emulator.client()

    contents = await run_loop(client)
    end = await stream_step(client, contents)

    calls = [part for one in contents for part in one.parts or [] if part.function_call]
    ids = [part.function_call.id for part in calls if part.function_call]
    assert len(calls) == 2 * STEPS
    assert len(signed_calls(contents)) == STEPS, "only the first call of each step is signed"
    assert len(set(ids)) == 2 * STEPS
    assert None not in ids
    last = (end.parts or [])[-1]
    assert last.text == ""
    assert last.thought_signature
    visible = "".join(part.text or "" for part in end.parts or [] if not part.thought)
    assert "sunny" in visible


@pytest.mark.parametrize("step", [0, 4, 9])
async def test_a_dropped_signature_is_missing(emulator: GeminiEmulator, step: int) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    signed_calls(contents)[step].thought_signature = None

    assert await refusal(client, contents) == MISSING.format(2 * step + 2)


async def test_two_swapped_signatures_are_corrupted(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    one, other = signed_calls(contents)[2:4]
    one.thought_signature, other.thought_signature = other.thought_signature, one.thought_signature

    assert await refusal(client, contents) == CORRUPTED


async def test_a_signature_moved_to_the_second_call_is_missing_on_the_first(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    first, second = [part for part in contents[1].parts or [] if part.function_call]
    first.thought_signature, second.thought_signature = None, first.thought_signature

    assert await refusal(client, contents) == MISSING.format(2)


async def test_steps_merged_into_one_content_are_refused(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    merged = types.Content(role="model", parts=[*(contents[1].parts or []), *(contents[3].parts or [])])

    assert await refusal(client, [contents[0], merged, contents[2], contents[4], *contents[5:]]) == (
        "Please ensure that the number of function response parts is equal to the number of function call parts of the"
        " function call turn."
    )


async def test_a_signed_part_merged_with_unsigned_text_is_corrupted(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    end = await stream_step(client, contents)
    spoken = [part for part in end.parts or [] if not part.thought]
    joined = types.Part(
        text="".join(part.text or "" for part in spoken), thought_signature=spoken[-1].thought_signature
    )
    more = types.Content(role="user", parts=[types.Part(text="And now?")])

    kept = [*contents, types.Content(role="model", parts=spoken), more]
    assert (await stream_step(client, kept)).parts
    assert await refusal(client, [*contents, types.Content(role="model", parts=[joined]), more]) == CORRUPTED


async def test_an_altered_signature_is_corrupted(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    part = signed_calls(contents)[5]
    assert part.thought_signature
    part.thought_signature = part.thought_signature[:-1] + bytes([part.thought_signature[-1] ^ 1])

    assert await refusal(client, contents) == CORRUPTED


async def test_a_signed_call_with_other_arguments_is_corrupted(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    spoiled = copy.deepcopy(contents)
    function_call = signed_calls(spoiled)[0].function_call
    assert function_call
    function_call.args = {"city": "Elsewhere"}

    assert await refusal(client, spoiled) == CORRUPTED


async def test_signatures_of_another_account_are_corrupted(emulator: GeminiEmulator) -> None:
    contents = await run_loop(emulator.client("key-a"))

    assert await refusal(emulator.client("key-b"), contents) == CORRUPTED


async def test_signatures_of_earlier_turns_may_be_absent_but_not_wrong(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    contents = await run_loop(client)
    end = await stream_step(client, contents)
    later = [*contents, end, types.Content(role="user", parts=[types.Part(text="Thanks. What else?")])]
    without = copy.deepcopy(later)
    for part in signed_calls(without):
        part.thought_signature = None
    wrong = copy.deepcopy(later)
    (wrong[-2].parts or [])[-1].thought_signature = b"not one of ours"

    assert (await stream_step(client, without)).parts
    assert await refusal(client, wrong) == CORRUPTED


@pytest.mark.parametrize("dummy", ["skip_thought_signature_validator", "context_engineering_is_the_way_to_go"])
@pytest.mark.parametrize("as_bytes", [True, False], ids=["base64", "literal"])
async def test_the_documented_dummies_replace_any_signature(
    emulator: GeminiEmulator, dummy: str, *, as_bytes: bool
) -> None:
    client = emulator.client()
    signature: Any = dummy.encode() if as_bytes else dummy
    foreign = types.Part.model_validate(
        {"function_call": {"name": "get_weather", "args": {}}, "thought_signature": signature}
    )
    contents = [
        types.Content(role="user", parts=[types.Part(text="Weather?")]),
        types.Content(role="model", parts=[foreign]),
        answers_to(types.Content(role="model", parts=[foreign])),
    ]

    assert (await stream_step(client, contents)).parts
    sent = emulator.state.request_log.list()[-1]["body"]["contents"][1]["parts"][0]
    assert (sent["thoughtSignature"] == dummy) is not as_bytes


async def test_a_text_next_to_the_responses_starts_a_new_turn(emulator: GeminiEmulator) -> None:
    answering = {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {}}}, {"text": "go on"}]}

    assert await emulator.accepts(asking(user("hi"), model(call("f")), answering))


@pytest.mark.parametrize(
    ("signed_by", "sent_to", "text"),
    [
        ("gemini-3.8-flash", "gemini-3.5-flash", None),
        ("gemini-3.8-flash", "gemini-4-argon", CORRUPTED),
        ("gemini-4-carbon", "gemini-4-argon", None),
        ("gemini-4-carbon", "gemini-3.7-flash", "Invalid thought signature."),
        ("gemini-4-carbon", "gemini-2.5-pro", None),
    ],
)
async def test_signatures_are_valid_within_a_model_family(
    emulator: GeminiEmulator, signed_by: str, sent_to: str, text: str | None
) -> None:
    answer = await emulator.accepts(asking(user("hi")), model=signed_by)
    names = [part["functionCall"]["name"] for part in answer["candidates"][0]["content"]["parts"]]
    answers = {"role": "user", "parts": [{"functionResponse": {"name": name, "response": {}}} for name in names]}
    body = asking(user("hi"), answer["candidates"][0]["content"], answers)

    if text is None:
        await emulator.accepts(body, model=sent_to)
    else:
        assert await emulator.refusal(body, model=sent_to) == text


async def test_2_5_has_no_call_ids_and_needs_no_signatures(emulator: GeminiEmulator) -> None:
    answer = await emulator.accepts(asking(user("hi")), model="gemini-2.5-flash")
    parts = answer["candidates"][0]["content"]["parts"]
    unsigned = [{"functionCall": part["functionCall"]} for part in parts]
    answers = {"role": "user", "parts": [{"functionResponse": {"name": "get_weather", "response": {}}}] * 2}

    assert ["thoughtSignature" in part for part in parts] == [True, False]
    assert all("id" not in part["functionCall"] for part in parts)
    assert await emulator.accepts(asking(user("hi"), model(*unsigned), answers), model="gemini-2.5-flash")
