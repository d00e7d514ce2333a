"""Prompt layouts: in which order the layers stand and what of them can be cached, for the simulation.

In prompt order, a bar marks the end of what a provider can have cached:

    a    nothing is cached
    b    static, history | input, dynamic: everything is kept, nothing compacted
    c1   static | dynamic, buffer, input: a compaction rewrites the compacted history
    c2   as c1, but a compaction adds a segment: the `layered` order
    d1   static, buffer | input, dynamic: a compaction rewrites the compacted history
    d2   as d1, but a compaction adds a segment
    e    static, buffer, input, dynamic |: as d2, but a dynamic block stays in the input that brought it, and all of
         the prompt can be cached: the `append_only` order

`Timeline` says what each call of a conversation sends, given how the conversation was compacted last. Its sums are
prepared, so that it takes the same time wherever in the conversation it is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Final

from server.compaction.simulated_conversation import Shape, SimulatedExchange
from server.compaction.simulated_provider import Piece, Prompt


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
