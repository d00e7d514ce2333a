"""The port to what is known about how long conversations get."""

from typing import Protocol


class ConversationLengths(Protocol):
    """Where lengths come from. Raises `DatabaseUnavailable`."""

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        """The mean exchanges of the assistant's newest conversations that have come to rest.

        None where there are too few of them to say. Takes the same time however many conversations there are.
        """
        ...


class KnownLengths(Protocol):
    """The same as far as it is known: without a database it is what was known before."""

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        """As above; may be some hours old."""
        ...
