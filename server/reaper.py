"""The reaper ends turns whose process has died.

A lease that runs out says that nobody writes for the turn any more. Whoever notices takes it over and writes down what
had arrived: the bytes that the dead process had flushed, folded as it would have folded them. Nothing is asked of the
provider again. An answer that had arrived to its last byte is whole, and counts as such.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final
from uuid import uuid4

from server.cache_expectation import CacheExpectation, explain_miss
from server.call import Call, CallEnd
from server.call_records import add_costs, cost_of
from server.conversation import Lease
from server.errors import ConversationNotFound, DatabaseUnavailable, LeaseLost, ProviderFailed, TurnInterrupted
from server.provider import ProviderAnswer
from server.store import NewAnswer
from server.stored_turn import fold_events
from server.turn import Native, StopReason, TurnState, open_call_ids
from server.turn_tools import TurnTools
from server.usage import Usage, add_usages

_OK: Final = 200
_log = logging.getLogger("strata.turn")


class Reaper:
    """Ends what the dead have left."""

    def __init__(self, tools: TurnTools) -> None:
        self._tools = tools

    async def watch(self) -> None:
        """Looks for expired leases until it is cancelled: at once, and then often enough for nobody to wait long."""
        while True:
            try:
                while await self.reap():
                    pass
            except DatabaseUnavailable as error:
                _log.warning("reaper.look_failed", extra={"code": error.code})
            # The boundary of a task that nobody awaits. If it ended here, no dead process's turn would be ended again.
            except Exception:  # noqa: BLE001  reason: logged with its traceback, and the next look comes
                _log.exception("reaper.crashed")
            await asyncio.sleep(self._tools.limits.lease_seconds / 4)

    async def reap(self, conversation_id: str | None = None) -> int:
        """Ends the turns whose leases have run out, of one conversation or of all. How many were ended here."""
        expired = await self._tools.store.list_expired_leases(conversation_id=conversation_id)
        ended = [await self._reap_one(tenant_id, lease) for tenant_id, lease in expired]
        return sum(ended)

    async def _reap_one(self, tenant_id: str, lease: Lease) -> bool:
        tools = self._tools
        try:
            mine = await tools.store.take_over_lease(
                lease, token=uuid4(), owner=tools.owner, lease_seconds=tools.limits.lease_seconds
            )
            conversation = await tools.store.load_conversation(tenant_id, lease.conversation_id)
            answer = await self._build_answer(tenant_id, mine)
            await tools.store.finish_turn(mine, answer)
        except (LeaseLost, ConversationNotFound):
            # Somebody else was quicker, or it was erased.
            return False
        _log.warning(
            "turn.reaped",
            extra={
                "conversation_id": lease.conversation_id,
                "turn_seq": lease.turn_seq,
                "owner": lease.owner,
                "state": answer.state.value,
            },
        )
        if answer.start is not None and answer.end is not None:
            tools.observer.call_ended(mine, answer.start, answer.end, assistant_id=conversation.assistant_id)
        tools.observer.turn_reaped(mine)
        return True

    async def _build_answer(self, tenant_id: str, lease: Lease) -> NewAnswer:
        calls = await self._tools.store.list_calls(tenant_id, lease.conversation_id, lease.turn_seq)
        if not calls:
            return await self._build_answer_without_call(tenant_id, lease)
        call = calls[-1]
        body = await self._collect_body(tenant_id, lease, calls)
        answer, complete = self._fold(call, body)
        code = None if complete else TurnInterrupted.code
        end = CallEnd(
            ended_at=datetime.now(UTC),
            first_byte_at=None,
            status=_OK if body else None,
            raw_response=body,
            usage=answer.usage,
            usage_reported=answer.usage_reported,
            response_id=answer.response_id,
            cache_miss_reason=explain_miss(_expectation_of(call), answer.usage, answer.cache_miss_reason),
            cost_usd=cost_of(call.start.model, call.start.started_at, answer),
            error_code=code,
        )
        if call.end is not None:
            end = replace(call.end, error_code=call.end.error_code or code)
        ends = [*(earlier.end for earlier in calls[:-1] if earlier.end is not None), end]
        return NewAnswer(
            blocks=answer.blocks,
            native=answer.native or Native(dialect=call.start.provider, data=b""),
            state=TurnState.COMPLETE if complete else TurnState.INTERRUPTED,
            stop_reason=answer.stop_reason if complete else StopReason.ABORTED,
            error_code=code,
            usage=add_usages([end.usage for end in ends]),
            cost_usd=add_costs([end.cost_usd for end in ends]),
            pending_call_ids=open_call_ids(answer.blocks) if complete else (),
            provider=call.start.provider,
            model=call.start.model,
            account=call.start.account,
            start=call.start,
            end=end,
        )

    async def _collect_body(self, tenant_id: str, lease: Lease, calls: Sequence[Call]) -> bytes:
        """The bytes of the last call: flushed pieces without a gap, or, where it had ended, nothing to add."""
        call = calls[-1]
        if call.end is not None:
            return b""
        chunks = await self._tools.store.list_chunks(
            tenant_id, lease.conversation_id, lease.turn_seq, attempt=call.start.attempt
        )
        body = b""
        for chunk in chunks:
            if chunk.attempt == call.start.attempt and chunk.offset == len(body):
                body += chunk.data
        return body

    def _fold(self, call: Call, body: bytes) -> tuple[ProviderAnswer, bool]:
        """What the bytes say, and whether they are all."""
        open_fold = self._tools.folds.get(call.start.provider)
        if open_fold is None or not body:
            return ProviderAnswer(), False
        fold = open_fold()
        _, readable = fold_events(fold, body)
        if not readable:
            return fold.answer, False
        try:
            fold.finish()
        except ProviderFailed:
            return fold.answer, False
        return fold.answer, True

    async def _build_answer_without_call(self, tenant_id: str, lease: Lease) -> NewAnswer:
        """The process died before it could say that it asked anybody."""
        store = self._tools.store
        conversation = await store.load_conversation(tenant_id, lease.conversation_id)
        assistant = await store.load_assistant(tenant_id, conversation.assistant_id, conversation.assistant_version)
        return NewAnswer(
            blocks=(),
            native=Native(dialect=assistant.definition.provider, data=b""),
            state=TurnState.INTERRUPTED,
            stop_reason=StopReason.ABORTED,
            error_code=TurnInterrupted.code,
            usage=Usage(),
            cost_usd=Decimal(0),
            provider=assistant.definition.provider,
            model=assistant.definition.model,
            account=None,
            start=None,
            end=None,
        )


def _expectation_of(call: Call) -> CacheExpectation:
    """As far as it was written down: what could have come beside it, and why it would not, nobody knows any more."""
    expected = call.start.cache_expected_tokens
    return CacheExpectation(tokens=expected, possible_tokens=expected or 0)
