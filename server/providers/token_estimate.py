"""How many tokens a text will be, before a provider has said so.

A character of English is about a quarter of a token, but that depends on the model's tokenizer and on the language. So
the estimate is calibrated: each call that reports its usage tells how many tokens its bytes were, and the ratio of a
model follows, slowly enough that one odd call does not throw it off.
"""

from dataclasses import dataclass, field
from typing import Final

_FIRST_RATIO: Final = 0.28
"""Tokens per byte of JSON before anything is known. Rather too many than too few."""
_WEIGHT: Final = 0.2
_SMALLEST_SAMPLE_BYTES: Final = 500
_RATIO_RANGE: Final = (0.05, 1.5)


@dataclass(slots=True)
class TokenEstimate:
    """What this process has learnt, by model."""

    _ratios: dict[str, float] = field(default_factory=dict)

    def estimate(self, model: str, size_bytes: int) -> int:
        """Tokens for so many bytes of a request; at least 1 for anything."""
        return max(1, round(size_bytes * self._ratios.get(model, _FIRST_RATIO))) if size_bytes else 0

    def learn(self, model: str, size_bytes: int, tokens: int) -> None:
        """A call of so many bytes was so many input tokens. Small ones are mostly overhead and teach nothing."""
        if size_bytes < _SMALLEST_SAMPLE_BYTES or tokens <= 0:
            return
        low, high = _RATIO_RANGE
        seen = min(high, max(low, tokens / size_bytes))
        known = self._ratios.get(model)
        self._ratios[model] = seen if known is None else known + _WEIGHT * (seen - known)
