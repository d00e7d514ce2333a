"""Every rule about requests: breaking it is refused with the documented text, keeping it is accepted."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.genai import errors, types

from tests.support.gemini_emulator import (
    MODEL,
    GeminiEmulator,
    asking,
    call,
    gemini_emulator,
    model,
    parts_of,
    responses,
    user,
)

DUMMY: dict[str, Any] = {"thoughtSignature": "skip_thought_signature_validator"}
COUNT = (
    "Please ensure that the number of function response parts is equal to the number of function call parts of the"
    " function call turn."
)
CALL_ORDER = (
    "Please ensure that function call turn comes immediately after a user turn or after a function response turn."
)
ONE_OF = "Invalid value at 'contents[0].parts[0]' (oneof), oneof field 'data' is already set. Cannot set 'functionCall'"
NO_DATA = (
    "* GenerateContentRequest.contents[0].parts[0].data: required oneof field 'data' must have one initialized field\n"
)
MIXED = (
    "Please ensure that function call turn contains at least one function_call part which can not be mixed with"
    " function_response parts."
)
RESPONSE_ORDER = "Please ensure that function response turn comes immediately after a function call turn."


@pytest.fixture
async def emulator() -> AsyncIterator[GeminiEmulator]:
    async with gemini_emulator() as running:
        yield running


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (asking(user("hi"), futureThing=1), 'Unknown name "futureThing": Cannot find field.'),
        (
            {"contents": [{"role": "user", "parts": [{"text": "hi", "txet": 1}]}]},
            "Unknown name \"txet\" at 'contents[0].parts[0]': Cannot find field.",
        ),
        (
            asking(user("hi"), model({"functionCall": {"name": "f", "thoughtSignature": "AA=="}}), responses("f")),
            "Unknown name \"thoughtSignature\" at 'contents[1].parts[0].function_call': Cannot find field.",
        ),
        (
            asking(user("hi"), generationConfig={"thinking_config": {"effort": "high"}}),
            "Unknown name \"effort\" at 'generation_config.thinking_config': Cannot find field.",
        ),
        (
            asking(user("hi"), tools=[{"functionDeclarations": [{"name": "f", "parameters": {"$ref": "x"}}]}]),
            "Unknown name \"$ref\" at 'tools[0].function_declarations[0].parameters': Cannot find field.",
        ),
    ],
)
async def test_an_unknown_field_is_named_with_its_path(emulator: GeminiEmulator, body: Any, text: str) -> None:
    assert await emulator.refusal(body) == f"Invalid JSON payload received. {text}"


@pytest.mark.parametrize("body", [b"{", b"nonsense", b'{"contents": [{"parts": [{"text": "\\ud800"}]}]}', b"\xff"])
async def test_invalid_json_is_refused(emulator: GeminiEmulator, body: bytes) -> None:
    url = f"/v1/models/{MODEL}:generateContent?key=k"
    response = await emulator.http.post(url, content=body)

    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("Invalid JSON payload received.")


async def test_all_unknown_fields_are_listed(emulator: GeminiEmulator) -> None:
    text = await emulator.refusal({"contents": [{"parts": [{"text": "hi", "a": 1}], "b": 2}], "c": 3})

    assert [line.split('"')[1] for line in text.splitlines()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"text": 1}, "Invalid value at 'contents[0].parts[0].text' (TYPE_STRING), 1"),
        (
            {"text": "a", "thoughtSignature": "*"},
            "Invalid value at 'contents[0].parts[0].thought_signature' (TYPE_BYTES), Base64 decoding failed for \"*\"",
        ),
        (
            {"text": "a", "functionCall": {"name": "f"}},
            ONE_OF,
        ),
        (
            {},
            NO_DATA,
        ),
    ],
)
async def test_a_part_has_one_kind_of_content(emulator: GeminiEmulator, part: Any, text: str) -> None:
    assert await emulator.refusal({"contents": [{"parts": [part]}]}) == text


async def test_keys_are_accepted_in_both_spellings_and_signatures_in_both_alphabets(emulator: GeminiEmulator) -> None:
    answer = await emulator.accepts(asking(user("hi")))
    (part,) = parts_of(answer)
    url_safe = part["thoughtSignature"].replace("+", "-").replace("/", "_").rstrip("=")
    snake = {
        "contents": [user("hi"), model({"text": part["text"], "thought_signature": url_safe}), user("more")],
        "system_instruction": {"parts": {"text": "one object stands for a list of one"}},
        "generation_config": {"max_output_tokens": 500, "thinkingConfig": {"include_thoughts": True}},
        "tools": [{"function_declarations": [{"name": "f", "parametersJsonSchema": {"anything": "goes"}}]}],
    }

    assert any(part.get("thought") for part in parts_of(await emulator.accepts(snake)))


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ([], "* GenerateContentRequest.contents: contents is not specified\n"),
        (
            [{"role": "user", "parts": []}],
            "* GenerateContentRequest.contents[0].parts: contents.parts must not be empty.\n",
        ),
        ([{"role": "assistant", "parts": [{"text": "a"}]}], "Please use a valid role: user, model."),
        ([model({"text": "a"}), user("b")], "Please ensure that multiturn requests alternate between user and model."),
        (
            [user("a"), model({"text": "b"})],
            "Please ensure that multiturn requests ends with a user role or a function response.",
        ),
        ([model(call("f", **DUMMY)), responses("f")], CALL_ORDER),
        ([user("a"), model({"text": "b"}), model(call("f", **DUMMY)), responses("f")], CALL_ORDER),
        ([user("a"), model(call("f", **DUMMY)), model(call("g")), responses("f", "g")], CALL_ORDER),
        ([user("a"), responses("f")], RESPONSE_ORDER),
        ([user("a"), model(call("f", **DUMMY)), responses("f"), responses("f")], RESPONSE_ORDER),
        ([user("a"), model(call("f", **DUMMY), call("g")), responses("f"), responses("g")], COUNT),
        ([user("a"), model(call("f", **DUMMY), call("g")), responses("f")], COUNT),
        ([user("a"), model(call("f", **DUMMY)), responses("f", "f")], COUNT),
        ([user("a"), model(call("f", **DUMMY)), user("b")], COUNT),
        (
            [user("a"), model(call("f", **DUMMY), *responses("f")["parts"]), user("b")],
            MIXED,
        ),
        (
            [user("a"), model(call("f", **DUMMY)), responses("g")],
            "Please ensure that function response parts have the names of the function call parts.",
        ),
    ],
)
async def test_contents_that_no_model_can_answer_are_refused(
    emulator: GeminiEmulator, contents: list[Any], text: str
) -> None:
    assert await emulator.refusal({"contents": contents}) == text


@pytest.mark.parametrize(
    "contents",
    [
        [user("a"), user("b")],
        [{"parts": [{"text": "a role is user where none is given"}]}],
        [user("a"), model({"text": ""}), user("b")],
        [user("a"), model({"text": "I look."}, call("f", **DUMMY), call("g")), responses("g", "f")],
        [user("a"), model(call("f", **DUMMY)), {**responses("f"), "role": "function"}],
        [user("a"), model(call("f", **DUMMY)), responses("f"), model(call("g", **DUMMY)), responses("g")],
    ],
)
async def test_contents_in_order_are_accepted(emulator: GeminiEmulator, contents: list[Any]) -> None:
    assert await emulator.accepts({"contents": contents})


@pytest.mark.parametrize(
    ("ids", "accepted"),
    [(("x", "y"), True), (("y", "x"), True), ((None, None), True), (("x", "z"), False), (("x", "x"), False)],
)
async def test_response_ids_are_those_of_the_calls(
    emulator: GeminiEmulator, ids: tuple[str | None, str | None], *, accepted: bool
) -> None:
    calls = [{"functionCall": {"id": one, "name": "f", "args": {}}, **DUMMY} for one in ("x", "y")]
    answers: list[Any] = [{"functionResponse": {"id": one, "name": "f", "response": {}}} for one in ids]
    body = asking(user("a"), model(*calls), {"role": "user", "parts": answers})

    if accepted:
        await emulator.accepts(body)
    else:
        assert "matches no function call" in await emulator.refusal(body)


@pytest.mark.parametrize(
    ("name", "thinking", "text"),
    [
        (
            MODEL,
            {"thinkingLevel": "LOW", "thinkingBudget": 100},
            "You can only set only one of thinking budget and thinking level.",
        ),
        ("gemini-2.5-pro", {"thinkingLevel": "LOW"}, "Thinking level is not supported for this model."),
        (
            "gemini-2.5-pro",
            {"thinkingBudget": 0},
            "Budget 0 is invalid. This model only works in thinking mode.",
        ),
        ("gemini-4-argon", {"thinkingBudget": 100}, "Thinking budget is not supported for this model."),
        ("gemini-4-argon", {"thinkingLevel": "minimal"}, "Thinking level MINIMAL is not supported for this model."),
        (
            "gemini-2.5-flash",
            {"thinkingBudget": 99_999},
            "The thinking budget 99999 is invalid. Please choose a value between 0 and 24576.",
        ),
    ],
)
async def test_thinking_is_controlled_as_the_model_allows(
    emulator: GeminiEmulator, name: str, thinking: Any, text: str
) -> None:
    body = asking(user("hi"), generationConfig={"thinkingConfig": thinking})

    assert await emulator.refusal(body, model=name) == text


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gemini-3.5-flash", {"thinkingConfig": {"thinkingLevel": "MINIMAL"}}),
        ("gemini-3.5-flash", {"thinkingConfig": {"thinkingBudget": 100}}),
        ("gemini-2.5-flash", {"thinkingConfig": {"thinkingBudget": -1}}),
        ("gemini-4-carbon", {"temperature": 0.1, "topP": 0.5, "topK": 3, "thinkingConfig": {"thinkingLevel": "HIGH"}}),
    ],
)
async def test_supported_settings_are_accepted(emulator: GeminiEmulator, name: str, config: Any) -> None:
    assert await emulator.accepts(asking(user("hi"), generationConfig=config), model=name)


async def test_without_thinking_there_are_no_thoughts(emulator: GeminiEmulator) -> None:
    off = {"thinkingConfig": {"thinkingBudget": 0, "includeThoughts": True}}
    answer = await emulator.accepts(asking(user("hi"), generationConfig=off), model="gemini-2.5-flash")

    assert "thoughtsTokenCount" not in answer["usageMetadata"]
    assert not any(part.get("thought") for part in parts_of(answer))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"x-goog-api-key": "invalid"}, 401),
        ({"x-goog-api-key": "expired"}, 400),
        ({"x-goog-api-key": "any other"}, 200),
    ],
)
async def test_a_key_is_required(emulator: GeminiEmulator, headers: dict[str, str], status: int) -> None:
    response = await emulator.http.get("/v1/models", headers=headers)

    assert response.status_code == status


async def test_the_key_may_be_in_the_query_and_is_not_logged(emulator: GeminiEmulator) -> None:
    response = await emulator.http.get("/v1/models?key=secret-key")

    assert response.status_code == 200
    assert "secret-key" not in (await emulator.http.get("/__requests")).text


async def test_models_are_listed_and_unknown_ones_are_not_found(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    names = [one.name async for one in await client.aio.models.list()]
    one = await client.aio.models.get(model="gemini-4-argon")
    with pytest.raises(errors.ClientError) as caught:
        await client.aio.models.generate_content(model="gemini-9", contents="hi")

    assert "models/gemini-3.8-flash" in names
    assert len(names) == 13
    assert one.supported_actions
    assert "createCachedContent" not in one.supported_actions
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
    assert caught.value.message == (
        "models/gemini-9 is not found for API version v1, or is not supported for generateContent. Call ListModels to"
        " see the list of available models and their supported methods."
    )


@pytest.mark.parametrize(("version", "status"), [("v1", 404), ("v1beta", 200), ("v2", 404)])
async def test_latest_aliases_exist_on_v1beta_only(emulator: GeminiEmulator, version: str, status: int) -> None:
    response = await emulator.call("generateContent", asking(user("hi")), model="gemini-flash-latest", version=version)

    assert response.status_code == status


async def test_tokens_are_counted(emulator: GeminiEmulator) -> None:
    counted = await emulator.client().aio.models.count_tokens(model=MODEL, contents="x" * 400)
    answer = await emulator.accepts(asking(user("x" * 400)))

    assert counted.total_tokens == answer["usageMetadata"]["promptTokenCount"] == 101


async def test_a_prompt_larger_than_the_window_is_refused(emulator: GeminiEmulator) -> None:
    text = await emulator.refusal(asking(user("x" * 4_194_400)))

    assert text == "The input token count (1048601) exceeds the maximum number of tokens allowed (1048576)."


async def test_tool_choice_is_respected(emulator: GeminiEmulator) -> None:
    tools = [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}, {"name": "g"}]}]
    must = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["g"]}}
    may_not = {"functionCallingConfig": {"mode": "NONE"}}

    forced = parts_of(await emulator.accepts(asking(user("hello"), tools=tools, toolConfig=must)))
    free = parts_of(await emulator.accepts(asking(user("use f"), tools=tools, toolConfig=may_not)))

    assert [part["functionCall"]["name"] for part in forced] == ["g"]
    assert not any("functionCall" in part for part in free)


async def test_a_function_is_declared_once(emulator: GeminiEmulator) -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "f"}]}]

    assert await emulator.refusal(asking(user("hi"), tools=tools)) == "Duplicate function declaration found: f"


async def test_an_answer_by_schema_is_json(emulator: GeminiEmulator) -> None:
    config = types.GenerateContentConfig(
        response_mime_type="application/json",
        response_json_schema={"type": "object", "properties": {"count": {"type": "integer"}}},
    )
    answer = await emulator.client().aio.models.generate_content(model=MODEL, contents="Give me 7", config=config)

    assert answer.parsed == {"count": 7}
