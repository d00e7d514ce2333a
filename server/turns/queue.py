"""Waiting for a conversation: first come, first served, over all processes.

The order is kept by tickets in the store. Within a process only the first in line knocks; the others keep their tickets
alive and wait until they are first. A ticket whose holder died lapses, and the next is served.
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
"""How often the first in line knocks when no news comes: a ticket before it may have lapsed."""

_log = logging.getLogger("strata.turn")


class TurnQueue:
    """Lets turns into busy conversations, one after the other."""

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
        """What `accept` gives when the turn's time has come.

        Raises `QueueFull`; `ConversationBusy` when it waited too long; `ShuttingDown`; and what `accept` raises.
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
        """Waits with a ticket; None where it has lapsed, as in a process that stood still for long."""
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
        """The ticket of a turn that was not accepted: accepting one takes its ticket with it."""
        try:
            await self._tools.store.leave_queue(conversation_id, ticket)
        except DatabaseUnavailable as error:
            # It lapses by itself, and what became of the turn is what its client has to hear.
            _log.warning("turn.ticket_not_returned", extra={"conversation_id": conversation_id, "code": error.code})

    async def _ask_to_stop(self, tenant_id: str, conversation_id: str) -> None:
        """Once, with the ticket in hand: nobody but a newer one that supersedes can come before it any more, and that
        one's turn is none of its business.
        """
        try:
            await self._tools.store.request_cancel(tenant_id, conversation_id)
        except TurnNotRunning:
            return
