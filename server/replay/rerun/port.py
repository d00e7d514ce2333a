"""The replay port: stores replays, items and results, and decides which item runs and which call is sent next.

What every implementation guarantees:

- **Tenants are separate.** With a tenant's id, replays of other tenants do not exist. None means all tenants; the
  caller must have checked that this is allowed.
- **Items are fixed.** They are written together with the replay, in one transaction.
- **One owner per item.** `claim_item` returns a lease with a new token, and every write names it. After the lease has
  expired, any process may claim the item; the old token then raises `LeaseLost`.
- **Limits hold over all processes.** At most `parallelism` items run. No call is granted that could exceed the budget,
  none before the interval of `calls_per_minute` has passed, and none to a provider that is paused.
- **Writes are idempotent.** A write that is repeated after a lost response has the effect of one.
- **The database's clock** decides about leases and intervals.

The answer of a call whose process died is lost. The call counts by its estimate as soon as its item is claimed again,
or as soon as another call would have to wait for it, and is sent again. This is the only case in which a provider may
charge twice.

Every method raises `DatabaseUnavailable` if the database does not answer.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import UUID

from server.conversation.assistant import AssistantDefinition
from server.conversation.audit import Actor
from server.conversation.block import Block
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.page import Page
from server.conversation.store import ErasureReport
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
from server.replay.rerun.report import ReplayReport
from server.replay.rerun.result import (
    AnswerBlocks,
    AnswerPosition,
    CallPosition,
    Outcome,
    ResultFilter,
    StoredResult,
    TurnResult,
)


class Replays(Protocol):
    """See the module for guarantees of all methods. Implemented in `server.postgres.replay`, above this room."""

    async def select_conversations(self, tenant_id: str, selection: Selection) -> Sequence[str]:
        """Return the ids that a selection matches now, in its order.

        Raises `ConversationNotFound` for an id that is not the tenant's, and `ValidationFailed` for an empty selection
        or one of more than `CONVERSATION_LIMIT`.
        """
        ...

    async def estimate(self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str]) -> ReplayEstimate:
        """Estimate the size and the cost of a replay. Nothing is written, and no provider is called.

        Raises `AssistantNotFound` if the candidate's assistant, or its version, does not exist.
        """
        ...

    async def create_replay(
        self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str], *, actor: Actor
    ) -> Replay:
        """Create a running replay with all its items, audited. Raises `ConversationNotFound` for a missing source."""
        ...

    async def load_replay(self, tenant_id: str | None, replay_id: str) -> Replay:
        """Raises `ReplayNotFound`."""
        ...

    async def list_replays(self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20) -> Page[Replay]:
        """List replays, newest first. Raises `CursorInvalid`."""
        ...

    async def list_items(
        self,
        tenant_id: str | None,
        replay_id: str,
        *,
        state: ItemState | None = None,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[ReplayItem]:
        """List items by number. Raises `ReplayNotFound`, `CursorInvalid`."""
        ...

    async def load_item(self, tenant_id: str | None, replay_id: str, number: int) -> ReplayItem:
        """Raises `ReplayNotFound`, also if the item does not exist."""
        ...

    async def list_results(
        self,
        tenant_id: str | None,
        replay_id: str,
        *,
        wanted: ResultFilter = ResultFilter(),  # noqa: B008  reason: frozen
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[StoredResult]:
        """Raises `ReplayNotFound`, `CursorInvalid`."""
        ...

    async def count_outcomes(
        self, tenant_id: str | None, replay_id: str, numbers: Sequence[int]
    ) -> Mapping[int, Mapping[Outcome, int]]:
        """Count the results of each item by outcome. Items without results are left out."""
        ...

    async def load_answers(
        self, tenant_id: str | None, replay_id: str, positions: Sequence[AnswerPosition]
    ) -> Mapping[AnswerPosition, AnswerBlocks]:
        """Load the answers of a page of results. Results that do not exist, or were erased, are left out."""
        ...

    async def find_judge_calls(
        self, tenant_id: str | None, replay_id: str, number: int, positions: Sequence[int]
    ) -> Mapping[int, CallPosition]:
        """Return the judge's calls for these positions of an item. Positions without one are left out."""
        ...

    async def report_replay(self, tenant_id: str | None, replay_id: str) -> ReplayReport:
        """Compute the numbers of the results that exist now. Raises `ReplayNotFound`."""
        ...

    async def pause_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        """Grant no further call. Pausing twice changes nothing. Raises `ReplayNotFound`, `ReplayEnded`."""
        ...

    async def continue_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, limits: ReplayLimits | None = None
    ) -> Replay:
        """Continue a paused replay, or with a larger budget one that was stopped: skipped items then wait again.

        `limits` replaces the replay's limits, except for the repetitions. Raises `ReplayNotFound`, `ReplayEnded`, and
        `ValidationFailed` for a budget that is already spent.
        """
        ...

    async def cancel_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        """Cancel waiting items now, and running items when their call has ended.

        Cancelling twice changes nothing. Raises `ReplayNotFound`, and `ReplayEnded` if the replay is done.
        """
        ...

    async def erase_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, dry_run: bool = False
    ) -> ErasureReport:
        """Erase a replay with its items, results and replay conversations, in batches; the replay itself is last.

        Raises `ReplayNotFound`, and `ReplayBusy` while the replay or one of its items runs.
        """
        ...

    async def claim_item(self, replay_id: str, *, owner: str, lease_seconds: float) -> ClaimedItem | None:
        """Claim the next item without a living owner; started items come first.

        Returns None if there is none, if `parallelism` items run, or if the replay does not run. An open call of the
        last owner is lost and counts by its estimate.
        """
        ...

    async def renew_lease(self, lease: ItemLease, *, lease_seconds: float) -> None:
        """Extend the lease. Raises `LeaseLost`."""
        ...

    async def open_replay_conversation(
        self, lease: ItemLease, tenant_id: str, definition: AssistantDefinition, draft: ConversationDraft
    ) -> Conversation:
        """Return the item's replay conversation, or create it with an assistant of its own.

        `draft.assistant_id` is ignored. Turns are written by a `Store` over the replay conversations. Raises
        `LeaseLost`.
        """
        ...

    async def reserve_call(
        self, lease: ItemLease, reservation: UUID, *, provider: str, estimate: CallEstimate
    ) -> CallPermission:
        """Decide whether the item's next call may be sent now. An item has one call at a time.

        `Granted` reserves the estimate, and `settle_call` must follow. If the budget does not suffice, the result is
        `Wait` while open calls may still cost less than their estimates. Otherwise the replay stops, its waiting items
        are skipped, and this and every later result is `Stopped`.

        Raises `LeaseLost`, and `PriceUnknown` for a call without a price if the budget is in dollars.
        """
        ...

    async def settle_call(self, lease: ItemLease, reservation: UUID, spending: CallSpending) -> None:
        """Replace the estimate of a call with its cost; 0 if it was not sent.

        A call that is already settled or counted as lost is not changed. Raises `LeaseLost` if the replay was erased.
        """
        ...

    async def pause_provider(self, provider: str, seconds: float) -> None:
        """Grant no call of any replay to this provider for this time, after it has limited the rate."""
        ...

    async def record_result(self, lease: ItemLease, result: TurnResult, blocks: Sequence[Block]) -> None:
        """Store a result with the candidate's answer. An existing result is not changed. Raises `LeaseLost`."""
        ...

    async def end_item(self, lease: ItemLease, state: ItemState, *, error_code: str | None = None) -> None:
        """End the item; with the last one, the replay is done. Raises `LeaseLost`."""
        ...

    async def release_item(self, lease: ItemLease) -> None:
        """Release the item, so that another process can claim it. If the replay was cancelled or stopped, the item
        ends. Raises `LeaseLost`.
        """
        ...

    async def end_abandoned_items(self) -> int:
        """End the items of cancelled and stopped replays whose owners died, and return their number."""
        ...

    async def list_open_work(self, *, limit: int = 100) -> Sequence[OpenWork]:
        """List running replays of all tenants with items that can be claimed now."""
        ...
