"""The queue of turns that wait for a busy conversation: first in, first out, over all processes.

Tickets in the store determine the order. Within a process, only the turn with the lowest ticket tries to be accepted;
the others renew their tickets and wait. The ticket of a process that died expires, and the next one is accepted.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from server.conversation.conversation import OnBusy
from server.conversation.errors import ConversationBusy, DatabaseUnavailable, ShuttingDown, TurnNotRunning
from server.conversation.notifications import Notification
from server.conversation.store import Accepted, AcceptOutcome, NewInput
from server.turns.running import RunningTurns
from server.turns.tools import TurnTools

_TICKET_SECONDS: Final = 15.0
_KEEP_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
"""How often the first turn tries again without a notification, because a ticket before it may have expired."""

_log = logging.getLogger("strata.turn")


class TurnQueue:
    """Makes turns wait until their conversation is free, and accepts them one by one."""

    def __init__(self, tools: TurnTools, running_turns: RunningTurns) -> None:
        self._tools = tools
        self._running_turns = running_turns
        self._lines: defaultdict[str, list[int]] = defaultdict(list)

    async def wait_in(
        self,
        tenant_id: str,
        turn: NewInput,
        on_busy: OnBusy,
        accept: Callable[[NewInput], Awaitable[AcceptOutcome]],
    ) -> AcceptOutcome:
        """Wait until the conversation is free for this turn, and return what `accept` returns.

        Raises `QueueFull`, `ConversationBusy` if it waited too long, `ShuttingDown`, and what `accept` raises.
        """
        first = on_busy is OnBusy.SUPERSEDE
        deadline = time.monotonic() + self._tools.limits.queue_seconds
        ticket = await self._draw(tenant_id, turn.conversation_id, first=first)
        if first:
            await self._ask_to_stop(tenant_id, turn.conversation_id)
        while True:
            outcome = await self._hold(replace(turn, ticket=ticket), ticket, accept, deadline)
            if outcome is not None:
                return outcome
            ticket = await self._draw(tenant_id, turn.conversation_id, first=first)

    async def _draw(self, tenant_id: str, conversation_id: str, *, first: bool) -> int:
        limit = self._tools.limits.queue_limit
        return await self._tools.store.enter_queue(
            tenant_id, conversation_id, limit=limit, seconds=_TICKET_SECONDS, first=first
        )

    async def _hold(
        self,
        turn: NewInput,
        ticket: int,
        accept: Callable[[NewInput], Awaitable[AcceptOutcome]],
        deadline: float,
    ) -> AcceptOutcome | None:
        """Wait with a ticket. None if the ticket has expired, for example because the process was suspended."""
        line = self._lines[turn.conversation_id]
        line.append(ticket)
        outcome: AcceptOutcome | None = None
        try:
            outcome = await self._wait(turn, ticket, accept, deadline)
        finally:
            line.remove(ticket)
            if not line:
                del self._lines[turn.conversation_id]
            if not isinstance(outcome, Accepted):
                await self._give_back(turn.conversation_id, ticket)
        return outcome

    async def _wait(
        self,
        turn: NewInput,
        ticket: int,
        accept: Callable[[NewInput], Awaitable[AcceptOutcome]],
        deadline: float,
    ) -> AcceptOutcome | None:
        kept_at = time.monotonic()
        with self._tools.notifications.watch(turn.conversation_id, Notification.ENDED) as watch:
            while True:
                if self._running_turns.draining:
                    raise ShuttingDown
                if ticket == min(self._lines[turn.conversation_id]):
                    try:
                        return await accept(turn)
                    except ConversationBusy:
                        if time.monotonic() >= deadline:
                            raise
                if time.monotonic() >= deadline:
                    raise ConversationBusy("The conversation did not become free in time.")
                await watch.wait(_LOOK_SECONDS)
                if time.monotonic() - kept_at >= _KEEP_SECONDS:
                    if not await self._keep(turn.conversation_id, ticket):
                        return None
                    kept_at = time.monotonic()

    async def _keep(self, conversation_id: str, ticket: int) -> bool:
        return await self._tools.store.renew_ticket(conversation_id, ticket, seconds=_TICKET_SECONDS)

    async def _give_back(self, conversation_id: str, ticket: int) -> None:
        """Delete the ticket of a turn that was not accepted. Accepting a turn deletes its ticket."""
        try:
            await self._tools.store.leave_queue(conversation_id, ticket)
        except DatabaseUnavailable as error:
            # It expires, and the client has to get the outcome of its turn and not this error.
            _log.warning("turn.ticket_not_returned", extra={"conversation_id": conversation_id, "code": error.code})

    async def _ask_to_stop(self, tenant_id: str, conversation_id: str) -> None:
        """Request the cancellation of the running turn, once. After the ticket has been issued, only a newer turn that
        also supersedes can be accepted before this one, and that turn must not be cancelled.
        """
        try:
            await self._tools.store.request_cancel(tenant_id, conversation_id)
        except TurnNotRunning:
            return
