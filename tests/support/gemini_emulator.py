"""The Gemini emulator on a free port, a clock that can be moved, and two ways to call it: the SDK and bare HTTP."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from google import genai
from google.genai import types

from server.emulator.gemini.app import build_gemini_app
from server.emulator.script import Script, load_script
from server.emulator.server import emulating
from server.emulator.state import EmulatorState, build_state

MODEL = "gemini-3.8-flash"
WEATHER = types.FunctionDeclaration(
    name="get_weather",
    description="The weather in a city",
    parameters_json_schema={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


@dataclass(slots=True)
class MovableClock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, kw_only=True)
class GeminiEmulator:
    url: str
    state: EmulatorState
    clock: MovableClock
    http: httpx2.AsyncClient
    opened: AsyncExitStack

    def client(self, api_key: str = "key-a", version: str | None = None) -> genai.Client:
        """The stock SDK, connected to it."""
        # An own HTTP client: the SDK would use aiohttp if it is installed, and never closes one it was given.
        http = httpx2.AsyncClient(verify=False)  # Loading certificates takes longer than a test.
        self.opened.push_async_callback(http.aclose)
        options = types.HttpOptions(base_url=self.url, api_version=version, httpx_async_client=http, timeout=60_000)
        client = genai.Client(api_key=api_key, http_options=options)
        self.opened.callback(client.close)
        return client

    async def call(
        self,
        method: str,
        body: Mapping[str, Any],
        *,
        model: str = MODEL,
        key: str = "key-a",
        fault: str | None = None,
        version: str = "v1beta",
    ) -> httpx2.Response:
        """A method of a model, in bare JSON. Streams as SSE."""
        query = "?alt=sse" if method == "streamGenerateContent" else ""
        headers = {"x-goog-api-key": key, **({"x-emulator-fault": fault} if fault else {})}
        return await self.http.post(f"/{version}/models/{model}:{method}{query}", json=body, headers=headers)

    async def refusal(self, body: Mapping[str, Any], **options: Any) -> str:
        """The text with which `generateContent` refuses a request as invalid."""
        response = await self.call("generateContent", body, **options)
        error = response.json()["error"]
        assert (response.status_code, error["status"]) == (400, "INVALID_ARGUMENT"), response.text
        text: str = error["message"]
        return text

    async def accepts(self, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The answer to a request that has to be accepted."""
        response = await self.call("generateContent", body, **options)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@asynccontextmanager
async def gemini_emulator(script: str = "", *, implicit_cache: bool = True) -> AsyncIterator[GeminiEmulator]:
    clock = MovableClock()
    state = build_state(script=load_script(script) if script else Script(()), clock=clock)
    async with (
        emulating(build_gemini_app(state, implicit_cache=implicit_cache)) as url,
        httpx2.AsyncClient(base_url=url, timeout=60) as http,
        AsyncExitStack() as opened,
    ):
        yield GeminiEmulator(url=url, state=state, clock=clock, http=http, opened=opened)


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text} for text in texts]}


def model(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def call(name: str, arguments: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A part with a function call; `more` are other fields of the part."""
    return {"functionCall": {"name": name, "args": dict(arguments or {})}, **more}


def responses(*names: str) -> dict[str, Any]:
    return {
        "role": "user",
        "parts": [{"functionResponse": {"name": name, "response": {"output": f"{name} done"}}} for name in names],
    }


def asking(*contents: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"contents": list(contents), **more}


def parts_of(answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    parts: Sequence[Mapping[str, Any]] = answer["candidates"][0]["content"]["parts"]
    return parts
