"""Explicit caches through the SDK, and the implicit cache by its usage numbers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from tests.support.gemini_emulator import MODEL, GeminiEmulator, asking, gemini_emulator, model, user

LONG = "All the facts there are. " * 2_000
CONFLICT = (
    "CachedContent can not be used with GenerateContent request setting system_instruction, tools or tool_config."
    " Proposed fix: move those values to CachedContent from GenerateContent request."
)
NO_CALLS = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.NONE)
STALE = "CachedContent not found (or permission denied)"


@pytest.fixture
async def emulator() -> AsyncIterator[GeminiEmulator]:
    async with gemini_emulator() as running:
        yield running


async def create(client: genai.Client, text: str = LONG, name: str = MODEL, **more: Any) -> types.CachedContent:
    config = types.CreateCachedContentConfig(system_instruction=text, **more)
    return await client.aio.caches.create(model=name, config=config)


async def ask(client: genai.Client, cache: str | None, name: str = MODEL, **more: Any) -> types.GenerateContentResponse:
    config = types.GenerateContentConfig(cached_content=cache, **more)
    return await client.aio.models.generate_content(model=name, contents="What is known?", config=config)


async def refusal_of(coroutine: Any) -> tuple[int, str | None, str | None]:
    with pytest.raises(errors.ClientError) as caught:
        await coroutine
    return caught.value.code, caught.value.status, caught.value.message


async def test_a_cache_is_used_and_counted(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    cache = await create(client, ttl="300s", display_name="facts")
    answer = await ask(client, cache.name)

    assert cache.usage_metadata
    assert answer.usage_metadata
    tokens = cache.usage_metadata.total_token_count
    assert tokens == 12_500
    assert answer.usage_metadata.cached_content_token_count == tokens
    assert answer.usage_metadata.prompt_token_count == tokens + 5
    assert cache.display_name == "facts"
    assert cache.expire_time
    assert cache.create_time
    assert (cache.expire_time - cache.create_time).total_seconds() == 300


async def test_streaming_uses_it_too_and_refuses_a_stale_one(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    cache = await create(client)
    config = types.GenerateContentConfig(cached_content=cache.name)

    async def stream() -> types.GenerateContentResponse:
        call = client.aio.models.generate_content_stream(model=MODEL, contents="hi", config=config)
        return [chunk async for chunk in await call][-1]

    usage = (await stream()).usage_metadata
    assert usage
    assert usage.cached_content_token_count == 12_500
    emulator.clock.now += 3_600
    assert await refusal_of(stream()) == (403, "PERMISSION_DENIED", STALE)


async def test_a_small_cache_is_refused(emulator: GeminiEmulator) -> None:
    small = create(emulator.client(), "x" * 896 * 4, "gemini-2.5-flash")

    assert await refusal_of(small) == (
        400,
        "INVALID_ARGUMENT",
        "Cached content is too small. total_token_count=896, min_total_token_count=1024",
    )


async def test_gemini_4_has_no_explicit_caches(emulator: GeminiEmulator) -> None:
    code, status, _ = await refusal_of(create(emulator.client(), name="gemini-4-argon"))

    assert (code, status) == (400, "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    "field",
    [
        {"system_instruction": "Be brief."},
        {"tools": [types.Tool(function_declarations=[types.FunctionDeclaration(name="f")])]},
        {"tool_config": types.ToolConfig(function_calling_config=NO_CALLS)},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_what_belongs_into_the_cache_must_not_be_in_the_request(
    emulator: GeminiEmulator, field: dict[str, Any]
) -> None:
    client = emulator.client()
    cache = await create(client)

    assert await refusal_of(ask(client, cache.name, **field)) == (400, "INVALID_ARGUMENT", CONFLICT)


async def test_a_cache_is_bound_to_its_model(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    cache = await create(client)
    _, _, text = await refusal_of(ask(client, cache.name, "gemini-3.5-flash"))

    assert text == (
        "Model used by GenerateContent request (models/gemini-3.5-flash) and CachedContent (models/gemini-3.8-flash)"
        " has to be the same."
    )


async def test_a_cache_is_bound_to_its_account(emulator: GeminiEmulator) -> None:
    cache = await create(emulator.client("key-a"))
    other = emulator.client("key-b")

    assert await refusal_of(ask(other, cache.name)) == (403, "PERMISSION_DENIED", STALE)
    assert [one async for one in await other.aio.caches.list()] == []


async def test_a_cache_has_the_requested_lifetime(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    cache = await create(client, ttl="300s")
    assert cache.name
    emulator.clock.now += 299
    await client.aio.caches.update(name=cache.name, config=types.UpdateCachedContentConfig(ttl="600s"))
    emulator.clock.now += 599
    await ask(client, cache.name)
    emulator.clock.now += 1

    assert await refusal_of(ask(client, cache.name)) == (403, "PERMISSION_DENIED", STALE)
    assert await refusal_of(client.aio.caches.get(name=cache.name)) == (403, "PERMISSION_DENIED", STALE)


async def test_a_deleted_cache_is_missing(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    kept, deleted = await create(client), await create(client)
    assert deleted.name
    await client.aio.caches.delete(name=deleted.name)

    assert [one.name async for one in await client.aio.caches.list()] == [kept.name]
    assert (await refusal_of(ask(client, deleted.name)))[0] == 403


async def test_caches_are_listed_in_pages(emulator: GeminiEmulator) -> None:
    client = emulator.client()
    names = [(await create(client)).name for _ in range(5)]
    pages = await client.aio.caches.list(config=types.ListCachedContentsConfig(page_size=2))

    assert [one.name async for one in pages] == names


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"ttl": "300"}, "duration must end with 's'"),
        ({"expireTime": "tomorrow"}, "Illegal timestamp format"),
        ({"expireTime": "2001-01-01T00:00:00Z"}, "must be in the future"),
        ({"ttl": "300s", "expireTime": "2031-01-01T00:00:00Z"}, "oneof field 'expiration' is already set"),
        ({"contents": [user("new")]}, "only ttl and expire_time can be updated"),
        ({}, "only ttl and expire_time can be updated"),
    ],
)
async def test_only_the_expiry_of_a_cache_can_be_patched(emulator: GeminiEmulator, body: Any, text: str) -> None:
    cache = await create(emulator.client())
    response = await emulator.http.patch(f"/v1/{cache.name}", json=body, headers={"x-goog-api-key": "key-a"})

    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usageMetadata"].get("cachedContentTokenCount", 0)
    return tokens


async def test_a_common_prefix_is_read_from_the_implicit_cache(emulator: GeminiEmulator) -> None:
    system = {"parts": [{"text": LONG}]}
    first = asking(user("one"), systemInstruction=system)
    longer = asking(user("one"), model({"text": "yes"}), user("two"), systemInstruction=system)

    assert [cached(await emulator.accepts(body)) for body in (first, longer, longer)] == [0, 12_502, 12_506]


async def test_the_prefix_ends_at_the_first_difference(emulator: GeminiEmulator) -> None:
    system = {"parts": [{"text": LONG}]}
    await emulator.accepts(asking(user("one"), user("two"), systemInstruction=system))

    other_tail = await emulator.accepts(asking(user("one"), user("three"), systemInstruction=system))
    other_head = await emulator.accepts(asking(user("one"), systemInstruction={"parts": [{"text": "Now! " + LONG}]}))

    assert cached(other_tail) == 12_503
    assert cached(other_head) == 0


@pytest.mark.parametrize(
    ("name", "tokens", "hit"),
    [
        ("gemini-4-argon", 6_143, False),
        ("gemini-4-argon", 6_144, True),
        ("gemini-4-carbon", 4_096, True),
        ("gemini-3.8-flash", 4_095, False),
        ("gemini-2.5-pro", 2_048, True),
    ],
)
async def test_a_short_prefix_is_not_cached(emulator: GeminiEmulator, name: str, tokens: int, *, hit: bool) -> None:
    body = asking(user("x" * 4 * (tokens - 1)))
    await emulator.accepts(body, model=name)

    assert cached(await emulator.accepts(body, model=name)) == (tokens if hit else 0)


async def test_the_implicit_cache_is_per_model_and_account_and_expires(emulator: GeminiEmulator) -> None:
    body = asking(user(LONG))
    await emulator.accepts(body)

    assert cached(await emulator.accepts(body, key="key-b")) == 0
    assert cached(await emulator.accepts(body, model="gemini-3.5-flash")) == 0
    emulator.clock.now += 200
    assert cached(await emulator.accepts(body)) == 12_501
    emulator.clock.now += 200
    assert cached(await emulator.accepts(body)) == 12_501, "a hit refreshes it"
    emulator.clock.now += 300
    assert cached(await emulator.accepts(body)) == 0


async def test_the_implicit_cache_can_be_switched_off() -> None:
    async with gemini_emulator(implicit_cache=False) as emulator:
        answers = [await emulator.accepts(asking(user(LONG))) for _ in range(2)]

    assert [cached(answer) for answer in answers] == [0, 0]
