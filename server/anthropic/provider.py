"""The provider port on Claude."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence

import anthropic
import httpx2

from server.anthropic import request
from server.anthropic.errors import translate_error
from server.anthropic.stream import DIALECT, AnthropicFold, fold_body
from server.block import Blob, Block
from server.model_profile import find_profile, profile_warnings
from server.payload import Payload
from server.provider import ProviderAnswer
from server.wire.stream import VendorCall, WireStream
from server.wire.transport import WireLimits, WireTransport
from server.wire.unary import call_through


class AnthropicProvider:
    """Implements `server.provider.Provider`."""

    name = DIALECT

    def __init__(
        self,
        api_key: str,
        *,
        base_url: str | None = None,
        limits: WireLimits | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` in place of the network: `server.wire.replay` has one that feeds stored bytes."""
        self.account = hashlib.sha256(f"{self.name}:{api_key}".encode()).hexdigest()[:16]
        self._client = anthropic.AsyncAnthropic(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport or WireTransport(limits or WireLimits())),
        )

    def open_stream(self, payload: Payload) -> WireStream:
        profile = find_profile(self.name, payload.model)
        parameters = request.build_parameters(payload, profile)
        hole = f"{request.HOLE}:{secrets.token_hex(8)}"
        extra = {**request.build_extra(payload.settings, parameters), "messages": [hole]}

        async def send() -> None:
            stream = await self._client.messages.create(messages=[], stream=True, extra_body=extra, **parameters)
            await stream.close()

        call = VendorCall(
            holes={hole: request.join_messages(payload, profile)},
            send=send,
            translate=translate_error,
            warnings=profile_warnings(profile),
        )
        return WireStream(call, AnthropicFold())

    def fold_body(self, body: bytes) -> ProviderAnswer:
        return fold_body(body)

    def user_message(self, blocks: Sequence[Block], blobs: Mapping[str, Blob]) -> bytes:
        return request.user_message(blocks, blobs)

    def tool_message(self, blocks: Sequence[Block], calls: Sequence[Block]) -> bytes:
        return request.tool_message(blocks, calls)

    def foreign_message(self, blocks: Sequence[Block]) -> bytes | None:
        return request.foreign_message(blocks)

    async def count_tokens(self, payload: Payload) -> int:
        """Free of charge; ignores caching."""
        profile = find_profile(self.name, payload.model)
        parameters = request.build_parameters(payload, profile)
        counted = {name: parameters[name] for name in ("model", "system", "tools", "thinking") if name in parameters}
        hole = f"{request.HOLE}:{secrets.token_hex(8)}"
        count = await call_through(
            lambda: self._client.messages.count_tokens(messages=[], extra_body={"messages": [hole]}, **counted),
            holes={hole: request.join_messages(payload, profile)},
            translate=translate_error,
        )
        return count.input_tokens

    async def close(self) -> None:
        await self._client.close()
