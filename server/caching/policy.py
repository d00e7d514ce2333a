"""What a request asks of the provider's cache: where breakpoints are, and how long the marked prefixes live.

Providers cache prefixes of a request. Gemini caches by itself; Claude caches the prefix before each breakpoint that a
request sets. It accepts four breakpoints, and looks back at most twenty blocks from each for a prefix that it has
cached before. Writing a prefix costs more than plain input, for an hour more than for five minutes; reading it costs a
tenth of plain input or less.

So breakpoints are placed where the next request will look: after the newest message, and at places that are still there
when the conversation takes a less usual course (a wide answer, a withdrawn input, an edited static text). The lifetime
is the one that would have been the cheapest for the recent gaps between calls.

What a request asked for is stored with its call. A rebuilt request asks for the same, so it has the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.payload import Payload, count_static_breakpoints
from server.providers.pricing import Price

SHORT_SECONDS: Final = 300
LONG_SECONDS: Final = 3600
WIDE_BLOCKS: Final = 15
"""An answer with more blocks is so wide that the look-back from after it misses what is before it."""
_DEFAULT_RATES: Final = (Decimal("0.1"), Decimal("1.25"), Decimal(2))
"""Read, short write and long write as multiples of the input price, for models without a known price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakpoints:
    """The breakpoints of a request, besides those of the static text."""

    tools: bool
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """The recent gaps between calls of a conversation, and the size of its requests."""

    gaps_seconds: tuple[float, ...]
    """Between the starts of its latest calls, including the gap before the present call."""
    prefix_tokens: int
    """What the next call can read."""
    growth_tokens: int
    """What each call adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long the marked prefixes live. Providers require that earlier ones live at least as long as later ones."""

    static_seconds: int
    message_seconds: int


def place_breakpoints(
    message_count: int, *, has_tools: bool, static_piece_count: int, limit: int, is_wide: bool
) -> Breakpoints:
    """Place at most `limit` breakpoints, including those of the static text.

    In order of use: after the newest message, for the next request; if the answer before it is wide, where the newest
    breakpoint of the last request was; after the message before the newest, which is still there if an input is
    withdrawn; after the tools, which are still there if the static text is edited.
    """
    available = limit - count_static_breakpoints(static_piece_count, limit)
    newest = message_count - 1
    candidates = (newest, newest - 2, newest - 1) if is_wide else (newest, newest - 1)
    indexes = [index for index in candidates if index >= 0][:available]
    return Breakpoints(tools=has_tools and len(indexes) < available, messages=tuple(sorted(indexes)))


def plan_lifetimes(rhythm: Rhythm, price: Price | None, *, requested_seconds: int | None = None) -> Lifetimes:
    """Choose the lifetimes that would have been the cheapest for the observed gaps. `requested_seconds` overrides the
    choice.

    For a new conversation, messages live short and the static text lives long: other conversations read it too, and it
    is the first to be read again after a pause.
    """
    if requested_seconds is not None:
        requested = LONG_SECONDS if requested_seconds >= LONG_SECONDS else SHORT_SECONDS
        return Lifetimes(static_seconds=requested, message_seconds=requested)
    message_cost = _cost(rhythm, rhythm.growth_tokens, price)
    static_cost = _cost(rhythm, 0, price)
    message_seconds = LONG_SECONDS if message_cost[LONG_SECONDS] < message_cost[SHORT_SECONDS] else SHORT_SECONDS
    static_is_long = static_cost[LONG_SECONDS] <= static_cost[SHORT_SECONDS]
    return Lifetimes(
        static_seconds=max(message_seconds, LONG_SECONDS if static_is_long else SHORT_SECONDS),
        message_seconds=message_seconds,
    )


def measure_gaps(recent: Sequence[datetime], now: datetime) -> tuple[float, ...]:
    """Return the seconds between calls, `recent` newest first. 0 if the clocks of two machines disagree."""
    times = (now, *recent)
    return tuple(max(0.0, (later - earlier).total_seconds()) for later, earlier in pairwise(times))


def encode_caching(payload: Payload) -> dict[str, JsonValue]:
    """Encode what a payload asks of the cache, and its container, to be stored with the call. Empty for neither."""
    container = {} if payload.container is None else {"container": payload.container}
    return container | _encode_cache_request(payload)


def _encode_cache_request(payload: Payload) -> dict[str, JsonValue]:
    if payload.cached_content is not None:
        return {"cached_content": payload.cached_content}
    if not (payload.breakpoints or payload.static_cache_seconds or payload.requests_diagnosis):
        return {}
    requested: dict[str, JsonValue] = {
        "breakpoints": list(payload.breakpoints),
        "marks_tools": payload.marks_tools,
        "cache_seconds": payload.cache_seconds,
        "static_cache_seconds": payload.static_cache_seconds,
    }
    if payload.requests_diagnosis:
        requested["previous_response_id"] = payload.previous_response_id
    return requested


_NOT_ABOUT_CACHES: Final = frozenset({"container", "clock"})
"""Members of the stored caching that rebuild other parts of the request; for `clock` see the room `payload`."""


def apply_caching(payload: Payload, caching: Mapping[str, JsonValue]) -> Payload:
    """Apply stored caching to a payload: the inverse of `encode_caching`. Empty caching changes nothing."""
    if "container" in caching:
        payload = replace(payload, container=caching["container"])
    if not set(caching) - _NOT_ABOUT_CACHES:
        return payload
    if "cached_content" in caching:
        return replace(payload, cached_content=caching["cached_content"])
    return replace(
        payload,
        breakpoints=tuple(caching["breakpoints"]),
        marks_tools=caching["marks_tools"],
        cache_seconds=caching["cache_seconds"],
        static_cache_seconds=caching["static_cache_seconds"],
        requests_diagnosis="previous_response_id" in caching,
        previous_response_id=caching.get("previous_response_id"),
    )


def _cost(rhythm: Rhythm, growth_tokens: int, price: Price | None) -> dict[int, Decimal]:
    """The cost of the gaps with each lifetime: a read if the prefix was still cached, otherwise writing it again."""
    read, short_write, long_write = _rates(price)
    prefix = Decimal(rhythm.prefix_tokens)
    growth = Decimal(growth_tokens)
    return {
        lifetime: sum(
            (
                read * prefix + write * growth if gap <= lifetime else write * (prefix + growth)
                for gap in rhythm.gaps_seconds
            ),
            Decimal(0),
        )
        for lifetime, write in ((SHORT_SECONDS, short_write), (LONG_SECONDS, long_write))
    }


def _rates(price: Price | None) -> tuple[Decimal, Decimal, Decimal]:
    if price is None or price.cache_read is None:
        return _DEFAULT_RATES
    return price.cache_read, price.cache_write, price.cache_write_long
