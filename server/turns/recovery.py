"""Recovery of turns whose process has died.

An expired lease means that no process writes the turn any more. The process that finds it takes over the lease and
stores the end of the turn: the bytes that the dead process had checkpointed, folded as that process would have folded
them. The provider is not called again. If all bytes of the answer had arrived, the turn is complete.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final
from uuid import uuid4

from server.caching.expectation import CacheExpectation, explain_miss
from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.errors import (
    AnswerUnreadable,
    ConversationNotFound,
    DatabaseUnavailable,
    LeaseLost,
    ProviderFailed,
    TurnInterrupted,
)
from server.conversation.store import NewAnswer, PayloadSource
from server.conversation.turn import Native, StopReason, ToolResponseTurn, Turn, TurnState, describe_stop, open_call_ids
from server.conversation.usage import Usage, add_usages
from server.payload.call_records import add_costs, describe_unknown_outcome, price_answer
from server.providers.continuation import fold_earlier, replace_container
from server.providers.provider import Fold, ProviderAnswer
from server.turns.stored import bodies_before
from server.turns.tools import TurnTools

_OK: Final = 200
_log = logging.getLogger("strata.turn")


class TurnRecovery:
    """Ends the turns of dead processes."""

    def __init__(self, tools: TurnTools) -> None:
        self._tools = tools

    async def watch(self) -> None:
        """Recover turns until cancelled: at once, and then four times per lease duration."""
        while True:
            try:
                while await self.recover():
                    pass
            except DatabaseUnavailable as error:
                _log.warning("recovery.look_failed", extra={"code": error.code})
            # No task awaits this one. If it ended here, this process would recover no turn any more.
            except Exception:  # noqa: BLE001  reason: logged with its traceback, and repeated after the pause
                _log.exception("recovery.crashed")
            await asyncio.sleep(self._tools.limits.lease_seconds / 4)

    async def recover(self, conversation_id: str | None = None) -> int:
        """End the turns whose leases have expired, of one conversation or of all, and return their number.

        Without a conversation id, a turn that cannot be ended is logged and does not prevent the others from being
        ended. Raises `DatabaseUnavailable`.
        """
        expired = await self._tools.store.list_expired_leases(conversation_id=conversation_id)
        if conversation_id is not None:
            return sum([await self._recover_one(tenant_id, lease) for tenant_id, lease in expired])
        return sum([await self._recover_isolated(tenant_id, lease) for tenant_id, lease in expired])

    async def _recover_isolated(self, tenant_id: str, lease: Lease) -> bool:
        facts = {"conversation_id": lease.conversation_id, "turn_seq": lease.turn_seq, "owner": lease.owner}
        try:
            return await self._recover_one(tenant_id, lease)
        except DatabaseUnavailable as error:
            # The failure may concern this conversation only, for instance if its row is locked for too long.
            _log.warning("turn.recovery_failed", extra={**facts, "code": error.code})
        except Exception:  # noqa: BLE001  reason: logged with its traceback; the next turn follows
            _log.exception("turn.recovery_failed", extra=facts)
        return False

    async def _recover_one(self, tenant_id: str, lease: Lease) -> bool:
        tools = self._tools
        try:
            mine = await tools.store.take_over_lease(
                lease, token=uuid4(), owner=tools.owner, lease_seconds=tools.limits.lease_seconds
            )
            conversation = await tools.store.load_conversation(tenant_id, lease.conversation_id)
            answer = await self._finish(tenant_id, mine)
        except (LeaseLost, ConversationNotFound):
            # Another process has recovered the turn, or the conversation was erased.
            return False
        _log.warning(
            "turn.recovered",
            extra={
                "conversation_id": lease.conversation_id,
                "turn_seq": lease.turn_seq,
                "owner": lease.owner,
                "state": answer.state.value,
            },
        )
        if answer.start is not None and answer.end is not None:
            tools.observer.call_ended(mine, answer.start, answer.end, assistant_id=conversation.assistant_id)
        tools.observer.turn_recovered(mine)
        return True

    async def _finish(self, tenant_id: str, lease: Lease) -> NewAnswer:
        """Store the end of the turn with its content or, if that cannot be stored, with its bytes only."""
        store = self._tools.store
        for build in (self._build_answer, self._build_bare_answer):
            try:
                answer = await build(tenant_id, lease)
                await store.finish_turn(lease, answer)
            except (LeaseLost, ConversationNotFound, DatabaseUnavailable):
                raise
            # Every later recovery would fail in the same way, and the conversation would be blocked forever.
            except Exception:  # noqa: BLE001  reason: logged with its traceback, and recorded as the turn's error
                _log.exception(
                    "turn.answer_unreadable",
                    extra={"conversation_id": lease.conversation_id, "turn_seq": lease.turn_seq},
                )
            else:
                return answer
        answer = replace(
            await self._build_answer_without_call(tenant_id, lease), error_code=AnswerUnreadable.code, cost_usd=None
        )
        await store.finish_turn(lease, answer)
        return answer

    async def _build_answer(self, tenant_id: str, lease: Lease) -> NewAnswer:
        calls = await self._tools.store.list_calls(tenant_id, lease.conversation_id, lease.turn_seq)
        if not calls:
            return await self._build_answer_of_unknown_call(tenant_id, lease)
        call = calls[-1]
        calls = [*[await self.end_call(tenant_id, lease, earlier) for earlier in calls[:-1]], call]
        body = await self._collect_body(tenant_id, lease, call)
        own, code = self._fold(call, [], body)
        complete = code is None
        before = [earlier or b"" for earlier in bodies_before(call, calls)]
        answer = self._fold(call, before, body)[0] if before else own
        start, end = self._end(call, body, own, code)
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
            start=start,
            end=end,
            model_version=answer.model_version,
            ending=describe_stop(answer.stop_reason, answer.stop_details) if complete else {},
        )

    async def end_call(
        self, tenant_id: str, lease: Lease, call: Call, *, lost_code: str = TurnInterrupted.code
    ) -> Call:
        """Store the end of a call, if it has none, with the bytes that had arrived.

        `lost_code`: the error code of a call whose answer is not complete.
        """
        if call.end is not None:
            return call
        body = await self._collect_body(tenant_id, lease, call)
        answer, code = self._fold(call, [], body)
        start, end = self._end(call, body, answer, lost_code if code == TurnInterrupted.code else code)
        await self._tools.store.end_call(lease, start, end)
        return replace(call, start=start, end=end)

    def _end(self, call: Call, body: bytes, answer: ProviderAnswer, code: str | None) -> tuple[CallStart, CallEnd]:
        """Return the start and the end of a call as recovery records them."""
        start = call.start if answer.container is None else replace_container(call.start, answer.container)
        start = replace(start, warnings=(*start.warnings, *answer.warnings))
        if call.end is not None:
            return start, replace(call.end, error_code=call.end.error_code or code)
        end = CallEnd(
            ended_at=datetime.now(UTC),
            first_byte_at=None,
            status=_OK if body else None,
            raw_response=body,
            usage=answer.usage,
            usage_reported=answer.usage_reported,
            response_id=answer.response_id,
            cache_miss_reason=explain_miss(_expectation_of(call), answer.usage, answer.cache_miss_reason),
            cost_usd=price_answer(start.model, start.started_at, answer),
            error_code=code,
        )
        if answer.usage != Usage():
            return start, end
        # The request was sent, and its outcome is unknown.
        size = sum(int(entry["length"]) for entry in start.manifest)
        unknown = describe_unknown_outcome(start.model, start.started_at, size, self._tools.estimate)
        return replace(start, warnings=(*start.warnings, unknown)), replace(end, cost_usd=None)

    async def _collect_body(self, tenant_id: str, lease: Lease, call: Call) -> bytes:
        """Return the bytes of a call: its checkpoints up to the first gap, or nothing if the call had failed.

        A call that had ended without a failure was paused, and had not been continued yet.
        """
        if call.end is not None:
            return b"" if call.end.error_code is not None else call.end.raw_response or b""
        chunks = await self._tools.store.list_chunks(
            tenant_id, lease.conversation_id, lease.turn_seq, attempt=call.start.attempt
        )
        body = b""
        for chunk in chunks:
            if chunk.attempt == call.start.attempt and chunk.offset == len(body):
                body += chunk.data
        return body

    def _fold(self, call: Call, earlier: Sequence[bytes], body: bytes) -> tuple[ProviderAnswer, str | None]:
        """Fold the bytes of a call after those of the calls that it continues.

        Returns the answer and the error code of an incomplete answer, None for a complete one.
        """
        open_fold = self._tools.folds.get(call.start.provider)
        if open_fold is None or not (earlier or body):
            return ProviderAnswer(), TurnInterrupted.code
        try:
            fold = open_fold()
            fold_earlier(fold, earlier)
            return _fold_whole(fold, body)
        except Exception:  # noqa: BLE001  reason: logged with its traceback; the turn's error is `answer_unreadable`
            _log.exception("turn.answer_unreadable", extra={"turn_seq": call.turn_seq})
            return ProviderAnswer(), AnswerUnreadable.code

    async def _build_bare_answer(self, tenant_id: str, lease: Lease) -> NewAnswer:
        """Build the end of a turn whose answer cannot be stored: no content, and all bytes that had arrived."""
        answer = replace(
            await self._build_answer_without_call(tenant_id, lease), error_code=AnswerUnreadable.code, cost_usd=None
        )
        calls = await self._tools.store.list_calls(tenant_id, lease.conversation_id, lease.turn_seq)
        if not calls:
            return answer
        start = calls[-1].start
        body = await self._collect_body(tenant_id, lease, calls[-1])
        end = calls[-1].end or CallEnd(
            ended_at=datetime.now(UTC),
            first_byte_at=None,
            status=_OK if body else None,
            raw_response=body,
            error_code=AnswerUnreadable.code,
        )
        return replace(answer, provider=start.provider, model=start.model, account=start.account, start=start, end=end)

    async def _build_answer_of_unknown_call(self, tenant_id: str, lease: Lease) -> NewAnswer:
        """Build the end of a turn without a recorded call. The process may have made one, which may be billed."""
        store = self._tools.store
        asked = await store.load_turn(tenant_id, lease.conversation_id, lease.turn_seq - 1)
        source = await store.load_payload_source(tenant_id, lease.conversation_id)
        version = _find_version(source, asked)
        answer = await self._build_answer_without_call(tenant_id, lease, version)
        if source.epoch is None or source.epoch.assistant_version != version:
            # An epoch of this version begins before a request is made.
            return answer
        size = len((source.static_text or "").encode("utf-8", "surrogatepass"))
        size += sum(len(turn.native.data) for turn in source.buffered)
        end = CallEnd(
            ended_at=datetime.now(UTC),
            first_byte_at=None,
            status=None,
            cost_usd=None,
            error_code=TurnInterrupted.code,
        )
        start = CallStart(
            attempt=1,
            provider=answer.provider,
            model=answer.model,
            # Neither the credentials nor the exact request were recorded.
            account="",
            epoch=source.epoch.number,
            started_at=asked.created_at,
            manifest=(),
            request_hash=b"",
            warnings=(describe_unknown_outcome(answer.model, asked.created_at, size, self._tools.estimate),),
        )
        return replace(answer, cost_usd=None, account="", start=start, end=end)

    async def _build_answer_without_call(self, tenant_id: str, lease: Lease, version: int | None = None) -> NewAnswer:
        """Build the end of a turn without a call. `version` of the assistant: None for the conversation's."""
        store = self._tools.store
        conversation = await store.load_conversation(tenant_id, lease.conversation_id)
        assistant = await store.load_assistant(
            tenant_id, conversation.assistant_id, version or conversation.assistant_version
        )
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


def _find_version(source: PayloadSource, asked: Turn) -> int:
    """Return the version of the assistant that the requests of a turn were made with, if there were any.

    A tool loop keeps the version of its epoch. If the conversation was edited after the turn was accepted, its version
    may be newer than the turn, and the version of the epoch was used as well.
    """
    edited = source.conversation.updated_at > asked.created_at
    if source.epoch is not None and (isinstance(asked, ToolResponseTurn) or edited):
        return source.epoch.assistant_version
    return source.conversation.assistant_version


def _fold_whole(fold: Fold, body: bytes) -> tuple[ProviderAnswer, str | None]:
    """Return the answer and the error code of an incomplete answer, None for a complete one."""
    try:
        for _ in fold.feed(body):
            pass
        fold.finish()
    except ProviderFailed:
        return fold.answer, TurnInterrupted.code
    return fold.answer, None


def _expectation_of(call: Call) -> CacheExpectation:
    """Return the expected cache read as far as it was recorded: the reason for a smaller one was not."""
    expected = call.start.cache_expected_tokens
    return CacheExpectation(tokens=expected, possible_tokens=expected or 0)
