"""The provider port on Claude."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import anthropic
import httpx2

from server.conversation.block import Blob, Block
from server.conversation.payload import Payload
from server.providers.anthropic import request
from server.providers.anthropic.sdk_errors import translate_error
from server.providers.anthropic.stream import DIALECT, AnthropicFold, fold_body
from server.providers.model_name import check_model_name
from server.providers.model_profile import ModelProfile, find_profile, profile_warnings
from server.providers.provider import Fold, ProviderAnswer
from server.providers.wire.placeholders import Placeholders
from server.providers.wire.stream import VendorCall, WireStream, encode_request
from server.providers.wire.transport import WireLimits, WireTransport
from server.providers.wire.unary import call_through
from server.providers.wire.written import WrittenParts


class AnthropicProvider:
    """Implements `server.providers.provider.Provider`."""

    name = DIALECT
    caches = None
    continues_pauses = True

    def __init__(
        self,
        api_key: str,
        *,
        base_url: str | None = None,
        limits: WireLimits | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` in place of the network: `server.providers.wire.replay` has one that feeds stored bytes."""
        self.account = hashlib.sha256(f"{self.name}:{api_key}".encode()).hexdigest()[:16]
        self._written = WrittenParts()
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

    def fold_body(self, body: bytes) -> ProviderAnswer:
        return fold_body(body)

    def open_fold(self) -> Fold:
        return AnthropicFold()

    def user_message(self, blocks: Sequence[Block], blobs: Mapping[str, Blob], dynamic: str | None = None) -> bytes:
        return request.user_message(blocks, blobs, dynamic)

    def tool_message(self, blocks: Sequence[Block], calls: Sequence[Block], dynamic: str | None = None) -> bytes:
        return request.tool_message(blocks, calls, dynamic)

    def dynamic_message(self, dynamic: str) -> bytes:
        return request.dynamic_message(dynamic)

    def foreign_message(self, blocks: Sequence[Block]) -> bytes | None:
        return request.foreign_message(blocks)

    def unsigned_message(self, native: bytes, *, documented_only: bool = False) -> bytes | None:
        return request.unsigned_message(native, documented_only=documented_only)

    def settle_message(self, native: bytes, following: bytes = b"") -> bytes | None:
        return request.settle_message(native, following)

    def signed_summary_text(self, message: bytes) -> str | None:
        return request.signed_summary_text(message)

    async def count_tokens(self, payload: Payload) -> int:
        """Free of charge; ignores caching."""
        check_model_name(self.name, payload.model)
        profile = find_profile(self.name, payload.model)
        parameters = request.build_parameters(payload, profile)
        counted = {name: parameters[name] for name in ("model", "thinking") if name in parameters}
        placeholders = Placeholders()
        body = self._write_body(payload, profile, placeholders)
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
        body = {**request.build_extra(payload, parameters), **self._write_body(payload, profile, placeholders)}
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

    def _write_body(self, payload: Payload, profile: ModelProfile, placeholders: Placeholders) -> dict[str, Any]:
        """What the SDK need not look at, as holes: it would take its time for each megabyte, and change nothing."""
        body: dict[str, Any] = {"messages": [placeholders.make(request.join_messages(payload, profile))]}
        if payload.static_text:
            key = (payload.static_text, request.is_long_lived(payload), profile.breakpoints)
            body["system"] = placeholders.make(self._written.find(key, lambda: request.write_system(payload, profile)))
        if payload.tools:
            body["tools"] = placeholders.make(request.write_tools(payload, profile))
        return body
