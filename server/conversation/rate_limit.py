"""The port that keeps a key from asking too often."""

from typing import Protocol


class RateLimiter(Protocol):
    """Counts requests per API key over all processes. Never lets more through than the limit; where several processes
    serve one key, each holds a few permissions in reserve, so slightly less may get through.
    """

    async def admit(self, key_id: str) -> None:
        """Counts one request. Raises `RateLimited` with `retry_after_seconds` where the key has none left."""
        ...
