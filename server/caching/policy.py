"""What is asked of a provider's cache: where markers stand, how long what they mark should live.

Claude caches what stands before a marker, takes four of them, and looks back twenty blocks from each for what it has
cached before. Writing costs more than plain input, for an hour more than for five minutes; reading costs next to
nothing. So the markers stand where the next request will look, and the lifetime follows the conversation's rhythm.

What was asked for is stored with the call and asked for again when the call is rebuilt.
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
"""An answer of more blocks is so wide that looking back from behind it would miss what stands before it."""
_USUAL: Final = (Decimal("0.1"), Decimal("1.25"), Decimal(2))
"""Reading, writing for minutes, writing for an hour, of the price of input: for models without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Where a request has markers, beside those of the static text."""

    tools: bool
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How a conversation is talked to."""

    gaps_seconds: tuple[float, ...]
    """Between the starts of its latest calls, the one to the present call included."""
    prefix_tokens: int
    """What the next call could read."""
    growth_tokens: int
    """What each call adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long what is marked should live. What stands first lives at least as long: providers insist on that."""

    static_seconds: int
    message_seconds: int


def place_markers(message_count: int, *, has_tools: bool, static_pieces: int, limit: int, is_wide: bool) -> Markers:
    """Never more than `limit` in all, those of the static text included. The most useful ones stay.

    In order of use: behind the newest message, for the next request; for a wide answer before it, where the last
    request's newest marker stood; behind the message before the newest, the last that is still there when an input is
    withdrawn; behind the tools, which outlive the static text when it is edited.
    """
    room = limit - count_static_breakpoints(static_pieces, limit)
    newest = message_count - 1
    wanted = (newest, newest - 2, newest - 1) if is_wide else (newest, newest - 1)
    places = [place for place in wanted if place >= 0][:room]
    return Markers(tools=has_tools and len(places) < room, messages=tuple(sorted(places)))


def plan_lifetimes(rhythm: Rhythm, price: Price | None, *, asked_seconds: int | None = None) -> Lifetimes:
    """The lifetimes that would have been the cheapest for the gaps that were seen. `asked_seconds` decides instead.

    Before anything is known of a conversation its messages live short, and the static text lives long: it is the part
    that other conversations read too, and the first to be read again after a pause.
    """
    if asked_seconds is not None:
        asked = LONG_SECONDS if asked_seconds >= LONG_SECONDS else SHORT_SECONDS
        return Lifetimes(static_seconds=asked, message_seconds=asked)
    message_cost = _cost(rhythm, rhythm.growth_tokens, price)
    static_cost = _cost(rhythm, 0, price)
    message_seconds = LONG_SECONDS if message_cost[LONG_SECONDS] < message_cost[SHORT_SECONDS] else SHORT_SECONDS
    static_is_long = static_cost[LONG_SECONDS] <= static_cost[SHORT_SECONDS]
    return Lifetimes(
        static_seconds=max(message_seconds, LONG_SECONDS if static_is_long else SHORT_SECONDS),
        message_seconds=message_seconds,
    )


def measure_gaps(recent: Sequence[datetime], now: datetime) -> tuple[float, ...]:
    """The seconds between calls, `recent` newest first. Clocks of several machines may run backwards: then 0."""
    times = (now, *recent)
    return tuple(max(0.0, (later - earlier).total_seconds()) for later, earlier in pairwise(times))


def encode_caching(payload: Payload) -> dict[str, JsonValue]:
    """What a payload asks of the cache, and the container that it names, as the call keeps it. Empty for neither."""
    named = {} if payload.container is None else {"container": payload.container}
    return named | _encode_cache(payload)


def _encode_cache(payload: Payload) -> dict[str, JsonValue]:
    if payload.cached_content is not None:
        return {"cached_content": payload.cached_content}
    if not (payload.breakpoints or payload.static_cache_seconds or payload.requests_diagnosis):
        return {}
    asked: dict[str, JsonValue] = {
        "breakpoints": list(payload.breakpoints),
        "marks_tools": payload.marks_tools,
        "cache_seconds": payload.cache_seconds,
        "static_cache_seconds": payload.static_cache_seconds,
    }
    if payload.requests_diagnosis:
        asked["previous_response_id"] = payload.previous_response_id
    return asked


def apply_caching(payload: Payload, caching: Mapping[str, JsonValue]) -> Payload:
    """The payload as it was sent. The inverse of `encode_caching`; nothing stored changes nothing."""
    if "container" in caching:
        payload = replace(payload, container=caching["container"])
    if not set(caching) - {"container"}:
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
    """What the gaps cost with each lifetime: reading where the prefix was still there, writing it again where not."""
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
        return _USUAL
    return price.cache_read, price.cache_write, price.cache_write_long
