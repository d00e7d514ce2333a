"""Builders for tests of the replay store; no provider is called."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import uuid4

from server.conversation.api_key import Tenant
from server.conversation.audit import OPERATOR
from server.conversation.block import TextBlock
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.turn import StopReason
from server.conversation.usage import Usage
from server.postgres.engine import Database
from server.postgres.replay.replays import PostgresReplays
from server.postgres.store import PostgresStore
from server.replay.rerun.replay import (
    CallEstimate,
    CallPermission,
    ClaimedItem,
    ItemLease,
    Replay,
    ReplayDraft,
    ReplayLimits,
    Selection,
)
from server.replay.rerun.result import AnswerFacts, Outcome, TurnResult
from tests.support.builders import create_conversation, definition, take_exchange

A_CALL = CallEstimate(usd=Decimal("0.10"), tokens=100)


def draft(**changes: Any) -> ReplayDraft:
    """A draft that names its conversations; `limits` as a mapping changes the usual ones."""
    values: dict[str, Any] = {"name": "nightly", "selection": Selection(conversation_ids=("conv_x",))}
    limits = changes.pop("limits", {})
    return ReplayDraft(**values | {"limits": ReplayLimits(**limits)} | changes)


def result(position: int = 1, **changes: Any) -> TurnResult:
    values: dict[str, Any] = {
        "position": position,
        "source_seq": 2 * position,
        "replay_seq": 2 * position,
        "attempt": 1,
        "outcome": Outcome.SAME,
        "similarity": 1.0,
        "recorded": AnswerFacts(stop_reason=StopReason.END_TURN, usage=Usage(output_tokens=3), latency_ms=900),
        "candidate": AnswerFacts(
            stop_reason=StopReason.END_TURN,
            usage=Usage(fresh_input_tokens=1, cache_read_tokens=3, output_tokens=4),
            cost_usd=Decimal("0.0001"),
            latency_ms=800,
            first_byte_ms=90,
        ),
    }
    return TurnResult(**values | changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayHarness:
    """Replays of one tenant over live conversations and replay conversations."""

    database: Database
    replay_store: Database
    store: PostgresStore
    replays: PostgresReplays
    tenant: Tenant

    async def record(self, count: int = 1) -> list[str]:
        """Store this many conversations of one exchange."""
        ids = []
        for _ in range(count):
            conversation = await create_conversation(self.store, self.tenant.id)
            await take_exchange(self.store, self.tenant.id, conversation.id)
            ids.append(conversation.id)
        return ids

    async def begin(self, source_count: int = 1, *, ids: Sequence[str] | None = None, **limits: Any) -> Replay:
        """Create a replay of this many conversations."""
        chosen = await self.record(source_count) if ids is None else ids
        return await self.replays.create_replay(self.tenant.id, draft(limits=limits), chosen, actor=OPERATOR)

    async def claim(self, replay: Replay, *, owner: str = "here", lease_seconds: float = 60) -> ClaimedItem:
        """Claim an item, which must exist."""
        claimed = await self.find(replay, owner=owner, lease_seconds=lease_seconds)
        assert claimed is not None
        return claimed

    async def find(self, replay: Replay, *, owner: str = "here", lease_seconds: float = 60) -> ClaimedItem | None:
        return await self.replays.claim_item(replay.id, owner=owner, lease_seconds=lease_seconds)

    async def load(self, replay: Replay) -> Replay:
        return await self.replays.load_replay(self.tenant.id, replay.id)

    async def reserve(
        self, lease: ItemLease, estimate: CallEstimate = A_CALL, *, provider: str = "gemini"
    ) -> CallPermission:
        return await self.replays.reserve_call(lease, uuid4(), provider=provider, estimate=estimate)

    async def replay_conversation(self, lease: ItemLease, text: str = "Hello") -> Conversation:
        """Open the replay conversation of the item, with one exchange in it."""
        draft = ConversationDraft(assistant_id="")
        replay_conversation = await self.replays.open_replay_conversation(
            lease, self.tenant.id, definition(name="candidate"), draft
        )
        await take_exchange(PostgresStore(self.replay_store), self.tenant.id, replay_conversation.id, text)
        await self.replays.record_result(lease, result(), [TextBlock(text=text)])
        return replay_conversation
