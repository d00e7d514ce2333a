"""What operators do to conversations, each with a row in the audit log: done, or refused and why.

Thin over what exists. The row is written when the action has ended, in a transaction of its own: where it cannot be
written, the error of the log is raised, and the action is done all the same. What changes nothing, a dry run or a
compaction that does not pay, leaves no row.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.audit import Action, Actor, AuditDraft, AuditLog, Outcome
from server.conversation.conversation import Conversation
from server.conversation.errors import StrataError
from server.conversation.store import ErasureReport, Store
from server.turns.handle import TurnHandle
from server.turns.service import TurnService


class Archives(Protocol):
    """Conversations as files."""

    def export_conversation(self, tenant_id: str, conversation_id: str) -> AsyncIterator[bytes]:
        """The lines of an archive of one conversation, a few of them at a time.

        Holds neither a connection nor a transaction between them: what was written once never changes. Raises
        `ConversationNotFound`, also in the middle, when it is erased meanwhile, and `ConversationBusy` before the
        first line while a turn runs: what has not ended cannot be told.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Who acts, and on whose conversations."""

    tenant_id: str
    actor: Actor


@dataclass(slots=True, kw_only=True)
class Telling:
    """What the row of an action is going to say."""

    facts: dict[str, object] = field(default_factory=dict)
    is_worth_a_row: bool = True
    """False: nothing has changed. A failure is told all the same."""


@asynccontextmanager
async def audited(
    audit_log: AuditLog, operator: Operator, action: Action, conversation_id: str, **facts: object
) -> AsyncIterator[Telling]:
    """Writes the row when the block ends: done with the facts that the block has added, or failed with the code."""

    def draft(outcome: Outcome) -> AuditDraft:
        return AuditDraft(
            tenant_id=operator.tenant_id,
            actor=operator.actor,
            action=action,
            object_id=conversation_id,
            details=telling.facts,
            outcome=outcome,
        )

    telling = Telling(facts=dict(facts))
    try:
        yield telling
    except StrataError as error:
        telling.facts["code"] = error.code
        await audit_log.append(draft(Outcome.FAILED))
        raise
    if telling.is_worth_a_row:
        await audit_log.append(draft(Outcome.DONE))


class AuditedCompactor:
    """The compactor in the hands of an operator."""

    __slots__ = ("_audit_log", "_compactor")

    def __init__(self, compactor: Compactor, audit_log: AuditLog) -> None:
        self._compactor = compactor
        self._audit_log = audit_log

    async def compact(
        self, operator: Operator, conversation_id: str, *, force: bool = False, dry_run: bool = False
    ) -> CompactionReport:
        """See `Compactor.compact`."""
        if dry_run:
            return await self._compactor.compact(operator.tenant_id, conversation_id, force=force, dry_run=True)
        async with audited(self._audit_log, operator, Action.COMPACT, conversation_id, force=force) as telling:
            report = await self._compactor.compact(operator.tenant_id, conversation_id, force=force)
            _tell(telling, report)
        return report

    async def undo(self, operator: Operator, conversation_id: str) -> CompactionReport:
        """See `Compactor.undo`."""
        async with audited(self._audit_log, operator, Action.UNDO_COMPACTION, conversation_id) as telling:
            report = await self._compactor.undo(operator.tenant_id, conversation_id)
            _tell(telling, report)
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTools:
    """What the actions are made of."""

    store: Store
    turn_service: TurnService
    compactor: Compactor
    archives: Archives
    audit_log: AuditLog


class AdminActions:
    """The actions. Each raises what it stands on raises, after the log has its row."""

    __slots__ = ("_compactor", "_tools")

    def __init__(self, tools: ActionTools) -> None:
        self._tools = tools
        self._compactor = AuditedCompactor(tools.compactor, tools.audit_log)

    async def fork(self, operator: Operator, conversation_id: str, at_seq: int) -> Conversation:
        """See `Store.fork_conversation`."""
        async with audited(self._tools.audit_log, operator, Action.FORK, conversation_id, at_seq=at_seq) as telling:
            made = await self._tools.store.fork_conversation(operator.tenant_id, conversation_id, at_seq)
            telling.facts["made"] = made.id
        return made

    async def cancel(self, operator: Operator, conversation_id: str, turn_seq: int | None = None) -> TurnHandle:
        """See `TurnService.cancel_turn`. The log tells that it was asked for."""
        async with audited(self._tools.audit_log, operator, Action.CANCEL, conversation_id) as telling:
            handle = await self._tools.turn_service.cancel_turn(operator.tenant_id, conversation_id, turn_seq)
            telling.facts["seq"] = handle.seq
        return handle

    async def compact(
        self, operator: Operator, conversation_id: str, *, force: bool = False, dry_run: bool = False
    ) -> CompactionReport:
        """See `Compactor.compact`."""
        return await self._compactor.compact(operator, conversation_id, force=force, dry_run=dry_run)

    async def undo_compaction(self, operator: Operator, conversation_id: str) -> CompactionReport:
        """See `Compactor.undo`."""
        return await self._compactor.undo(operator, conversation_id)

    async def erase(self, operator: Operator, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        """See `Store.erase_conversation`. The log keeps how many rows went, and nothing of what they said."""
        store = self._tools.store
        if dry_run:
            return await store.erase_conversation(operator.tenant_id, conversation_id, dry_run=True)
        async with audited(self._tools.audit_log, operator, Action.ERASE, conversation_id) as telling:
            report = await store.erase_conversation(operator.tenant_id, conversation_id)
            telling.facts["rows"] = dict(report.rows)
        return report

    async def export(self, operator: Operator, conversation_id: str) -> AsyncIterator[bytes]:
        """See `Archives.export_conversation`. The row is there before the first line leaves."""
        async with audited(self._tools.audit_log, operator, Action.EXPORT, conversation_id):
            lines = self._tools.archives.export_conversation(operator.tenant_id, conversation_id)
            first = await anext(lines)
        yield first
        async for line in lines:
            yield line


def _tell(telling: Telling, report: CompactionReport) -> None:
    telling.facts.update(outcome=report.outcome.value, reason=report.reason, epoch=report.epoch)
    telling.is_worth_a_row = report.outcome is not CompactionOutcome.UNCHANGED
