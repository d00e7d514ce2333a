"""What is sent is what the plain SDK sends for the same payload, whatever was sent before it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final

import anthropic
import httpx2
import pytest
from google import genai
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.assistant import Tool
from server.conversation.errors import ProviderFailed
from server.conversation.payload import CallSettings, Layer, Payload, PayloadMessage
from server.providers.anthropic import request as anthropic_request
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini import request as gemini_request
from server.providers.gemini.provider import GeminiProvider
from server.providers.model_profile import find_profile
from server.providers.provider import Provider
from server.providers.wire.exchange import Exchange, Recording, RequestHead
from server.providers.wire.request_template import NewTemplate, Placeholders, RequestTemplate, Send, TemplateCache
from server.providers.wire.transport import ResponseWait, SdkTransport

KEY: Final = "the-key"
URL: Final = "https://provider.test/base"
MODELS: Final = {"anthropic": "claude-fable-5-2", "gemini": "gemini-3.8-flash"}


@dataclass(slots=True)
class Sent:
    """One request."""

    method: str
    url: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class NoAnswer:
    """A response without a body."""

    recording: Recording

    async def read(self) -> bytes:
        return b""

    def close(self) -> None:
        self.recording.end()


@dataclass
class CapturingTransport(SdkTransport):
    """Keeps every request and answers with an empty stream."""

    sent: list[Sent] = field(default_factory=list)

    async def open(
        self, head: RequestHead, body: bytes, recording: Recording, wait: ResponseWait, *, streamed: bool
    ) -> Exchange:
        recording.begin(body)
        headers = sorted((name.lower(), value) for name, value in head.headers.items())
        self.sent.append(Sent(head.method, str(head.url), headers, body))
        recording.answer(200, {"content-type": "text/event-stream"})
        return NoAnswer(recording)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
numbers = st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False, width=16)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
tools = st.lists(
    st.builds(
        Tool,
        name=st.sampled_from(["get_weather", "get_time"]),
        description=texts,
        parameters=st.fixed_dictionaries({"type": st.just("object"), "description": texts}),
    ),
    max_size=2,
).map(tuple)


def call_settings(thinking: st.SearchStrategy[str | None], extra: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        CallSettings,
        max_output_tokens=st.none() | st.integers(1, 9000),
        thinking=thinking,
        show_thinking=st.booleans(),
        temperature=st.none() | st.sampled_from([0.0, 0.5, 1.0]),
        stop_sequences=st.lists(texts, max_size=2).map(tuple),
        extra=extra,
    )


def messages(*roles: str) -> st.SearchStrategy[tuple[PayloadMessage, ...]]:
    """Messages as both vendors know them, as far as a request depends on them."""
    member = "parts" if "model" in roles else "content"

    def build(role: str, text: str) -> PayloadMessage:
        block = {"text": text} if member == "parts" else {"type": "text", "text": text}
        data = json.dumps({"role": role, member: [block]}, ensure_ascii=False, separators=(",", ":")).encode()
        return PayloadMessage(layer=Layer.BUFFERED, data=data, role="user" if role == "user" else "model")

    return st.lists(st.builds(build, st.sampled_from(roles), texts), max_size=3).map(tuple)


anthropic_payloads = st.builds(
    Payload,
    model=st.sampled_from(["claude-fable-5-2", "claude-haiku-5-5", "claude-opus-4-8"]),
    static_text=texts,
    tools=tools,
    messages=messages("user", "assistant"),
    settings=call_settings(
        st.sampled_from([None, "low", "max"]),
        st.fixed_dictionaries(
            {},
            optional={
                "metadata": st.fixed_dictionaries({"user_id": texts}),
                "container": st.just("c") | st.fixed_dictionaries({"skills": values}),
                "future": values,
            },
        ),
    ),
    breakpoints=st.sampled_from([(), (0,), (0, 1, 2)]),
    marks_tools=st.booleans(),
    cache_seconds=st.sampled_from([300, 3600]),
    static_cache_seconds=st.sampled_from([0, 3600]),
    requests_diagnosis=st.booleans(),
    previous_response_id=st.none() | texts,
    container=st.none() | texts,
    requests_summary=st.booleans(),
)
gemini_payloads = st.builds(
    Payload,
    model=st.sampled_from(["gemini-3.8-flash", "gemini-4-argon", "models/gemini-3.8-flash"]),
    static_text=texts,
    tools=tools,
    messages=messages("user", "model"),
    settings=call_settings(
        st.sampled_from([None, "low", "high"]),
        st.fixed_dictionaries(
            {},
            optional={
                "generationConfig": st.fixed_dictionaries({}, optional={"topP": numbers, "seed": st.integers(0, 9)}),
                "labels": st.dictionaries(texts.filter(bool), texts, max_size=2),
                "future": values,
            },
        ),
    ),
    cached_content=st.none() | st.sampled_from(["cachedContents/a1", "cachedContents/b2"]),
)


class PlainAnthropic:
    """The SDK as it comes, which gets the whole payload. Only the layers are marks, replaced here by their bytes."""

    def __init__(self, transport: SdkTransport) -> None:
        http = httpx2.AsyncClient(transport=transport)
        self._client = anthropic.AsyncAnthropic(api_key=KEY, base_url=URL, max_retries=0, http_client=http)

    async def send(self, payload: Payload) -> dict[str, bytes]:
        profile = find_profile("anthropic", payload.model)
        parameters = anthropic_request.build_parameters(payload, profile)
        layers = {"messages": anthropic_request.join_messages(payload, profile)}
        if payload.static_text:
            layers["system"] = anthropic_request.encode_system(payload, profile)
        if payload.tools:
            layers["tools"] = anthropic_request.encode_tools(payload, profile)
        marks = {name: [mark(name)] if name == "messages" else mark(name) for name in layers}
        stream = await self._client.messages.create(
            messages=[],
            stream=True,
            extra_body={**anthropic_request.build_extra(payload, parameters), **marks},
            extra_headers=anthropic_request.build_headers(payload),
            **parameters,
        )
        await stream.close()
        return layers


class PlainGemini:
    """As `PlainAnthropic`."""

    def __init__(self, transport: SdkTransport) -> None:
        options = types.HttpOptions(
            base_url=URL,
            api_version="v1beta",
            timeout=3_600_000,
            httpx_async_client=httpx2.AsyncClient(transport=transport),
        )
        self._client = genai.Client(api_key=KEY, http_options=options)

    async def send(self, payload: Payload) -> dict[str, bytes]:
        layers = {"contents": gemini_request.join_messages(payload)}
        if payload.static_text and payload.cached_content is None:
            layers["systemInstruction"] = gemini_request.encode_system(payload.static_text)
        if payload.tools and payload.cached_content is None:
            layers["tools"] = gemini_request.encode_tools(payload.tools)
        marks = {name: [mark(name)] if name == "contents" else mark(name) for name in layers}
        config = gemini_request.build_config(payload, find_profile("gemini", payload.model), marks)
        chunks = await self._client.aio.models.generate_content_stream(model=payload.model, contents="x", config=config)
        assert [chunk async for chunk in chunks] == []
        return layers


def mark(name: str) -> str:
    return f"\N{REPLACEMENT CHARACTER}{name}"


class Pair:
    """A provider that keeps templates, and the plain SDK."""

    def __init__(self, build: Callable[..., Provider], plain: Callable[[SdkTransport], Any]) -> None:
        self._ours, self._theirs = CapturingTransport(), CapturingTransport()
        self._build = build
        self.provider = self.renew()
        self._plain = plain(self._theirs)

    def renew(self) -> Provider:
        """Begin without templates."""
        self.provider = self._build(KEY, base_url=URL, transport=self._ours)
        return self.provider

    async def send(self, payload: Payload) -> Sent:
        stream = self.provider.open_stream(payload)
        with pytest.raises(ProviderFailed):
            # The response is empty.
            _ = [event async for event in stream.events()]
        sent = self._ours.sent.pop()
        assert stream.record.request_body == sent.body
        return sent

    async def send_plainly(self, payload: Payload) -> Sent:
        layers = await self._plain.send(payload)
        sent = self._theirs.sent.pop()
        for name, content in layers.items():
            encoded = {json.dumps(mark(name)).encode(), json.dumps(mark(name), ensure_ascii=False).encode()}
            (found,) = [text for text in encoded if text in sent.body]
            sent.body = sent.body.replace(found, content)
        return sent


@cache
def open_pair(name: str) -> Pair:
    """Kept for all examples: it takes long to build a client of an SDK, and nothing here belongs to an event loop."""
    return Pair(AnthropicProvider, PlainAnthropic) if name == "anthropic" else Pair(GeminiProvider, PlainGemini)


PAYLOADS: Final = {"anthropic": anthropic_payloads, "gemini": gemini_payloads}
SPLICED: Final = {"static_text", "tools", "messages", "joined"}
"""The members of a payload that are replaced by constants in its shape, because their bytes are spliced in."""
MARKERS: Final = {"breakpoints", "marks_tools", "cache_seconds", "static_cache_seconds"}
"""Members that only determine what the spliced bytes are."""
KEYED: Final = {
    "anthropic": {"model", "settings", "requests_diagnosis", "requests_summary"},
    "gemini": {"model", "settings", "cached_content", "requests_summary"},
}
SPLICED_IDS: Final = {"anthropic": {"previous_response_id", "container"}, "gemini": set[str]()}
UNSENT: Final = {
    "anthropic": {"cached_content", "continues"},
    "gemini": {"requests_diagnosis", "previous_response_id", "continues", "container"},
}
"""Members that the vendor's requests do not contain."""


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_member_of_a_payload_is_spliced_or_part_of_the_shape_or_not_sent(name: str) -> None:
    """If this fails for a new member of `Payload`: splice it in or keep it in the shape in `reduce_payload`."""
    kinds = [SPLICED, MARKERS, KEYED[name], SPLICED_IDS[name], UNSENT[name]]
    assert sorted(member for kind in kinds for member in kind) == sorted(each.name for each in fields(Payload))


@pytest.mark.parametrize("name", PAYLOADS)
@settings(max_examples=60)
@given(data=st.data())
async def test_every_request_is_the_one_that_the_plain_sdk_sends(name: str, data: st.DataObject) -> None:
    """The payloads differ in some members, so that templates of earlier requests are used for later ones."""
    pair = open_pair(name)
    pair.renew()
    first, other = data.draw(PAYLOADS[name]), data.draw(PAYLOADS[name])
    changes = st.sets(st.sampled_from([each.name for each in fields(Payload)]))
    mixed = [replace(first, **{each: getattr(other, each) for each in data.draw(changes)}) for _ in range(2)]
    for payload in (first, *mixed, first):
        sent = await pair.send(payload)
        assert sent == await pair.send_plainly(payload)
        assert await pair.provider.encode_request(payload) == sent.body


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ("1", 1)],
    ids=str,
)
async def test_settings_that_are_equal_in_python_and_different_in_json_are_distinguished(
    name: str, one: Any, other: Any
) -> None:
    pair = open_pair(name)
    pair.renew()
    base = Payload(model=MODELS[name], static_text="", tools=(), messages=())
    for value in (one, other, one):
        payload = replace(base, settings=CallSettings(extra={"future": value}))
        assert await pair.send(payload) == await pair.send_plainly(payload)


@pytest.mark.parametrize("name", PAYLOADS)
async def test_the_sdk_builds_one_request_per_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = NewTemplate.build

    async def count(template: NewTemplate) -> RequestTemplate:
        built.append(1)
        return await build(template)

    monkeypatch.setattr(NewTemplate, "build", count)
    pair = open_pair(name)
    pair.renew()
    base = Payload(model=MODELS[name], static_text="You help.", tools=(), messages=())
    for number in range(5):
        changed = replace(base, static_text=f"You help {number} times.", previous_response_id=f"id {number}")
        await pair.send(changed)
        await pair.provider.encode_request(replace(changed, breakpoints=(number,), continues=(number,)))
    assert len(built) == 1
    await pair.send(replace(base, settings=CallSettings(max_output_tokens=7)))
    await pair.send(replace(base, static_text=""))
    assert len(built) == 3


async def test_only_so_many_templates_are_kept() -> None:
    built: list[str] = []

    def build_send(shape: Payload, placeholders: Placeholders) -> Send:
        built.append(shape.model)

        async def send() -> None:
            async with httpx2.AsyncClient(transport=CapturingTransport()) as client:
                await client.post(URL, json={"model": shape.model, "part": placeholders.make("part")})

        return send

    templates = TemplateCache(build_send, max_count=2)
    for model in "abcab":
        template = templates.prepare(Payload(model=model, static_text="", tools=(), messages=()))
        if isinstance(template, NewTemplate):
            template = await template.build()
        assert template.body.fill({"part": b"1.0"}) == f'{{"model":"{model}","part":1.0}}'.encode()
    assert built == ["a", "b", "c", "a", "b"]
    assert isinstance(templates.prepare(Payload(model="b", static_text="", tools=(), messages=())), RequestTemplate)
