"""The implicit cache: a prefix that a request shares with an earlier one is read from the cache.

The real cache is best-effort; this one always hits when it may, so that a client's prefix stability can be measured. It
stores prefixes up to each part, per model and account, for five minutes after their last use.
"""

import hashlib
from collections import OrderedDict
from typing import Final

from server.emulator.gemini.prompt import Prompt
from server.emulator.state import Clock

_LIFETIME_SECONDS: Final = 300.0


class ImplicitCache:
    def __init__(self, clock: Clock, *, enabled: bool = True) -> None:
        self._clock = clock
        self._enabled = enabled
        self._expiries: OrderedDict[bytes, float] = OrderedDict()

    def read_and_fill(self, prompt: Prompt, account: str) -> int:
        """The cached tokens of this prompt, 0 below the model's minimum; then store its prefixes."""
        if not self._enabled:
            return 0
        now = self._clock()
        self._forget(now)
        digest = hashlib.sha256(f"{prompt.model.id} {account}".encode()).digest()
        tokens = cached = 0
        for block, size in prompt.blocks():
            digest = hashlib.sha256(digest + block.encode()).digest()
            tokens += size
            if digest in self._expiries:
                cached = tokens
            self._expiries[digest] = now + _LIFETIME_SECONDS
            self._expiries.move_to_end(digest)
        return cached if cached >= prompt.model.implicit_minimum_tokens else 0

    def _forget(self, now: float) -> None:
        while self._expiries and next(iter(self._expiries.values())) <= now:
            self._expiries.popitem(last=False)
