"""Replays on Postgres.

The idea: a replay is one row that is locked briefly by whoever claims an item, ends one, or wants to make a call, so
that limits hold over all processes without anybody counting twice. Items are leased like turns are, and what they write
lies in schema `replay`, see `replay_store`. Each method's statements and their reasons live in the module that it is
delegated to.
"""

from collections.abc import Mapping, Sequence
from uuid import UUID

from server.conversation.assistant import AssistantDefinition
from server.conversation.audit import Actor
from server.conversation.block import Block
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.page import Page
from server.conversation.store import ErasureReport
from server.postgres.engine import Database
from server.postgres.replay import answers as replay_answers
from server.postgres.replay import erasure as replay_erasing
from server.postgres.replay import estimates as replay_estimates
from server.postgres.replay import items as replay_items
from server.postgres.replay import results as replay_results
from server.postgres.replay import runs as replay_runs
from server.postgres.replay import selection as replay_selection
from server.postgres.replay import spending as replay_spending
from server.replay.rerun.replay import (
    CallEstimate,
    CallPermission,
    CallSpending,
    ClaimedItem,
    ItemLease,
    ItemState,
    OpenWork,
    Replay,
    ReplayDraft,
    ReplayEstimate,
    ReplayItem,
    ReplayLimits,
    Selection,
)
from server.replay.rerun.result import (
    AnswerPlace,
    CallPlace,
    Exchanged,
    Outcome,
    ResultFilter,
    StoredResult,
    TurnResult,
)

_EVERYTHING = ResultFilter()


class PostgresReplays:
    """Implements `server.replay.rerun.port.Replays`."""

    def __init__(self, database: Database, replay_store: Database) -> None:
        """`replay_store`: the same database as `make_replay_database` opens it."""
        self._database = database
        self._replay_store = replay_store

    async def select_conversations(self, tenant_id: str, selection: Selection) -> Sequence[str]:
        return await replay_selection.select_conversations(self._database, tenant_id, selection)

    async def estimate(self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str]) -> ReplayEstimate:
        return await replay_estimates.estimate(self._database, tenant_id, draft, conversation_ids)

    async def create_replay(
        self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str], *, actor: Actor
    ) -> Replay:
        return await replay_runs.create_replay(self._database, tenant_id, draft, conversation_ids, actor)

    async def load_replay(self, tenant_id: str | None, replay_id: str) -> Replay:
        return await replay_runs.load_replay(self._database, tenant_id, replay_id)

    async def list_replays(self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20) -> Page[Replay]:
        return await replay_runs.list_replays(self._database, tenant_id, cursor, limit)

    async def list_items(
        self,
        tenant_id: str | None,
        replay_id: str,
        *,
        state: ItemState | None = None,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[ReplayItem]:
        return await replay_items.list_items(self._database, tenant_id, replay_id, state, cursor, limit)

    async def load_item(self, tenant_id: str | None, replay_id: str, number: int) -> ReplayItem:
        return await replay_items.load_item(self._database, tenant_id, replay_id, number)

    async def list_results(
        self,
        tenant_id: str | None,
        replay_id: str,
        *,
        wanted: ResultFilter = _EVERYTHING,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[StoredResult]:
        return await replay_results.list_results(self._database, tenant_id, replay_id, wanted, cursor, limit)

    async def count_outcomes(
        self, tenant_id: str | None, replay_id: str, numbers: Sequence[int]
    ) -> Mapping[int, Mapping[Outcome, int]]:
        return await replay_results.count_outcomes(self._database, tenant_id, replay_id, numbers)

    async def load_answers(
        self, tenant_id: str | None, replay_id: str, places: Sequence[AnswerPlace]
    ) -> Mapping[AnswerPlace, Exchanged]:
        return await replay_answers.load_answers(self._database, tenant_id, replay_id, places)

    async def find_judge_calls(
        self, tenant_id: str | None, replay_id: str, number: int, places: Sequence[int]
    ) -> Mapping[int, CallPlace]:
        return await replay_answers.find_judge_calls(self._database, tenant_id, replay_id, number, places)

    async def pause_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        return await replay_runs.pause_replay(self._database, tenant_id, replay_id, actor)

    async def continue_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, limits: ReplayLimits | None = None
    ) -> Replay:
        return await replay_runs.continue_replay(self._database, tenant_id, replay_id, limits, actor)

    async def cancel_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        return await replay_runs.cancel_replay(self._database, tenant_id, replay_id, actor)

    async def erase_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, dry_run: bool = False
    ) -> ErasureReport:
        return await replay_erasing.erase_replay(self._database, tenant_id, replay_id, actor, dry_run=dry_run)

    async def claim_item(self, replay_id: str, *, owner: str, lease_seconds: float) -> ClaimedItem | None:
        return await replay_items.claim_item(self._database, replay_id, owner, lease_seconds)

    async def renew_lease(self, lease: ItemLease, *, lease_seconds: float) -> None:
        await replay_items.renew_lease(self._database, lease, lease_seconds)

    async def open_replay_conversation(
        self, lease: ItemLease, tenant_id: str, definition: AssistantDefinition, draft: ConversationDraft
    ) -> Conversation:
        return await replay_items.open_replay_conversation(self._replay_store, lease, tenant_id, definition, draft)

    async def reserve_call(
        self, lease: ItemLease, reservation: UUID, *, provider: str, estimate: CallEstimate
    ) -> CallPermission:
        return await replay_spending.reserve_call(self._database, lease, reservation, provider, estimate)

    async def settle_call(self, lease: ItemLease, reservation: UUID, spending: CallSpending) -> None:
        await replay_spending.settle_call(self._database, lease, reservation, spending)

    async def hold_back(self, provider: str, seconds: float) -> None:
        await replay_spending.hold_back(self._database, provider, seconds)

    async def record_result(self, lease: ItemLease, result: TurnResult, blocks: Sequence[Block]) -> None:
        await replay_results.record_result(self._database, lease, result, blocks)

    async def end_item(self, lease: ItemLease, state: ItemState, *, error_code: str | None = None) -> None:
        await replay_items.end_item(self._database, lease, state, error_code)

    async def release_item(self, lease: ItemLease) -> None:
        await replay_items.release_item(self._database, lease)

    async def end_abandoned_items(self) -> int:
        return await replay_items.end_abandoned_items(self._database)

    async def list_open_work(self, *, limit: int = 100) -> Sequence[OpenWork]:
        return await replay_items.list_open_work(self._database, limit)
