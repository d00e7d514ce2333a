"""A provider that only counts: a prefix cache with a lifetime, a minimum and prices.

A prompt is a list of pieces that can be cached, and the tokens behind them that cannot. A piece has a name and grows at
its end: two pieces of one name are the same text as far as the shorter one goes. So the provider knows of a prompt as
much as it shares with the one before, if that was cached and not too long ago. It shares no code with the planner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate
from typing import Final

from server.compaction.simulation.workload import Shape, SimulatedExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A text that only grows."""

    name: tuple[str, int]
    """What it is, and which rewriting of it."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a call sends, in tokens."""

    pieces: tuple[Piece, ...]
    """What can be cached, in order."""
    fresh_tokens: int
    """What stands behind it."""

    @property
    def cacheable_tokens(self) -> int:
        """All of the pieces."""
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """Prices in US dollars per million tokens, and the rules of the cache."""

    fresh: float
    read: float
    write: float
    minimum_tokens: int
    lifetime_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The tokens of one or more calls, each in one bucket, and their cost."""

    fresh_tokens: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(
            fresh_tokens=self.fresh_tokens + other.fresh_tokens,
            read_tokens=self.read_tokens + other.read_tokens,
            written_tokens=self.written_tokens + other.written_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )

    @property
    def input_tokens(self) -> int:
        """All of them."""
        return self.fresh_tokens + self.read_tokens + self.written_tokens


def charge(tariff: Tariff, prompt: Prompt, *, known_tokens: int) -> Bill:
    """What a call costs of whose prompt the provider knows so many tokens."""
    cacheable = prompt.cacheable_tokens
    if cacheable < tariff.minimum_tokens:
        read = written = 0
    else:
        read = known_tokens if known_tokens >= tariff.minimum_tokens else 0
        written = cacheable - read
    fresh = cacheable + prompt.fresh_tokens - read - written
    cost = (fresh * tariff.fresh + read * tariff.read + written * tariff.write) / 1_000_000
    return Bill(fresh_tokens=fresh, read_tokens=read, written_tokens=written, cost_usd=cost)


def shared_tokens(before: Prompt, after: Prompt) -> int:
    """How many tokens of `after` are the same in `before`, from the beginning on."""
    shared = 0
    for old, new in zip(before.pieces, after.pieces, strict=False):
        if old.name != new.name:
            break
        shared += min(old.tokens, new.tokens)
        if old.tokens != new.tokens:
            break
    return shared


class SimulatedProvider:
    """Keeps what it saw last, for as long as the tariff says."""

    def __init__(self, tariff: Tariff) -> None:
        self._tariff = tariff
        self._last: Prompt | None = None
        self._last_at: datetime | None = None

    def call(self, prompt: Prompt, at: datetime) -> Bill:
        """What the call costs."""
        known = 0
        if self._last is not None and self._last_at is not None:
            lifetime = timedelta(seconds=self._tariff.lifetime_seconds)
            if at - self._last_at < lifetime:
                known = shared_tokens(self._last, prompt)
        self._last, self._last_at = prompt, at
        return charge(self._tariff, prompt, known_tokens=known)


class Layout(StrEnum):
    """See the module."""

    UNCACHED = "a"
    KEPT = "b"
    LAYERED_REWRITTEN = "c1"
    LAYERED = "c2"
    TRAILING_REWRITTEN = "d1"
    TRAILING = "d2"
    APPEND_ONLY = "e"

    @property
    def caches_buffer(self) -> bool:
        """Whether the buffer is part of what can be cached."""
        return self not in {Layout.UNCACHED, Layout.LAYERED_REWRITTEN, Layout.LAYERED}

    @property
    def rewrites(self) -> bool:
        """Whether a compaction changes the text of earlier ones."""
        return self in {Layout.LAYERED_REWRITTEN, Layout.TRAILING_REWRITTEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """How a conversation stands after its latest compaction."""

    before: int
    """The exchange before which it happened; 0 for never."""
    start: int
    """The first exchange that is in the buffer."""


NEVER: Final = Compacted(before=0, start=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """Of one call, what the exchange itself adds to the prompt."""

    cacheable: int
    fresh: int


class Timeline:
    """A conversation in a layout."""

    def __init__(
        self, shape: Shape, exchanges: Sequence[SimulatedExchange], layout: Layout, *, strips_thinking: bool = False
    ) -> None:
        """`strips_thinking`: what stays in the buffer behind a compaction loses its thinking."""
        self.exchanges = exchanges
        self.layout = layout
        self.dynamic_tokens = shape.dynamic_tokens
        self.instruction_tokens = shape.static_tokens
        self._strips_thinking = strips_thinking
        staying = shape.dynamic_tokens if layout is Layout.APPEND_ONLY else 0
        sent = (exchange.spoken_tokens + exchange.thinking_tokens + staying for exchange in exchanges)
        self._sent = [0, *accumulate(sent)]
        self._spoken = [0, *accumulate(exchange.spoken_tokens for exchange in exchanges)]
        self._thinking = [0, *accumulate(exchange.thinking_tokens for exchange in exchanges)]
        self.calls = [self._read_calls(exchange, staying) for exchange in exchanges]

    def sent_tokens(self, first: int, end: int, compacted: Compacted) -> int:
        """The exchanges from `first` to before `end` as they are sent from the buffer."""
        return self._sent[end] - self._sent[first] - self.stripped_tokens(first, end, compacted)

    def stripped_tokens(self, first: int, end: int, compacted: Compacted) -> int:
        """The thinking that the same exchanges have lost."""
        if not self._strips_thinking or compacted.before <= first:
            return 0
        return self._thinking[min(end, compacted.before)] - self._thinking[first]

    def static_tokens(self, compacted: Compacted) -> int:
        """The instructions and everything that was compacted."""
        return self.instruction_tokens + self._spoken[compacted.start]

    def prompt(self, number: int, step: int, compacted: Compacted) -> Prompt:
        """What the call `step` of exchange `number` sends."""
        static = self.static_tokens(compacted)
        earlier = self.sent_tokens(compacted.start, number, compacted)
        call = self.calls[number][step]
        if self.layout is Layout.UNCACHED:
            return Prompt(pieces=(), fresh_tokens=static + earlier + call.fresh)
        pieces: tuple[Piece, ...] = (Piece(name=("static", 0), tokens=static),)
        if self.layout.rewrites:
            # The instructions stay as they are; the history behind them is a new text each time.
            instructions = Piece(name=("static", 0), tokens=self.instruction_tokens)
            history = Piece(name=("history", compacted.before), tokens=static - self.instruction_tokens)
            pieces = (instructions, history)
        if not self.layout.caches_buffer:
            return Prompt(pieces=pieces, fresh_tokens=earlier + call.fresh)
        buffer = Piece(name=("buffer", compacted.before), tokens=earlier + call.cacheable)
        return Prompt(pieces=(*pieces, buffer), fresh_tokens=call.fresh)

    def _read_calls(self, exchange: SimulatedExchange, staying: int) -> tuple[CallTokens, ...]:
        found = []
        before = 0
        for place, call in enumerate(exchange.calls):
            newest = call.input_tokens + (staying if place == 0 else 0)
            if self.layout is Layout.APPEND_ONLY:
                found.append(CallTokens(cacheable=before + newest, fresh=0))
            elif self.layout.caches_buffer:
                found.append(CallTokens(cacheable=before, fresh=newest + self.dynamic_tokens))
            else:
                found.append(CallTokens(cacheable=0, fresh=before + newest + self.dynamic_tokens))
            before += newest + call.output_tokens + call.thinking_tokens
        return tuple(found)
