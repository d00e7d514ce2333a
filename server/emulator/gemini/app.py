"""The application: authentication and routes."""

import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import Final

from server.emulator.asgi import EmulatorApp
from server.emulator.exchange import Exchange, Request
from server.emulator.gemini.caches import ExplicitCaches, ImplicitCache
from server.emulator.gemini.decoding import decode
from server.emulator.gemini.errors import ApiError, invalid, key_missing, key_rejected, model_unknown
from server.emulator.gemini.faults import error_before_answer
from server.emulator.gemini.generating import Caller, Generator
from server.emulator.gemini.models import MODELS, Model, find_model
from server.emulator.gemini.prompt import read_prompt
from server.emulator.gemini.sending import ArrayFraming, EventFraming, send_error, send_stream, send_unary
from server.emulator.gemini.turn_order import check_shape
from server.emulator.reply import FaultKind
from server.emulator.state import EmulatorState

_PATH: Final = re.compile(r"/(v1|v1beta)/(models|cachedContents)(?:/([^/:]+))?(?::(\w+))?")
_INVALID_KEY: Final = "invalid"
_EXPIRED_KEY: Final = "expired"


def build_gemini_app(state: EmulatorState, *, implicit_cache: bool = True) -> EmulatorApp:
    """Build the emulated API as an ASGI application. Without the implicit cache nothing is ever read from it."""
    return EmulatorApp(state, _Gemini(state, implicit_cache=implicit_cache).handle)


class _Gemini:
    def __init__(self, state: EmulatorState, *, implicit_cache: bool) -> None:
        self._state = state
        self._caches = ExplicitCaches(state)
        self._generator = Generator(state, self._caches, ImplicitCache(state.clock, enabled=implicit_cache))

    async def handle(self, exchange: Exchange) -> None:
        streams_array = exchange.request.path.endswith(":streamGenerateContent") and not _wants_events(exchange.request)
        try:
            await self._route(exchange)
        except ApiError as error:
            await send_error(exchange, error, as_list=streams_array)

    async def _route(self, exchange: Exchange) -> None:
        match = _PATH.fullmatch(exchange.request.path)
        if match is None:
            raise ApiError(404, "Requested entity was not found.")
        version, collection, name, method = match.groups()
        account = _authenticate(exchange.request)
        if collection == "cachedContents":
            await self._answer_about_caches(exchange, name, account, version)
        elif method is None:
            await _answer_about_models(exchange, name, version)
        else:
            await self._call_model(exchange, name or "", method, account, version)

    async def _call_model(self, exchange: Exchange, name: str, method: str, account: str, version: str) -> None:
        methods: dict[str, Callable[[Exchange, Caller], Awaitable[None]]] = {
            "generateContent": self._generate,
            "streamGenerateContent": self._stream,
            "countTokens": self._count,
        }
        model = find_model(name, version)
        if model is None or method not in methods or exchange.request.method != "POST":
            raise model_unknown(name, version, method)
        await methods[method](exchange, Caller(account=account, version=version, model=model))

    async def _stream(self, exchange: Exchange, caller: Caller) -> None:
        fault = self._state.take_fault(exchange)
        if error := error_before_answer(fault, caller.model):
            raise error
        generation = self._generator.accept(exchange.request.body, caller)
        documents, fault = self._generator.answer(generation, exchange, fault, streaming=True)
        if fault is not None and fault.kind is FaultKind.RAW:
            await exchange.answer_raw(fault)
            return
        framing = EventFraming() if _wants_events(exchange.request) else ArrayFraming()
        await send_stream(exchange, documents, framing, self._state.latency, fault)

    async def _generate(self, exchange: Exchange, caller: Caller) -> None:
        fault = self._state.take_fault(exchange)
        if error := error_before_answer(fault, caller.model):
            raise error
        generation = self._generator.accept(exchange.request.body, caller)
        (document,), fault = self._generator.answer(generation, exchange, fault, streaming=False)
        if fault is not None and fault.kind is FaultKind.RAW:
            await exchange.answer_raw(fault)
            return
        await send_unary(exchange, document, self._state.latency, fault)

    async def _count(self, exchange: Exchange, caller: Caller) -> None:
        body = decode(exchange.request.body, "CountTokensRequest")
        if "contents" in body and "generate_content_request" in body:
            raise invalid("* CountTokensRequest: only one of contents and generate_content_request can be set\n")
        request = body.get("generate_content_request", body)
        check_shape(request.get("contents", ()), "CountTokensRequest")
        prompt = read_prompt(request, caller.model)
        cached = 0
        if name := request.get("cached_content"):
            cached = self._caches.load(name, caller.account).tokens
        total = prompt.count() + cached
        counts = {"totalTokens": total, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": total}]}
        await exchange.answer_json(200, {**counts, "cachedContentTokenCount": cached} if cached else counts)

    async def _answer_about_caches(self, exchange: Exchange, id_: str | None, account: str, version: str) -> None:
        request = exchange.request
        name = f"cachedContents/{id_}"
        match request.method, id_:
            case "POST", None:
                body = decode(request.body, "CachedContent")
                await exchange.answer_json(200, self._caches.create(body, account, version).render())
            case "GET", None:
                await exchange.answer_json(200, self._caches.list(account, request.query))
            case "GET", _:
                await exchange.answer_json(200, self._caches.load(name, account).render())
            case "PATCH", str():
                body = decode(request.body, "CachedContent")
                await exchange.answer_json(200, self._caches.update(name, body, account).render())
            case "DELETE", str():
                self._caches.delete(name, account)
                await exchange.answer_json(200, {})
            case _:
                raise ApiError(404, "Requested entity was not found.")


async def _answer_about_models(exchange: Exchange, name: str | None, version: str) -> None:
    if exchange.request.method != "GET":
        raise ApiError(404, "Requested entity was not found.")
    if name is None:
        await exchange.answer_json(200, {"models": [model.render() for model in MODELS.values()]})
        return
    model: Model | None = find_model(name, version)
    if model is None:
        raise model_unknown(name, version, "generateContent")
    await exchange.answer_json(200, model.render())


def _authenticate(request: Request) -> str:
    """The account of the key; every key has one. Raises `ApiError`."""
    key = request.headers.get("x-goog-api-key") or request.query.get("key")
    if not key:
        raise key_missing()
    if key == _INVALID_KEY:
        raise key_rejected(401, "API key not valid. Please pass a valid API key.")
    if key == _EXPIRED_KEY:
        # The live service answers both with 400; here only this one has that status.
        raise key_rejected(400, "API key expired. Please renew the API key.")
    return hashlib.sha256(key.encode()).hexdigest()


def _wants_events(request: Request) -> bool:
    return request.query.get("alt") == "sse"
