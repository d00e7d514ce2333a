"""Estimates of token counts, for requests that no provider has counted yet.

The number of tokens per byte depends on the model's tokenizer and on the language. The estimate is therefore calibrated
by the usage that each call reports, with a moving average, so that a single unusual call has little effect.
"""

from dataclasses import dataclass, field
from typing import Final

_FIRST_RATIO: Final = 0.28
"""Tokens per byte of JSON before the first call. Rather too high than too low."""
_WEIGHT: Final = 0.2
_MIN_SAMPLE_BYTES: Final = 500
_RATIO_RANGE: Final = (0.05, 1.5)


@dataclass(slots=True)
class TokenEstimate:
    """The calibrated estimates of this process, by model."""

    _ratios: dict[str, float] = field(default_factory=dict)

    def estimate(self, model: str, size_bytes: int) -> int:
        """Estimate the tokens of so many bytes of a request; at least 1, unless there are none."""
        return max(1, round(size_bytes * self._ratios.get(model, _FIRST_RATIO))) if size_bytes else 0

    def learn(self, model: str, size_bytes: int, tokens: int) -> None:
        """Calibrate with the input tokens that a call reported. Small requests are ignored: they are mostly
        overhead.
        """
        if size_bytes < _MIN_SAMPLE_BYTES or tokens <= 0:
            return
        low, high = _RATIO_RANGE
        seen = min(high, max(low, tokens / size_bytes))
        known = self._ratios.get(model)
        self._ratios[model] = seen if known is None else known + _WEIGHT * (seen - known)
