"""Actions on a conversation: fork, cancel, compact, undo a compaction, erase, export.

Clients and operators use the same actions. Those of operators are audited: each writes one row into the audit log, with
its result or with the code of its error. The row is written when the action has ended, in its own transaction. If that
fails, the error of the audit log is raised although the action was carried out. A dry run and a compaction that changes
nothing leave no row.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.audit import Action, Actor, AuditDraft, AuditLog, Outcome
from server.conversation.conversation import Conversation
from server.conversation.errors import StrataError
from server.conversation.event import TurnEnded
from server.conversation.store import ErasureReport, Store
from server.turns.service import TurnService

_CANCEL_SECONDS: Final = 10.0


class Archives(Protocol):
    """Conversations as files."""

    def export_conversation(self, tenant_id: str, conversation_id: str) -> AsyncIterator[bytes]:
        """Yield the lines of an archive of one conversation, a few at a time.

        No connection or transaction is held between them. Raises `ConversationNotFound`, also between two lines if the
        conversation is erased meanwhile, and `ConversationBusy` before the first line while a turn is running.
        """
        ...


@dataclass(slots=True)
class AuditNote:
    """The part of an audit row that is only known when the action has ended."""

    details: dict[str, object]
    has_effect: bool = True
    """False: nothing was changed, and no row is written. An error is recorded in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Audit rows of one actor's actions on the data of one tenant."""

    log: AuditLog
    tenant_id: str
    actor: Actor

    @asynccontextmanager
    async def record(self, action: Action, object_id: str, **details: object) -> AsyncIterator[AuditNote]:
        """Write a row when the block ends: `done` with the details of the note, or `failed` with the error's code."""
        note = AuditNote(dict(details))
        try:
            yield note
        except StrataError as error:
            note.details["code"] = error.code
            await self._append(action, object_id, note, Outcome.FAILED)
            raise
        if note.has_effect:
            await self._append(action, object_id, note, Outcome.DONE)

    async def _append(self, action: Action, object_id: str, note: AuditNote, outcome: Outcome) -> None:
        await self.log.append(
            AuditDraft(
                tenant_id=self.tenant_id,
                actor=self.actor,
                action=action,
                object_id=object_id,
                details=note.details,
                outcome=outcome,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionActions:
    """The actions that need only a compactor, for the conversations of one tenant."""

    tenant_id: str
    audit: Audit | None
    """None: the actions of a client, which are not audited."""
    compactor: Compactor

    async def compact(self, conversation_id: str, *, force: bool = False, dry_run: bool = False) -> CompactionReport:
        """See `Compactor.compact`."""
        if dry_run:
            return await self.compactor.compact(self.tenant_id, conversation_id, force=force, dry_run=True)
        async with self._audited(Action.COMPACT, conversation_id, force=force) as note:
            report = await self.compactor.compact(self.tenant_id, conversation_id, force=force)
            _note_report(note, report)
        return report

    async def undo_compaction(self, conversation_id: str) -> CompactionReport:
        """See `Compactor.undo`."""
        async with self._audited(Action.UNDO_COMPACTION, conversation_id) as note:
            report = await self.compactor.undo(self.tenant_id, conversation_id)
            _note_report(note, report)
        return report

    @asynccontextmanager
    async def _audited(self, action: Action, conversation_id: str, **details: object) -> AsyncIterator[AuditNote]:
        if self.audit is None:
            yield AuditNote({})
            return
        async with self.audit.record(action, conversation_id, **details) as note:
            yield note


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledTurn:
    """A turn for which cancellation was requested."""

    seq: int
    ended: TurnEnded | None
    """None: the turn is still running after ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationActions(CompactionActions):
    """All actions, for the conversations of one tenant."""

    store: Store
    turn_service: TurnService
    archives: Archives

    async def fork(self, conversation_id: str, at_seq: int) -> Conversation:
        """See `Store.fork_conversation`. The result includes the arguments of pending tool calls."""
        async with self._audited(Action.FORK, conversation_id, at_seq=at_seq) as note:
            fork = await self.store.fork_conversation(self.tenant_id, conversation_id, at_seq)
            note.details["made"] = fork.id
        return await self.store.load_conversation(self.tenant_id, fork.id) if fork.pending_call_ids else fork

    async def cancel(self, conversation_id: str, turn_seq: int | None = None) -> CancelledTurn:
        """See `TurnService.cancel_turn`. Waits up to ten seconds for the turn to end, after the row was written."""
        async with self._audited(Action.CANCEL, conversation_id) as note:
            handle = await self.turn_service.cancel_turn(self.tenant_id, conversation_id, turn_seq)
            note.details["seq"] = handle.seq
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                return CancelledTurn(seq=handle.seq, ended=await handle.wait())
        except TimeoutError:
            return CancelledTurn(seq=handle.seq, ended=None)

    async def erase(self, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        """See `Store.erase_conversation`. The audit row has the number of erased rows and no content."""
        if dry_run:
            return await self.store.erase_conversation(self.tenant_id, conversation_id, dry_run=True)
        async with self._audited(Action.ERASE, conversation_id) as note:
            report = await self.store.erase_conversation(self.tenant_id, conversation_id)
            note.details["rows"] = dict(report.rows)
        return report

    async def export(self, conversation_id: str) -> AsyncIterator[bytes]:
        """See `Archives.export_conversation`. The audit row is written before the first line is returned."""
        async with self._audited(Action.EXPORT, conversation_id):
            lines = self.archives.export_conversation(self.tenant_id, conversation_id)
            first = await anext(lines)
        yield first
        async for line in lines:
            yield line


def _note_report(note: AuditNote, report: CompactionReport) -> None:
    note.details.update(outcome=report.outcome.value, reason=report.reason, epoch=report.epoch)
    note.has_effect = report.outcome is not CompactionOutcome.UNCHANGED
