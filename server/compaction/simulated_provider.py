"""A provider that only counts: a prefix cache with a lifetime, a minimum and prices.

A prompt is a list of pieces that can be cached, and the tokens behind them that cannot. A piece has a name and grows at
its end: two pieces of one name are the same text as far as the shorter one goes. So the provider knows of a prompt as
much as it shares with the one before, if that was cached and not too long ago. It shares no code with the planner.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta


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
