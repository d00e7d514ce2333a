"""Requests as an SDK builds them, kept as templates.

Building a request takes an SDK longer than everything else that is done to send it. But what it contributes (method,
URL, headers, and the frame of the body) is the same for all requests of one shape. So the SDK builds the first request
of a shape, in a dry run, with placeholders for the parts that are encoded here: the messages, for example. What it
built is kept as a template, and each request of that shape is the template with its parts.

A shape is a payload whose spliced parts are replaced by constants (`reduce_payload` of a vendor). The SDK gets the
shape and not the payload, so a template cannot contain anything that the shape does not determine.

Everything else on which a request depends belongs to the SDK's client, and so does the cache. Both vendors are called
with API keys, which do not expire: other credentials mean another client. These headers could differ between two
requests of a shape, and do not:

- `x-stainless-retry-count`: the retries of Claude's SDK are switched off, so it is 0.
- `x-stainless-timeout`, `x-stainless-read-timeout`, `x-server-timeout`: the limits that the client was built with.
- Idempotency keys: Claude's SDK makes one for each request, but has no header for it.
- `traceparent`, `tracestate`: Claude's SDK adds them if OpenTelemetry is used; it is switched off for the client.
- `content-length`, `host` and other headers of one connection or body are not in a template: the transport adds them.
"""

import secrets
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from server.conversation.lru import LruCache
from server.conversation.payload import Payload
from server.providers.wire.exchange import RequestHead
from server.providers.wire.transport import SdkCall

Send: TypeAlias = Callable[[], Awaitable[object]]
"""Lets an SDK send a request."""

_MAX_TEMPLATES: Final = 1000
_MAX_PART_BYTES: Final = 64 * 1024 * 1024


class Placeholders:
    """Texts that an SDK encodes in place of JSON that exists already.

    Number formats, unknown members and key order of that JSON are kept, and the SDK does not spend time on megabytes
    that it could only change. The texts are random, so no other text contains one.
    """

    def __init__(self) -> None:
        self._prefix = f"@strata:{secrets.token_hex(8)}"
        self._names: dict[str, bytes] = {}

    def make(self, name: str) -> str:
        """Return a text that stands for the part with this name."""
        placeholder = f"{self._prefix}:{name}"
        self._names[name] = f'"{placeholder}"'.encode()
        return placeholder

    def split(self, body: bytes) -> "BodyTemplate":
        """Divide an encoded body at the placeholders. Raises `KeyError` if one is missing."""
        found = sorted((body.find(text), name) for name, text in self._names.items())
        pieces, end = [], 0
        for offset, name in found:
            if offset < 0:
                raise KeyError(name)
            pieces.append(body[end:offset])
            end = offset + len(self._names[name])
        return BodyTemplate(pieces=tuple(pieces), names=tuple(name for _, name in found), end=body[end:])


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTemplate:
    """An encoded body with places for parts."""

    pieces: tuple[bytes, ...]
    """The bytes before each part."""
    names: tuple[str, ...]
    """The parts, in the order of their places."""
    end: bytes

    def fill(self, parts: Mapping[str, bytes]) -> bytes:
        """Return the body with the parts in their places. Raises `KeyError` if one is missing."""
        joined: list[bytes] = []
        for piece, name in zip(self.pieces, self.names, strict=True):
            joined += (piece, parts[name])
        joined.append(self.end)
        return b"".join(joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """All requests of one shape."""

    head: RequestHead
    body: BodyTemplate


class TemplateCache:
    """An LRU cache of the templates of one client, by shape."""

    def __init__(self, build_send: Callable[[Payload, Placeholders], Send], max_count: int = _MAX_TEMPLATES) -> None:
        """`build_send` lets the SDK send the request of a shape, with placeholders for its parts."""
        self._build_send = build_send
        self._templates: LruCache[str, RequestTemplate] = LruCache(max_count)

    def prepare(self, shape: Payload) -> "RequestTemplate | NewTemplate":
        """Return the template of the shape, or one that the SDK has yet to build. Raises what `build_send` raises."""
        # Unlike equality, the text distinguishes 1, 1.0 and true, and the order of members.
        key = repr(shape)
        template = self._templates.get(key)
        if template is not None:
            return template
        placeholders = Placeholders()
        return NewTemplate(self._templates, key, placeholders, self._build_send(shape, placeholders))


@dataclass(frozen=True, slots=True)
class NewTemplate:
    """A template that does not exist yet."""

    _templates: LruCache[str, RequestTemplate]
    _key: str
    _placeholders: Placeholders
    _send: Send

    async def build(self) -> RequestTemplate:
        """Let the SDK build the request in a dry run, and keep the template."""
        with SdkCall(dry_run=True) as call:
            await self._send()
        head, body = call.request
        template = RequestTemplate(head=head, body=self._placeholders.split(body))
        self._templates.put(self._key, template)
        return template


class EncodedPartCache:
    """An LRU cache of encoded parts, by what they were encoded from.

    The JSON of a static text, for example, is the same in each call of an epoch.
    """

    def __init__(self, limit_bytes: int = _MAX_PART_BYTES) -> None:
        self._parts: LruCache[Hashable, bytes] = LruCache(limit_bytes, weigh=len)

    def load(self, key: Hashable, encode: Callable[[], bytes]) -> bytes:
        """Return the part of the key, which must determine the result of `encode`."""
        part = self._parts.get(key)
        if part is None:
            part = encode()
            self._parts.put(key, part)
        return part
