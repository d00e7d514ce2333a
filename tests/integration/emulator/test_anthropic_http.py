"""Keys, versions, headers, models, sizes."""

import base64
from collections.abc import AsyncIterator

import anthropic
import pytest

from tests.support.anthropic_emulator import FABLE, AnthropicEmulator, anthropic_emulator, asking, user

HELLO = user("Hello")
VERSION = {"anthropic-version": "2026-10-21"}


@pytest.fixture(scope="module")
async def emulator() -> AsyncIterator[AnthropicEmulator]:
    async with anthropic_emulator() as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "x-api-key header is required"),
        ({"authorization": "Basic abc"}, "x-api-key header is required"),
        ({"x-api-key": "invalid"}, "invalid x-api-key"),
        ({"authorization": "Bearer invalid"}, "Invalid bearer token"),
        ({"x-api-key": "invalid", "authorization": "Bearer good"}, "invalid x-api-key"),
    ],
    ids=str,
)
async def test_a_missing_or_invalid_key_is_a_401(
    emulator: AnthropicEmulator, headers: dict[str, str], message: str
) -> None:
    response = await emulator.http.post("/v1/messages", json=asking(HELLO), headers={**VERSION, **headers})
    assert response.status_code == 401
    body = response.json()
    assert body["error"] == {"type": "authentication_error", "message": message}
    assert body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": "k"}, {"authorization": "Bearer k"}, {"x-api-key": "k", "authorization": "Bearer invalid"}],
)
async def test_either_header_may_have_the_key(emulator: AnthropicEmulator, headers: dict[str, str]) -> None:
    response = await emulator.http.post("/v1/messages", json=asking(HELLO), headers={**VERSION, **headers})
    assert response.status_code == 200


async def test_the_sdk_reports_an_invalid_key(emulator: AnthropicEmulator) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        await emulator.client("invalid").messages.create(**asking(HELLO))


@pytest.mark.parametrize("version", ["", "2022-01-01"])
async def test_the_version_is_required(emulator: AnthropicEmulator, version: str) -> None:
    headers = {"x-api-key": "k", **({"anthropic-version": version} if version else {})}
    response = await emulator.http.post("/v1/messages", json=asking(HELLO), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("anthropic-version:")


async def test_answers_have_the_documented_headers(emulator: AnthropicEmulator) -> None:
    response = await emulator.post(asking(HELLO))
    assert response.headers["request-id"].startswith("req_")
    assert response.headers["anthropic-organization-id"]
    for kind in ("requests", "tokens", "input-tokens", "output-tokens"):
        for field in ("limit", "remaining", "reset"):
            assert response.headers[f"anthropic-ratelimit-{kind}-{field}"]


async def test_accounts_have_an_organization_each(emulator: AnthropicEmulator) -> None:
    ids = [
        (await emulator.post(asking(HELLO), key=key)).headers["anthropic-organization-id"]
        for key in ("acme/1", "acme/2", "other")
    ]
    assert ids[0] == ids[1] != ids[2]


async def test_models_are_listed_and_described(emulator: AnthropicEmulator) -> None:
    client = emulator.client()
    names = [model.id async for model in client.models.list(limit=5)]
    assert names[0] == FABLE
    assert len(names) == len(set(names)) > 10
    model = await client.models.retrieve(FABLE)
    assert model.capabilities
    assert model.capabilities.thinking.types.adaptive.supported
    assert not model.capabilities.thinking.types.disabled.supported
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("claude-nobody")


async def test_an_unknown_model_is_a_404(emulator: AnthropicEmulator) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await emulator.client().messages.create(**asking(HELLO, model="claude-nobody"))
    assert (caught.value.type, caught.value.api_message) == ("not_found_error", "model: claude-nobody")


async def test_a_body_over_32_mb_is_a_413(emulator: AnthropicEmulator) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        await emulator.client().messages.create(**asking(user("x" * (33 * 1024 * 1024))))
    assert (caught.value.status_code, caught.value.type) == (413, "request_too_large")


async def test_a_prompt_over_the_window_is_refused(emulator: AnthropicEmulator) -> None:
    text = await emulator.refusal(asking(user("x" * 4_100_000)))
    assert text == "prompt is too long: 1025003 tokens > 1000000 maximum"


async def test_invalid_json_is_refused(emulator: AnthropicEmulator) -> None:
    response = await emulator.http.post("/v1/messages", content=b"{", headers={"x-api-key": "k", **VERSION})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_lone_surrogate_is_invalid_json(emulator: AnthropicEmulator) -> None:
    body = b'{"model":"claude-fable-5-2","max_tokens":9,"messages":[{"role":"user","content":"\\ud83d"}]}'
    response = await emulator.http.post("/v1/messages", content=body, headers={"x-api-key": "k", **VERSION})
    assert response.status_code == 400
    assert "no low surrogate in string" in response.json()["error"]["message"]


async def test_an_unknown_path_is_a_404(emulator: AnthropicEmulator) -> None:
    response = await emulator.http.get("/v1/nothing", headers={"x-api-key": "k", **VERSION})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_counting_needs_no_output_limit(emulator: AnthropicEmulator) -> None:
    assert (
        await emulator.refusal(asking(HELLO), path="/v1/messages/count_tokens")
        == "max_tokens: Extra inputs are not permitted"
    )


async def test_no_signature_contains_the_key(emulator: AnthropicEmulator) -> None:
    answer = await emulator.accepts(asking(HELLO), key="a-very-secret-key")
    sealed = base64.b64decode(answer["content"][0]["signature"])
    assert b"claude" in sealed
    assert b"a-very-secret-key" not in sealed


async def test_the_same_requests_get_the_same_answers() -> None:
    answers = []
    for _ in range(2):
        async with anthropic_emulator() as emulator:
            answers.append([(await emulator.post(asking(HELLO))).json() for _ in range(2)])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]  # Ids and signatures are never used twice.
