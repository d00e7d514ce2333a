"""The provider port on Gemini."""

import hashlib
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx2
from google import genai
from google.genai import types

from server.conversation.block import Blob, Block
from server.conversation.errors import ProviderUnavailable
from server.conversation.payload import Payload
from server.providers.gemini import request
from server.providers.gemini.caches import GeminiCaches
from server.providers.gemini.sdk_errors import translate_error
from server.providers.gemini.stream import DIALECT, GeminiFold, fold_body
from server.providers.model_name import check_model_name
from server.providers.model_profile import find_profile, profile_warnings
from server.providers.provider import Fold, ProviderAnswer
from server.providers.wire.placeholders import Placeholders
from server.providers.wire.stream import VendorCall, WireStream, encode_request
from server.providers.wire.transport import WireLimits, WireTransport
from server.providers.wire.unary import call_through
from server.providers.wire.written import WrittenParts

_API_VERSION: Final = "v1beta"
"""Not the SDK's `v1`: aliases and continuation exist only here."""
_DUMMY: Final = "x"
_CALL_LIMIT_MS: Final = 3_600_000
"""Told to Google as the most that a call may take. Silence is judged by our transport, much earlier."""
_NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For the SDK's own clients, which are never used: it would read the machine's certificates for each. Trusts nobody."""


class GeminiProvider:
    """Implements `server.providers.provider.Provider`."""

    name = DIALECT
    # A continuation token of Gemini works in one version of one of its APIs only; such an answer ends as `paused`.
    continues_pauses = False

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
        self._http = httpx2.AsyncClient(transport=transport or WireTransport(limits or WireLimits()))
        self._written = WrittenParts()
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
        # The SDK writes the name into the address as it is. A stored one may be from before names were checked.
        check_model_name(self.name, payload.model)
        return WireStream(self._prepare(payload), GeminiFold())

    async def encode_request(self, payload: Payload) -> bytes:
        return await encode_request(self._prepare(payload))

    def fold_body(self, body: bytes) -> ProviderAnswer:
        return fold_body(body)

    def open_fold(self) -> Fold:
        return GeminiFold()

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

    def settle_message(self, native: bytes, following: bytes = b"") -> bytes | None:  # noqa: ARG002  reason: the port's
        return native

    def signed_summary_text(self, message: bytes) -> str | None:  # noqa: ARG002  reason: the port's; Gemini signs no summaries
        return None

    async def count_tokens(self, payload: Payload) -> int:
        """Of the contents alone: this API counts neither the system instruction nor the tools."""
        check_model_name(self.name, payload.model)
        placeholders = Placeholders()
        options = types.HttpOptions(extra_body={"contents": [placeholders.make(request.join_contents(payload))]})
        count = await call_through(
            lambda: self._client.aio.models.count_tokens(
                model=payload.model, contents=_DUMMY, config=types.CountTokensConfig(http_options=options)
            ),
            placeholders=placeholders.contents,
            translate=translate_error,
        )
        return count.total_tokens or 0

    async def close(self) -> None:
        await self._client.aio.aclose()
        await self._http.aclose()

    def _prepare(self, payload: Payload) -> VendorCall:
        profile = find_profile(self.name, payload.model)
        placeholders = Placeholders()
        config = request.build_config(payload, profile, self._write_body(payload, placeholders))

        async def send() -> None:
            chunks = await self._client.aio.models.generate_content_stream(
                model=payload.model, contents=_DUMMY, config=config
            )
            async for _ in chunks:
                raise ProviderUnavailable("The answer went to the SDK.")

        return VendorCall(
            placeholders=placeholders.contents,
            send=send,
            translate=translate_error,
            warnings=profile_warnings(profile),
        )

    def _write_body(self, payload: Payload, placeholders: Placeholders) -> dict[str, Any]:
        """What the SDK need not look at, as holes: it would take its time for each megabyte, and change nothing."""
        body: dict[str, Any] = {"contents": [placeholders.make(request.join_contents(payload))]}
        if payload.cached_content is not None:
            # The cache holds the others; a request that has both is refused.
            return body
        if payload.static_text:
            text = payload.static_text
            body["systemInstruction"] = placeholders.make(self._written.find(text, lambda: request.write_system(text)))
        if payload.tools:
            body["tools"] = placeholders.make(request.write_tools(payload.tools))
        return body
