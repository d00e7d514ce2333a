"""A simulated provider that only counts tokens, and the prompts that are sent to it.

The provider has a prefix cache with a lifetime, a minimum length and prices. A prompt is a list of cacheable parts,
followed by tokens that cannot be cached. A part has a name and only grows at its end: two parts with the same name are
the same text up to the length of the shorter one. So the cached part of a prompt is what it shares with the previous
prompt, if that was cached and has not expired. The provider shares no code with the planner.

A layout is an order of the layers. In prompt order, with a bar at the end of what a provider can cache:

    a    nothing is cached
    b    static, history | input, dynamic: everything is kept, nothing is compacted
    c1   static | dynamic, buffer, input: a compaction rewrites the compacted history
    c2   as c1, but a compaction appends a segment: the `layered` order if the dynamic block changes with each call
    d1   static, buffer | input, dynamic: a compaction rewrites the compacted history
    d2   as d1, but a compaction appends a segment
    e    static, buffer, input, dynamic |: as d2, but a dynamic block stays in its input, and the whole prompt can be
         cached: the `append_only` order
    f    static, dynamic, buffer, input |: as c2, but the dynamic block is kept while only the clock moves, and each
         task contains the exact time: the `layered` order

`Timeline` returns the prompt of each call, given the conversation's latest compaction. Its sums are prepared, so each
lookup takes constant time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate
from typing import Final

from server.compaction.simulation.workload import Shape, SimulatedExchange
from server.payload.dynamic_clock import DEFAULT_CLOCK_SECONDS, choose_block_time, floor_clock, is_warm


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A text that only grows."""

    name: tuple[str, int]
    """The kind of text, and the number of times it was rewritten."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens of one request."""

    parts: tuple[PromptPart, ...]
    """The cacheable parts, in order."""
    fresh_tokens: int
    """The tokens after them."""

    @property
    def cacheable_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """Prices in US dollars per million tokens, and the rules of the cache."""

    fresh: float
    read: float
    write: float
    minimum_tokens: int
    lifetime_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """The tokens of one or more calls, each counted once, and their cost."""

    fresh_tokens: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "CallCost") -> "CallCost":
        return CallCost(
            fresh_tokens=self.fresh_tokens + other.fresh_tokens,
            read_tokens=self.read_tokens + other.read_tokens,
            written_tokens=self.written_tokens + other.written_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )

    @property
    def input_tokens(self) -> int:
        return self.fresh_tokens + self.read_tokens + self.written_tokens


def price_call(tariff: Tariff, prompt: Prompt, *, cached_tokens: int) -> CallCost:
    """Return the cost of a call if the provider has `cached_tokens` of its prompt."""
    cacheable = prompt.cacheable_tokens
    if cacheable < tariff.minimum_tokens:
        read = written = 0
    else:
        read = cached_tokens if cached_tokens >= tariff.minimum_tokens else 0
        written = cacheable - read
    fresh = cacheable + prompt.fresh_tokens - read - written
    cost = (fresh * tariff.fresh + read * tariff.read + written * tariff.write) / 1_000_000
    return CallCost(fresh_tokens=fresh, read_tokens=read, written_tokens=written, cost_usd=cost)


def shared_tokens(before: Prompt, after: Prompt) -> int:
    """Return how many tokens of `after` are the same in `before`, from the start."""
    shared = 0
    for old, new in zip(before.parts, after.parts, strict=False):
        if old.name != new.name:
            break
        shared += min(old.tokens, new.tokens)
        if old.tokens != new.tokens:
            break
    return shared


class SimulatedProvider:
    """Caches the last prompt for the lifetime of the tariff."""

    def __init__(self, tariff: Tariff) -> None:
        self._tariff = tariff
        self._last: Prompt | None = None
        self._last_at: datetime | None = None

    def call(self, prompt: Prompt, at: datetime) -> CallCost:
        """Return the cost of a call."""
        cached = 0
        if self._last is not None and self._last_at is not None:
            lifetime = timedelta(seconds=self._tariff.lifetime_seconds)
            if at - self._last_at < lifetime:
                cached = shared_tokens(self._last, prompt)
        self._last, self._last_at = prompt, at
        return price_call(self._tariff, prompt, cached_tokens=cached)


class Layout(StrEnum):
    """See the module."""

    UNCACHED = "a"
    KEPT = "b"
    LAYERED_REWRITTEN = "c1"
    LAYERED_VOLATILE = "c2"
    TRAILING_REWRITTEN = "d1"
    TRAILING = "d2"
    APPEND_ONLY = "e"
    LAYERED = "f"

    @property
    def caches_buffer(self) -> bool:
        """Whether the buffer can be cached."""
        return self not in {Layout.UNCACHED, Layout.LAYERED_REWRITTEN, Layout.LAYERED_VOLATILE}

    @property
    def caches_input(self) -> bool:
        """Whether the newest input can be cached too, because it stays as it is."""
        return self in {Layout.APPEND_ONLY, Layout.LAYERED}

    @property
    def rewrites(self) -> bool:
        """Whether a compaction changes the text of earlier ones."""
        return self in {Layout.LAYERED_REWRITTEN, Layout.TRAILING_REWRITTEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The latest compaction of a conversation."""

    before: int
    """The exchange before which it happened; 0 for never."""
    start: int
    """The first exchange in the buffer."""


NEVER: Final = Compacted(before=0, start=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """The tokens that the exchange itself adds to the prompt of one call."""

    cacheable: int
    fresh: int


TIME_TOKENS: Final = 25
"""Of the exact time in a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClock:
    """When the dynamic block of the layered order changes, see `server.payload.dynamic_clock`."""

    clock_seconds: int = DEFAULT_CLOCK_SECONDS
    lifetime_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBlock:
    """The dynamic block of an exchange."""

    number: int
    """The same number means the same text."""
    changes: int
    """See `server.payload.dynamic_clock.DynamicClock.changes`, after the exchange."""


class Timeline:
    """A conversation in a layout."""

    def __init__(
        self,
        shape: Shape,
        exchanges: Sequence[SimulatedExchange],
        layout: Layout,
        *,
        strips_thinking: bool = False,
        clock: BlockClock | None = None,
    ) -> None:
        """`strips_thinking`: exchanges that stay in the buffer after a compaction lose their thinking."""
        self.exchanges = exchanges
        self.layout = layout
        self.dynamic_tokens = shape.dynamic_tokens
        self.instruction_tokens = shape.static_tokens
        self._strips_thinking = strips_thinking
        staying = {Layout.APPEND_ONLY: shape.dynamic_tokens, Layout.LAYERED: TIME_TOKENS}.get(layout, 0)
        self.block_tokens = shape.dynamic_tokens if layout is Layout.LAYERED else 0
        """Of a dynamic block before the buffer that can be cached."""
        self.blocks = _list_blocks(exchanges, clock or BlockClock())
        """The dynamic block of each exchange."""
        sent = (exchange.spoken_tokens + exchange.thinking_tokens + staying for exchange in exchanges)
        self._sent = [0, *accumulate(sent)]
        self._spoken = [0, *accumulate(exchange.spoken_tokens for exchange in exchanges)]
        self._thinking = [0, *accumulate(exchange.thinking_tokens for exchange in exchanges)]
        self.calls = [self._read_calls(exchange, staying) for exchange in exchanges]

    def sent_tokens(self, first: int, end: int, compacted: Compacted) -> int:
        """The exchanges from `first` to before `end`, as they are sent from the buffer."""
        return self._sent[end] - self._sent[first] - self.stripped_tokens(first, end, compacted)

    def stripped_tokens(self, first: int, end: int, compacted: Compacted) -> int:
        """The thinking that the same exchanges have lost."""
        if not self._strips_thinking or compacted.before <= first:
            return 0
        return self._thinking[min(end, compacted.before)] - self._thinking[first]

    def static_tokens(self, compacted: Compacted) -> int:
        """The instructions and the compacted history."""
        return self.instruction_tokens + self._spoken[compacted.start]

    def prompt(self, number: int, step: int, compacted: Compacted) -> Prompt:
        """Return the prompt of call `step` of exchange `number`."""
        static = self.static_tokens(compacted)
        earlier = self.sent_tokens(compacted.start, number, compacted)
        call = self.calls[number][step]
        if self.layout is Layout.UNCACHED:
            return Prompt(parts=(), fresh_tokens=static + earlier + call.fresh)
        parts: tuple[PromptPart, ...] = (PromptPart(name=("static", 0), tokens=static),)
        if self.layout.rewrites:
            # The instructions stay the same; the history after them is a new text each time.
            instructions = PromptPart(name=("static", 0), tokens=self.instruction_tokens)
            history = PromptPart(name=("history", compacted.before), tokens=static - self.instruction_tokens)
            parts = (instructions, history)
        if not self.layout.caches_buffer:
            return Prompt(parts=parts, fresh_tokens=earlier + call.fresh)
        if self.block_tokens:
            parts = (*parts, PromptPart(name=("dynamic", self.blocks[number].number), tokens=self.block_tokens))
        buffer = PromptPart(name=("buffer", compacted.before), tokens=earlier + call.cacheable)
        return Prompt(parts=(*parts, buffer), fresh_tokens=call.fresh)

    def _read_calls(self, exchange: SimulatedExchange, staying: int) -> tuple[CallTokens, ...]:
        found = []
        before = 0
        for place, call in enumerate(exchange.calls):
            newest = call.input_tokens + (staying if place == 0 else 0)
            if self.layout.caches_input:
                found.append(CallTokens(cacheable=before + newest, fresh=0))
            elif self.layout.caches_buffer:
                found.append(CallTokens(cacheable=before, fresh=newest + self.dynamic_tokens))
            else:
                found.append(CallTokens(cacheable=0, fresh=before + newest + self.dynamic_tokens))
            before += newest + call.output_tokens + call.thinking_tokens
        return tuple(found)


def _list_blocks(exchanges: Sequence[SimulatedExchange], clock: BlockClock) -> list[DynamicBlock]:
    blocks: list[DynamicBlock] = []
    block_at: datetime | None = None
    for number, exchange in enumerate(exchanges):
        now = exchange.starts_at
        warm = number > 0 and is_warm(exchanges[number - 1].ends_at, clock.lifetime_seconds, now)
        chosen = choose_block_time(block_at if warm else None, now, clock.clock_seconds)
        is_new = chosen != block_at or exchange.changes_context
        block_at = floor_clock(now, clock.clock_seconds) if is_new else chosen
        before = blocks[-1] if blocks else None
        changes = before.changes + 1 if before is not None and is_new and warm else 0
        blocks.append(
            DynamicBlock(
                number=number if is_new or before is None else before.number,
                # The further calls of the exchange repeat the block.
                changes=changes if len(exchange.calls) == 1 else 0,
            )
        )
    return blocks
