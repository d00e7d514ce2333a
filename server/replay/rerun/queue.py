"""The port through which replays are handed to whoever does the work."""

from typing import Protocol


class ReplayQueue(Protocol):
    """Where replays wait to be run."""

    async def queue_replay(self, tenant_id: str, replay_id: str, *, slot_count: int) -> None:
        """So many items of it may be run at the same time. What is queued already is not queued twice.

        For a replay that is made or continued. It would be found without this, some seconds later. Raises
        `DatabaseUnavailable`.
        """
        ...
