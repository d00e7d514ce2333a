"""The provider port for Claude."""

import hashlib
from typing import Any

import anthropic
import httpx2

from server.conversation.payload import Payload
from server.providers.anthropic import request
from server.providers.anthropic.sdk_errors import translate_error
from server.providers.anthropic.stream import DIALECT, AnthropicFold, fold_body
from server.providers.model_name import check_model_name
from server.providers.model_profile import ModelProfile, find_profile, profile_warnings
from server.providers.wire.call import VendorCall, WireStream, call_through, encode_request
from server.providers.wire.request_parts import EncodedPartCache, Placeholders
from server.providers.wire.transport import WireLimits, WireTransport


class AnthropicProvider:
    """Implements `server.providers.provider.Provider`."""

    name = DIALECT
    caches = None
    continues_pauses = True
    fold_body = staticmethod(fold_body)
    open_fold = AnthropicFold
    user_message = staticmethod(request.user_message)
    tool_message = staticmethod(request.tool_message)
    dynamic_message = staticmethod(request.dynamic_message)
    foreign_message = staticmethod(request.foreign_message)
    unsigned_message = staticmethod(request.unsigned_message)
    settle_message = staticmethod(request.settle_message)
    signed_summary_text = staticmethod(request.signed_summary_text)

    def __init__(
        self,
        api_key: str,
        *,
        base_url: str | None = None,
        limits: WireLimits | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network; `server.providers.wire.replay` has one that feeds stored responses."""
        self.account = hashlib.sha256(f"{self.name}:{api_key}".encode()).hexdigest()[:16]
        self._encoded_parts = EncodedPartCache()
        self._client = anthropic.AsyncAnthropic(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport or WireTransport(limits or WireLimits())),
        )

    def open_stream(self, payload: Payload) -> WireStream:
        check_model_name(self.name, payload.model)
        return WireStream(self._prepare(payload), AnthropicFold())

    async def encode_request(self, payload: Payload) -> bytes:
        return await encode_request(self._prepare(payload))

    async def count_tokens(self, payload: Payload) -> int:
        """Count the whole request. Free of charge; ignores caching."""
        check_model_name(self.name, payload.model)
        profile = find_profile(self.name, payload.model)
        parameters = request.build_parameters(payload, profile)
        counted = {name: parameters[name] for name in ("model", "thinking") if name in parameters}
        placeholders = Placeholders()
        body = self._build_body(payload, profile, placeholders)
        count = await call_through(
            lambda: self._client.messages.count_tokens(
                messages=[], extra_body=body, extra_headers=request.build_headers(payload), **counted
            ),
            placeholders=placeholders.contents,
            translate=translate_error,
        )
        return count.input_tokens

    async def close(self) -> None:
        await self._client.close()

    def _prepare(self, payload: Payload) -> VendorCall:
        profile = find_profile(self.name, payload.model)
        parameters = request.build_parameters(payload, profile)
        placeholders = Placeholders()
        body = {**request.build_extra(payload, parameters), **self._build_body(payload, profile, placeholders)}
        headers = request.build_headers(payload)

        async def send() -> None:
            stream = await self._client.messages.create(
                messages=[], stream=True, extra_body=body, extra_headers=headers, **parameters
            )
            await stream.close()

        return VendorCall(
            placeholders=placeholders.contents,
            send=send,
            translate=translate_error,
            warnings=(*profile_warnings(profile), *request.thinking_warnings(payload, profile)),
        )

    def _build_body(self, payload: Payload, profile: ModelProfile, placeholders: Placeholders) -> dict[str, Any]:
        """Build the large members as placeholders, because the SDK would take long to encode them."""
        body: dict[str, Any] = {"messages": [placeholders.make(request.join_messages(payload, profile))]}
        if payload.static_text:
            key = (payload.static_text, request.is_long_lived(payload), profile.breakpoints)
            system = self._encoded_parts.load(key, lambda: request.encode_system(payload, profile))
            body["system"] = placeholders.make(system)
        if payload.tools:
            body["tools"] = placeholders.make(request.encode_tools(payload, profile))
        return body
