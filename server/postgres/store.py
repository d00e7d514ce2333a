"""The store on Postgres.

A conversation is one small row that is locked briefly, and turns that are only ever added. The row holds the next
number, the pending tool calls, the start of the buffer and the lease, so accepting a turn reads no turn, and building a
payload reads the buffer and nothing before it. The bytes of every provider response are stored; lists and views are
projections of them.

How the guarantees of `server.conversation.store` are met:

- order: numbers are taken from the row by the statement that inserts the turn, and the row's lock orders the writers;
- leases: a token in the row, which every write of the running turn names in its WHERE clause;
- one round trip: accepting, loading and finishing are one statement each, and a statement is its own transaction;
- notifications: NOTIFY is part of the statement that writes the change;
- repeatability: a turn stores the lease that wrote it, a chunk its offset, a call its attempt.

Each part of the store is a class in the package of its subject, next to its statements.
"""

from server.conversation.conversation import Lease
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.store import Finished, NewAnswer
from server.postgres.compaction.epochs import EpochStore
from server.postgres.conversation.assistants import AssistantStore
from server.postgres.conversation.conversations import ConversationStore
from server.postgres.conversation.erasure import ErasureStore
from server.postgres.conversation.forks import ForkStore
from server.postgres.payload.loading import PayloadStore
from server.postgres.turns.accept import AcceptanceStore
from server.postgres.turns.leases import LeaseStore
from server.postgres.turns.queue import QueueStore
from server.postgres.turns.reading import TurnStore
from server.postgres.turns.running import RunningTurnStore


class PostgresStore(
    AssistantStore,
    ConversationStore,
    ForkStore,
    ErasureStore,
    AcceptanceStore,
    QueueStore,
    PayloadStore,
    RunningTurnStore,
    LeaseStore,
    TurnStore,
    EpochStore,
):
    """Implements `server.conversation.store.Store`."""

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        """Finish the turn, and cache its manifest for the comparison with the next payload."""
        finished = await super().finish_turn(lease, answer)
        conversation = decode_id(CONVERSATION, lease.conversation_id)
        if answer.start is not None and conversation is not None:
            self._row_cache.put_manifest(conversation, answer.start)
        return finished
