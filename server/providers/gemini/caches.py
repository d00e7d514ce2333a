"""Explicit caches: the `cachedContents` of Gemini.

A cache contains the static text and the tools of a payload; a request that names it must contain neither. It is bound
to the model and the account, has a time to live, and is billed by the hour.
"""

import re
from collections.abc import Sequence
from typing import Final, TypeGuard

from google import genai
from google.genai import types

from server.conversation.errors import CacheGone, ProviderMalformed
from server.conversation.payload import Payload
from server.providers.gemini import request
from server.providers.gemini.sdk_errors import translate_error
from server.providers.model_name import check_model_name
from server.providers.provider import ExplicitCache
from server.providers.wire.call import call_through

_PAGE_SIZE: Final = 1000
_NAME: Final = re.compile(r"cachedContents/[A-Za-z0-9_-]+")


class GeminiCaches:
    """Implements `server.providers.provider.ExplicitCaches`."""

    def __init__(self, client: genai.Client) -> None:
        self._client = client

    def may_stand_for(self, payload: Payload) -> bool:
        """Return False if the assistant adds a tool config: a request with both is rejected."""
        return bool(payload.static_text or payload.tools) and not request.adds_tool_config(payload.settings)

    async def create(self, payload: Payload, *, lifetime_seconds: int, label: str) -> ExplicitCache:
        check_model_name("gemini", payload.model)
        tools = request.build_tools(payload)
        config = types.CreateCachedContentConfig(
            system_instruction=request.build_system(payload),
            tools=list(tools) if tools else None,
            ttl=f"{lifetime_seconds}s",
            display_name=label,
        )
        made = await call_through(
            lambda: self._client.aio.caches.create(model=payload.model, config=config),
            translate=translate_error,
        )
        return _read(made)

    async def find(self, label: str) -> Sequence[str]:
        names: list[str] = []
        config = types.ListCachedContentsConfig(page_size=_PAGE_SIZE)
        pages = await call_through(lambda: self._client.aio.caches.list(config=config), translate=translate_error)
        while True:
            names += [cache.name for cache in pages.page if cache.display_name == label and _is_name(cache.name)]
            try:
                await call_through(pages.next_page, translate=translate_error)
            except IndexError:
                # The SDK raises it at the end of the list.
                return names

    async def prolong(self, name: str, *, lifetime_seconds: int) -> ExplicitCache:
        _check_name(name)
        config = types.UpdateCachedContentConfig(ttl=f"{lifetime_seconds}s")
        changed = await call_through(
            lambda: self._client.aio.caches.update(name=name, config=config), translate=translate_error
        )
        return _read(changed)

    async def delete(self, name: str) -> None:
        _check_name(name)
        await call_through(lambda: self._client.aio.caches.delete(name=name), translate=translate_error)


def _is_name(name: str | None) -> TypeGuard[str]:
    """Whether it is a valid name of a cache: the SDK puts it into the URL unescaped."""
    return name is not None and _NAME.fullmatch(name) is not None


def _check_name(name: str) -> None:
    if not _is_name(name):
        raise CacheGone("The provider has no cache with such a name.")


def _read(cache: types.CachedContent) -> ExplicitCache:
    if not _is_name(cache.name) or cache.expire_time is None:
        raise ProviderMalformed("The provider returned a cache without a name or an expiry.")
    tokens = cache.usage_metadata.total_token_count if cache.usage_metadata is not None else None
    return ExplicitCache(name=cache.name, expires_at=cache.expire_time, token_count=tokens or 0)
