"""How fast the emulated model responds."""

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Final

_WORD: Final = re.compile(r"\S+\s*|\s+")
_SLOW_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    first_chunk_seconds: float
    seconds_per_chunk: float

    async def wait_first(self) -> None:
        """Wait before the first chunk."""
        await _sleep(self.first_chunk_seconds)

    async def wait_next(self) -> None:
        """Wait between two chunks."""
        await _sleep(self.seconds_per_chunk)

    def slowed(self) -> "Latency":
        """A copy with two seconds before each chunk."""
        return replace(self, first_chunk_seconds=_SLOW_SECONDS, seconds_per_chunk=_SLOW_SECONDS)


FULL_SPEED: Final = Latency(first_chunk_seconds=0, seconds_per_chunk=0)
MODEL_LATENCY: Final = Latency(first_chunk_seconds=0.4, seconds_per_chunk=0.03)


def pieces(text: str) -> list[str]:
    """Split a text into words; joined, the words are the text again."""
    return _WORD.findall(text)


async def _sleep(seconds: float) -> None:
    # Also without a wait, so that a fast stream does not block the others.
    await asyncio.sleep(seconds)
