"""A rate limiter in memory."""

from server.conversation.errors import RateLimited


class CountedRate:
    """Counts every request; `left` is the number of requests that are still allowed."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.asked: list[str] = []

    async def admit(self, key_id: str) -> None:
        self.asked.append(key_id)
        if self.left is None:
            return
        if self.left == 0:
            raise RateLimited(retry_after_seconds=7)
        self.left -= 1
