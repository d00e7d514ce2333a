"""The provider port for Gemini."""

import hashlib
import ssl
from typing import Final

import httpx2
from google import genai
from google.genai import types

from server.conversation.errors import ProviderUnavailable
from server.conversation.payload import Payload
from server.providers.gemini import request
from server.providers.gemini.caches import GeminiCaches
from server.providers.gemini.errors import error_from_recording
from server.providers.gemini.sdk_errors import translate_error
from server.providers.gemini.stream import DIALECT, GeminiFold, fold_body
from server.providers.model_name import check_model_name
from server.providers.model_profile import find_profile, profile_warnings
from server.providers.wire.call import VendorCall, WireStream, call_through, encode_request
from server.providers.wire.request_template import EncodedPartCache, Placeholders, Send, TemplateCache
from server.providers.wire.transport import SdkTransport, WireLimits, WireTransport

_API_VERSION: Final = "v1beta"
"""Not `v1`, the default of the SDK: aliases and continuation exist only here."""
_DUMMY: Final = "x"
_CALL_LIMIT_MS: Final = 3_600_000
"""Sent to Google as the limit of a call. The transport's own limits are much shorter."""
_NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For the SDK's own HTTP clients, which are never used: without it, each would load the system's certificates."""


class GeminiProvider:
    """Implements `server.providers.provider.Provider`."""

    name = DIALECT
    # A continuation token works in one version of one of Gemini's APIs only; such an answer ends as `paused`.
    continues_pauses = False
    fold_body = staticmethod(fold_body)
    open_fold = GeminiFold
    user_message = staticmethod(request.user_message)
    tool_message = staticmethod(request.tool_message)
    dynamic_message = staticmethod(request.dynamic_message)
    foreign_message = staticmethod(request.foreign_message)
    unsigned_message = staticmethod(request.unsigned_message)

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
        self._http = httpx2.AsyncClient(transport=self._transport)
        self._encoded_parts = EncodedPartCache()
        self._templates = TemplateCache(self._build_send)
        self._client = genai.Client(
            api_key=api_key,
            http_options=types.HttpOptions(
                base_url=base_url,
                api_version=_API_VERSION,
                timeout=_CALL_LIMIT_MS,
                httpx_async_client=self._http,
                client_args={"verify": _NO_TLS},
                async_client_args={"ssl": _NO_TLS},
            ),
        )
        self.caches = GeminiCaches(self._client)

    def open_stream(self, payload: Payload) -> WireStream:
        # The SDK puts the name into the URL unescaped, and a stored name may be older than the check on input.
        check_model_name(self.name, payload.model)
        return WireStream(self._prepare(payload), GeminiFold(), self._transport, error_from_recording)

    async def encode_request(self, payload: Payload) -> bytes:
        return await encode_request(self._prepare(payload))

    def settle_message(self, native: bytes, following: bytes = b"") -> bytes | None:  # noqa: ARG002  reason: the port's signature
        return native

    def signed_summary_text(self, message: bytes) -> str | None:  # noqa: ARG002  reason: the port's signature
        return None

    async def count_tokens(self, payload: Payload) -> int:
        """Count the contents only: this API counts neither the system instruction nor the tools."""
        check_model_name(self.name, payload.model)
        placeholders = Placeholders()
        options = types.HttpOptions(extra_body={"contents": [placeholders.make("contents")]})
        count = await call_through(
            lambda: self._client.aio.models.count_tokens(
                model=payload.model, contents=_DUMMY, config=types.CountTokensConfig(http_options=options)
            ),
            translate=translate_error,
            placeholders=placeholders,
            parts={"contents": request.join_messages(payload)},
        )
        return count.total_tokens or 0

    async def close(self) -> None:
        await self._client.aio.aclose()
        await self._http.aclose()

    def _prepare(self, payload: Payload) -> VendorCall:
        profile = find_profile(self.name, payload.model)
        return VendorCall(
            template=self._templates.prepare(request.reduce_payload(payload)),
            parts=self._encode_parts(payload),
            warnings=profile_warnings(profile),
        )

    def _build_send(self, shape: Payload, placeholders: Placeholders) -> Send:
        layers = request.build_layers(shape, placeholders.make)
        config = request.build_config(shape, find_profile(self.name, shape.model), layers)

        async def send() -> None:
            chunks = await self._client.aio.models.generate_content_stream(
                model=shape.model, contents=_DUMMY, config=config
            )
            async for _ in chunks:
                raise ProviderUnavailable("The response went to the SDK.")

        return send

    def _encode_parts(self, payload: Payload) -> dict[str, bytes]:
        """Encode what is spliced into the request."""
        parts = {"contents": request.join_messages(payload)}
        if payload.cached_content is not None:
            return parts
        if payload.static_text:
            text = payload.static_text
            parts["systemInstruction"] = self._encoded_parts.load(text, lambda: request.encode_system(text))
        if payload.tools:
            tools = payload.tools
            parts["tools"] = self._encoded_parts.load((repr(tools),), lambda: request.encode_tools(tools))
        return parts
