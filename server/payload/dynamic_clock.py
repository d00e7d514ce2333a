"""The clock of the dynamic layer in the layered order.

There the dynamic block precedes the buffer. A new time in it would change the beginning of each request, and the
provider could cache nothing after it. So the time is in two places:

- The block contains a coarse time: the beginning of the current hour, or of another period (`settings.clock_seconds`).
  While the cache is warm it is kept until it is two periods old. After a pause the cache has expired, and a new time
  costs nothing.
- Each user task contains the exact time at which it was sent, before the user's text. It stays there, so later requests
  repeat it byte for byte. Tool results contain none, because not every model accepts text beside them.

The block is rendered with its previous time first. If the result is what was sent before, nothing but the clock has
changed. This works for any template, wherever it uses the clock. Other content is sent as soon as it changes, and then
with the current time. With a period of 0 the block has the exact time and tasks have none.

What is needed to repeat the times is stored with the call, as the member `clock` of its `caching`.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from server.caching.policy import SHORT_SECONDS
from server.conversation.block import JsonValue
from server.conversation.manifest import find_separate_dynamic, is_content_of
from server.conversation.payload import LayerOrder, ManifestEntry
from server.conversation.store import PayloadSource
from server.conversation.turn import TurnKind
from server.payload.arguments import format_time
from server.payload.renderer import RenderedDynamic
from server.providers.provider import Provider

CLOCK: Final = "current_datetime"
"""The member of the dynamic block that contains the time."""
DEFAULT_CLOCK_SECONDS: Final = 3_600
_MAX_PERIODS: Final = 2
_VOLATILE_CHANGES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicClock:
    """The times in the dynamic layer of one request."""

    block_at: datetime | None = None
    """The time in the block; None if it is not known, as for calls in the append-only order."""
    input_time: str | None = None
    """The text with the exact time inside the trigger, if any."""
    changes: int = 0
    """How many consecutive requests, this one last, had another block than the one before it although the cache was
    warm."""

    @property
    def is_volatile(self) -> bool:
        """Whether the block changes so often that nothing after it is worth caching."""
        return self.changes >= _VOLATILE_CHANGES


EXACT: Final = DynamicClock(changes=_VOLATILE_CHANGES)
"""Each request has its own time in the block, or in its input."""


async def render_with_clock(
    render: Callable[[datetime], Awaitable[RenderedDynamic]],
    source: PayloadSource,
    provider: Provider,
    now: datetime,
    clock_seconds: int,
) -> tuple[RenderedDynamic, DynamicClock]:
    """Render the block with the time of the cached one if nothing else has changed, otherwise with the current time.

    `render` renders it with a given time.
    """
    cached = _find_cached_block(source, provider, now)
    before = EXACT if source.previous_call is None else decode_clock(source.previous_call.caching)
    block_at = choose_block_time(None if cached is None else before.block_at, now, clock_seconds)
    rendered = await render(block_at)
    is_kept = cached is not None and is_content_of(cached, provider.dynamic_message(rendered.text))
    current = floor_clock(now, clock_seconds)
    if not is_kept and block_at != current:
        block_at = current
        rendered = await render(current)
    is_task = source.buffered[-1].kind is TurnKind.USER_TASK
    has_time = is_task and clock_seconds > 0 and bool(rendered.text.strip())
    return rendered, DynamicClock(
        block_at=block_at,
        input_time=json.dumps({CLOCK: format_time(now)}, separators=(",", ":")) if has_time else None,
        changes=0 if is_kept or cached is None else before.changes + 1,
    )


def _find_cached_block(source: PayloadSource, provider: Provider, now: datetime) -> ManifestEntry | None:
    """The dynamic block of the previous call, if that was in the layered order and its cache is warm."""
    previous = source.previous_call
    if previous is None or previous.provider != provider.name or source.previous_order is not LayerOrder.LAYERED:
        return None
    lifetime_seconds = int(previous.caching.get("cache_seconds", SHORT_SECONDS))
    if not is_warm(previous.started_at, lifetime_seconds, now):
        return None
    return find_separate_dynamic(source.previous_manifest)


def floor_clock(now: datetime, clock_seconds: int) -> datetime:
    """Return the beginning of the current period; with 0 the time itself."""
    if not clock_seconds:
        return now
    seconds = int(now.timestamp())
    return datetime.fromtimestamp(seconds - seconds % clock_seconds, UTC)


def is_warm(previous_at: datetime, lifetime_seconds: float, now: datetime) -> bool:
    """Return whether the cache of a call that started at `previous_at` is still alive."""
    return (now - previous_at).total_seconds() < lifetime_seconds


def choose_block_time(kept: datetime | None, now: datetime, clock_seconds: int) -> datetime:
    """Return the time for the block: `kept`, that of a cached block, unless it is too old."""
    if kept is not None and timedelta() <= now - kept < timedelta(seconds=_MAX_PERIODS * clock_seconds):
        return kept
    return floor_clock(now, clock_seconds)


def insert_time(block: str, input_time: str) -> str:
    """Return a block with the exact time of a task instead of its own, for a request in the append-only order."""
    try:
        members = json.loads(block)
    except ValueError:
        return block
    if not isinstance(members, dict) or CLOCK not in members:
        return block
    return json.dumps(members | json.loads(input_time), ensure_ascii=False, separators=(",", ":"))


def encode_clock(clock: DynamicClock) -> dict[str, JsonValue]:
    """Encode the times to be stored with the call."""
    if clock.block_at is None:
        return {}
    members: dict[str, JsonValue] = {"block_at": clock.block_at.isoformat(), "changes": clock.changes}
    return {"clock": members if clock.input_time is None else {**members, "input": clock.input_time}}


def decode_clock(caching: Mapping[str, JsonValue]) -> DynamicClock:
    """The inverse of `encode_clock`, from the `caching` of a call."""
    stored = caching.get("clock")
    if stored is None:
        return EXACT
    return DynamicClock(
        block_at=datetime.fromisoformat(stored["block_at"]),
        input_time=stored.get("input"),
        changes=stored["changes"],
    )
