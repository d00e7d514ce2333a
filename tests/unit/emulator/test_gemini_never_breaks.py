"""The Gemini emulator answers any JSON, or refuses it with an error of the API; it never fails itself."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.emulator.exchange import Message
from server.emulator.gemini.app import build_gemini_app
from server.emulator.gemini.decoding import MESSAGES, camel_case
from server.emulator.state import build_state

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from(["user", "model", "LOW", "ANY", "f", "AAAA", "object", "array", "3s", "application/json"])
)
names = st.sampled_from(sorted({"$ref", *(camel_case(name) for fields in MESSAGES.values() for name in fields)}))
anything = st.recursive(
    leaves, lambda below: st.lists(below, max_size=3) | st.dictionaries(names, below, max_size=4), max_leaves=12
)


def shaped(kind: str, depth: int = 0) -> st.SearchStrategy[Any]:
    """Mostly what the field expects, so that the rules after the decoding are reached too."""
    if kind.endswith("[]"):
        return st.lists(shaped(kind[:-2], depth), min_size=1, max_size=3)
    if kind.endswith("{}"):
        return st.dictionaries(st.text(max_size=4), shaped(kind[:-2], depth + 1), max_size=2)
    if kind in MESSAGES and depth < 6:
        fields = MESSAGES[kind].items()
        return st.fixed_dictionaries({}, optional={name: shaped(below, depth + 1) for name, below in fields})
    scalars: dict[str, st.SearchStrategy[Any]] = {
        "string": st.sampled_from(["user", "model", "f", "hello f", "", "models/gemini-3.8-flash", "300s"]),
        "bytes": st.sampled_from(["", "AAAA", "skip_thought_signature_validator"]),
        "bool": st.booleans(),
        "int32": st.integers(-1, 100),
        "number": st.floats(0, 2),
        "enum": st.sampled_from(["LOW", "ANY", "OBJECT", "STRING"]),
        "struct": st.dictionaries(st.text(max_size=4), leaves, max_size=3),
    }
    return scalars.get(kind, anything)


# A part has one kind of content, so parts with more are mostly refused; these are not.
parts = st.sampled_from(
    [
        {"text": "call f"},
        {"text": ""},
        {"functionCall": {"name": "f"}, "thoughtSignature": "skip_thought_signature_validator"},
        {"functionResponse": {"name": "f", "response": {"a": 1}}},
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
    ]
)
contents = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "model"]), "parts": st.lists(parts, min_size=1, max_size=3)}
    ),
    min_size=1,
    max_size=4,
)
tools = st.lists(
    st.fixed_dictionaries({"functionDeclarations": st.just([{"name": "f"}])})
    | st.builds(lambda schema: {"functionDeclarations": [{"name": "f", "parametersJsonSchema": schema}]}, anything),
    max_size=1,
)
plausible = st.fixed_dictionaries(
    {"contents": contents},
    optional={
        "tools": tools,
        "generationConfig": shaped("GenerationConfig"),
        "toolConfig": shaped("ToolConfig"),
        "systemInstruction": shaped("Content"),
    },
)


async def post(path: str, body: Any, version: str = "v1beta") -> tuple[int, Any]:
    app = build_gemini_app(build_state(clock=lambda: 0.0))
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/{version}/{path}",
        "query_string": b"alt=sse",
        "headers": [(b"x-goog-api-key", b"k")],
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def check(path: str, body: Any) -> None:
    status, data = await post(path, body)

    if status != 200:
        assert status in {400, 403, 404}
        assert json.loads(data)["error"]["message"]


@given(anything | shaped("GenerateContentRequest"))
async def test_any_request_is_answered(body: Any) -> None:
    await check("models/gemini-3.8-flash:generateContent", body)


@given(plausible)
async def test_any_plausible_request_is_answered_in_a_stream(body: Any) -> None:
    await check("models/gemini-3.5-flash:streamGenerateContent", body)


@given(plausible | shaped("CountTokensRequest"))
async def test_any_count_is_answered(body: Any) -> None:
    await check("models/gemini-2.5-pro:countTokens", body)


@given(shaped("CachedContent"))
async def test_any_cache_is_answered(body: Any) -> None:
    await check("cachedContents", body)
