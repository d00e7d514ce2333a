"""The replay port: where replays, their items and their results are kept, and who may do what next.

What every implementation promises:

- **Bound to a tenant.** With a tenant's id, replays of others do not exist. None means all tenants; whoever passes it
  has seen to it that the caller may see them all.
- **Fixed.** The items of a replay are written with it, in one transaction; later conversations are not its business.
- **One runner per item.** `claim_item` hands out a lease with a new token, and every write names it. After its time
  anybody may claim the item; from then on the old token is worth nothing, and whoever holds it is told `LeaseLost`.
- **Never beyond the limits.** Over all processes together: no more items run than `parallelism` says, no call is
  granted that could carry the spending over the budget, none earlier than the minute's share after the one before it,
  and none to a provider that has asked for patience.
- **Nothing is done twice.** What writes can be sent again after a lost answer and has the effect of one.
- **By the database's clock.**

A call of a process that died has no answer that anybody could read. It counts by its estimate from the moment in which
its item is claimed again, or another call would have to wait for it, and what it was for is asked once more: the only
case in which a provider may charge twice.

Every method raises `DatabaseUnavailable` when the database does not answer.
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
    AnswerPlace,
    CallPlace,
    Outcome,
    ResultFilter,
    StoredResult,
    TurnResult,
)


class Replays(Protocol):
    """See the module for what holds for all methods."""

    async def select_conversations(self, tenant_id: str, selection: Selection) -> Sequence[str]:
        """The ids that a selection stands for now, in its order.

        Raises `ConversationNotFound` for an id that is none of the tenant's, and `ValidationFailed` for a selection
        of nothing or of more than `CONVERSATION_LIMIT`.
        """
        ...

    async def estimate(self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str]) -> ReplayEstimate:
        """What it would come to. Nothing is written, nobody is asked.

        Raises `AssistantNotFound` for a candidate whose assistant, or version of it, is not there.
        """
        ...

    async def create_replay(
        self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str], *, actor: Actor
    ) -> Replay:
        """A running replay with all its items, audited. Raises `ConversationNotFound` where a source is gone."""
        ...

    async def load_replay(self, tenant_id: str | None, replay_id: str) -> Replay:
        """Raises `ReplayNotFound`."""
        ...

    async def list_replays(self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20) -> Page[Replay]:
        """Newest first. Raises `CursorInvalid`."""
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
        """By number. Raises `ReplayNotFound`, `CursorInvalid`."""
        ...

    async def load_item(self, tenant_id: str | None, replay_id: str, number: int) -> ReplayItem:
        """Raises `ReplayNotFound`, also for an item that there is not."""
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
        """How many answers of each of these items came out how. An item without results is left out."""
        ...

    async def load_answers(
        self, tenant_id: str | None, replay_id: str, places: Sequence[AnswerPlace]
    ) -> Mapping[AnswerPlace, AnswerBlocks]:
        """What was said in a page of results. Those that are not there, or were erased meanwhile, are left out."""
        ...

    async def find_judge_calls(
        self, tenant_id: str | None, replay_id: str, number: int, places: Sequence[int]
    ) -> Mapping[int, CallPlace]:
        """The calls of the replay conversation that asked the judge about these places of an item, as far as there are
        such.
        """
        ...

    async def report_replay(self, tenant_id: str | None, replay_id: str) -> ReplayReport:
        """Compute the numbers of the results that exist now. Raises `ReplayNotFound`."""
        ...

    async def pause_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        """No other call leaves. Pausing twice changes nothing. Raises `ReplayNotFound`, `ReplayEnded`."""
        ...

    async def continue_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, limits: ReplayLimits | None = None
    ) -> Replay:
        """Goes on after a pause, or with a larger budget after it was spent: then skipped items wait again.

        `limits` replaces the replay's, but for the repetitions, which are fixed. Raises `ReplayNotFound`,
        `ReplayEnded`, and `ValidationFailed` for a budget that is spent already.
        """
        ...

    async def cancel_replay(self, tenant_id: str | None, replay_id: str, *, actor: Actor) -> Replay:
        """Items that wait are cancelled now, those that run when their call is over.

        Cancelling twice changes nothing. Raises `ReplayNotFound`, `ReplayEnded` for one that is done.
        """
        ...

    async def erase_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, dry_run: bool = False
    ) -> ErasureReport:
        """The replay with its items, results and replay conversations, some replay conversations at a time; the replay
        itself goes last.

        Raises `ReplayNotFound`, `ReplayBusy` while it runs or an item of it does.
        """
        ...

    async def claim_item(self, replay_id: str, *, owner: str, lease_seconds: float) -> ClaimedItem | None:
        """The next item that nobody runs, those that were begun first.

        None where there is none, where enough run already, or where the replay does not run. A call that its last
        owner had open is lost and counts by its estimate.
        """
        ...

    async def renew_lease(self, lease: ItemLease, *, lease_seconds: float) -> None:
        """Moves the end on. Raises `LeaseLost`."""
        ...

    async def open_replay_conversation(
        self, lease: ItemLease, tenant_id: str, definition: AssistantDefinition, draft: ConversationDraft
    ) -> Conversation:
        """The item's replay conversation: a new one with an assistant of its own (`draft.assistant_id` is not read),
        or the one that is there. Its turns are written by a `Store` over the replay conversations. Raises `LeaseLost`.
        """
        ...

    async def reserve_call(
        self, lease: ItemLease, reservation: UUID, *, provider: str, estimate: CallEstimate
    ) -> CallPermission:
        """Whether the item's next call may leave now. An item has one call at a time.

        With `Granted` the estimate is set aside, and `settle_call` has to follow. Where the budget does not suffice,
        the replay stops, its waiting items are skipped, and this and every later answer is `Stopped`; as long as
        calls on their way may still turn out cheaper, it is `Wait`.

        Raises `LeaseLost`, and `PriceUnknown` for a call without a price where the budget is in money.
        """
        ...

    async def settle_call(self, lease: ItemLease, reservation: UUID, spending: CallSpending) -> None:
        """What the call came to, in place of its estimate; nothing for one that never left.

        One that was settled before, or has been counted as lost since, is left as it is. Raises `LeaseLost` where the
        replay was erased.
        """
        ...

    async def pause_provider(self, provider: str, seconds: float) -> None:
        """No call of any replay leaves for this provider for so long: it has asked for patience."""
        ...

    async def record_result(self, lease: ItemLease, result: TurnResult, blocks: Sequence[Block]) -> None:
        """Writes a result with the candidate's answer. A place that is taken stays as it is. Raises `LeaseLost`."""
        ...

    async def end_item(self, lease: ItemLease, state: ItemState, *, error_code: str | None = None) -> None:
        """The item is over; with the last one the replay is done. Raises `LeaseLost`."""
        ...

    async def release_item(self, lease: ItemLease) -> None:
        """Gives the item back, to be gone on with by whoever claims it. In a replay that was cancelled or stopped by
        its budget the item ends. Raises `LeaseLost`.
        """
        ...

    async def end_abandoned_items(self) -> int:
        """Ends the items of cancelled and stopped replays whose owners died. How many."""
        ...

    async def list_open_work(self, *, limit: int = 100) -> Sequence[OpenWork]:
        """Running replays, of all tenants, with items that could be claimed now."""
        ...
