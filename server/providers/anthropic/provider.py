"""The provider port for Claude."""

import hashlib

import anthropic
import httpx2

from server.conversation.payload import Payload
from server.providers.anthropic import request
from server.providers.anthropic.errors import error_from_recording
from server.providers.anthropic.sdk_errors import translate_error
from server.providers.anthropic.stream import DIALECT, AnthropicFold, fold_body
from server.providers.model_name import check_model_name
from server.providers.model_profile import ModelProfile, find_profile, profile_warnings
from server.providers.wire.call import VendorCall, WireStream, call_through, encode_request
from server.providers.wire.request_template import EncodedPartCache, Placeholders, Send, TemplateCache
from server.providers.wire.transport import SdkTransport, WireLimits, WireTransport


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
        transport: SdkTransport | None = None,
    ) -> None:
        """`transport` replaces the network; `server.providers.wire.replay` has one that feeds stored responses."""
        self.account = hashlib.sha256(f"{self.name}:{api_key}".encode()).hexdigest()[:16]
        self._transport = transport or WireTransport(limits or WireLimits())
        self._encoded_parts = EncodedPartCache()
        self._templates = TemplateCache(self._build_send)
        self._client = anthropic.AsyncAnthropic(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=self._transport),
            # Its trace headers would be those of the request that a template was made from.
            open_telemetry=False,
        )

    def open_stream(self, payload: Payload) -> WireStream:
        check_model_name(self.name, payload.model)
        return WireStream(self._prepare(payload), AnthropicFold(), self._transport, error_from_recording)

    async def encode_request(self, payload: Payload) -> bytes:
        return await encode_request(self._prepare(payload))

    async def count_tokens(self, payload: Payload) -> int:
        """Count the whole request. Free of charge; ignores caching."""
        check_model_name(self.name, payload.model)
        profile = find_profile(self.name, payload.model)
        parameters = request.build_parameters(payload, profile)
        counted = {name: parameters[name] for name in ("model", "thinking") if name in parameters}
        placeholders = Placeholders()
        body = request.build_layers(payload, placeholders.make)
        count = await call_through(
            lambda: self._client.messages.count_tokens(
                messages=[], extra_body=body, extra_headers=request.build_headers(payload), **counted
            ),
            translate=translate_error,
            placeholders=placeholders,
            parts=self._encode_parts(payload, profile),
        )
        return count.input_tokens

    async def close(self) -> None:
        await self._client.close()

    def _prepare(self, payload: Payload) -> VendorCall:
        profile = find_profile(self.name, payload.model)
        thoughtless = request.find_thoughtless(payload, profile)
        return VendorCall(
            template=self._templates.prepare(request.reduce_payload(payload, thinks=not thoughtless)),
            parts=self._encode_parts(payload, profile),
            warnings=(*profile_warnings(profile), *request.thinking_warnings(thoughtless)),
        )

    def _build_send(self, shape: Payload, placeholders: Placeholders) -> Send:
        named = request.name_ids(shape, placeholders.make)
        parameters = request.build_parameters(named, find_profile(self.name, shape.model))
        body = {**request.build_extra(named, parameters), **request.build_layers(named, placeholders.make)}
        headers = request.build_headers(named)

        async def send() -> None:
            stream = await self._client.messages.create(
                messages=[], stream=True, extra_body=body, extra_headers=headers, **parameters
            )
            await stream.close()

        return send

    def _encode_parts(self, payload: Payload, profile: ModelProfile) -> dict[str, bytes]:
        """Encode what is spliced into the request."""
        load = self._encoded_parts.load
        parts = request.encode_ids(payload)
        parts["messages"] = request.join_messages(payload, profile, mark=self._mark)
        static_marker = request.is_long_lived(payload), profile.breakpoints
        if payload.static_text:
            key = (payload.static_text, *static_marker)
            parts["system"] = load(key, lambda: request.encode_system(payload, profile))
        if payload.tools:
            tools_key = (repr(payload.tools), payload.marks_tools, *static_marker)
            parts["tools"] = load(tools_key, lambda: request.encode_tools(payload, profile))
        return parts

    def _mark(self, data: bytes, lifetime_seconds: int) -> bytes:
        """Mark a message; a message that is marked in one call is usually marked in the next ones too."""
        return self._encoded_parts.load(
            (data, lifetime_seconds), lambda: request.mark_last_block(data, lifetime_seconds)
        )
