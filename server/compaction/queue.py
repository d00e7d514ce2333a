"""The port to the queue of compactions."""

from datetime import datetime
from typing import Protocol


class CompactionQueue(Protocol):
    """Has conversations looked at by some worker, soon or later. One that waits already is not queued again."""

    async def queue_compaction(self, tenant_id: str, conversation_id: str, *, at: datetime | None = None) -> None:
        """`at`: not before, which is when the provider's cache has gone cold. Raises `DatabaseUnavailable`."""
        ...
