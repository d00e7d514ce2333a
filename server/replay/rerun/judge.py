"""Asking a judge: a call of the replay conversation that belongs to none of its turns, kept and paid for like any
other.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from server.caching.expectation import CacheExpectation
from server.conversation.block import Block, TextBlock
from server.conversation.call import Call, CallStart
from server.conversation.errors import Internal, ProviderFailed, ProviderNotConfigured
from server.conversation.manifest import build_manifest, encode_manifest
from server.conversation.payload import Payload
from server.conversation.shutdown import run_to_completion
from server.conversation.store import Store
from server.inspection.judge_payload import JUDGE, build_judge_payload, read_score, write_question
from server.payload.call_records import build_end, price_answer
from server.payload.settings import read_order
from server.providers.model_profile import find_profile
from server.providers.provider import Provider, ProviderAnswer
from server.replay.rerun.call import CandidateCalls, listen, retry_write
from server.replay.rerun.call_estimate import count_tokens
from server.replay.rerun.observer import CallPurpose
from server.replay.rerun.replay import CallSpending, Judge
from server.replay.rerun.result import JudgeResult
from server.replay.rerun.walk import WalkStep

UNREADABLE: Final = "judge_unreadable"
"""The error code of an answer that holds no score."""


class JudgeCalls:
    """Asks the judge of one replay about the answers of one item."""

    def __init__(
        self,
        replay_store: Store,
        providers: Mapping[str, Provider],
        calls: CandidateCalls,
        judge: Judge | None,
        tenant_id: str,
    ) -> None:
        self._replay_store = replay_store
        self._providers = providers
        self._calls = calls
        self._judge = judge
        self._tenant_id = tenant_id
        self._epoch: int | None = None
        self._asked: list[Call] = []
        """The calls of this epoch that belong to no turn, as far as they were looked at."""

    def check(self) -> None:
        """That the judge could be asked, before anything is asked of the candidate. Raises `ProviderNotConfigured`."""
        if self._judge is not None:
            self._provider_of(self._judge)

    async def ask(
        self, replay_conversation_id: str, step: WalkStep, recorded: Sequence[Block], candidate: Sequence[Block]
    ) -> JudgeResult | None:
        """None where there is no judge. What was asked before, and answered, is not asked again.

        Raises `ItemHalted`, `LeaseLost`, `ProviderNotConfigured`.
        """
        judge = self._judge
        if judge is None:
            return None
        provider = self._provider_of(judge)
        question = write_question(step.input.blocks, recorded, candidate)
        payload = build_judge_payload(provider, judge.model, judge.prompt, judge.settings, question)
        request = await provider.encode_request(payload)
        epoch = (await self._replay_store.load_conversation(self._tenant_id, replay_conversation_id)).epoch
        if epoch != self._epoch:
            await self._look(replay_conversation_id, epoch)
        known = self._find(provider, hashlib.sha256(request).digest())
        if known is not None:
            return _read(known)
        note = {
            "kind": JUDGE,
            "place": step.place,
            "prompt": judge.prompt,
            "settings": dict(judge.settings),
            "question": question,
        }
        return await self._ask_patiently(replay_conversation_id, epoch, provider, payload, request, note)

    def _provider_of(self, judge: Judge) -> Provider:
        provider = self._providers.get(judge.provider)
        if provider is None:
            raise ProviderNotConfigured(f"This process has no key for {judge.provider}.")
        return provider

    async def _ask_patiently(
        self,
        replay_conversation_id: str,
        epoch: int,
        provider: Provider,
        payload: Payload,
        request: bytes,
        note: Mapping[str, object],
    ) -> JudgeResult:
        retry_allowance = self._calls.be_patient()
        while True:
            call, answered = await self._attempt(replay_conversation_id, epoch, provider, payload, request, note)
            if isinstance(answered, ProviderAnswer):
                return _read(answered)
            if call.end is None:
                raise Internal("A call that is over has an end.")
            delay = await self._calls.plan_delay(retry_allowance, answered, call.start, call.end)
            if delay is None:
                return JudgeResult(score=None, error_code=answered.code)
            await self._calls.wait(delay)

    async def _attempt(
        self,
        replay_conversation_id: str,
        epoch: int,
        provider: Provider,
        payload: Payload,
        request: bytes,
        note: Mapping[str, object],
    ) -> tuple[Call, ProviderAnswer | ProviderFailed]:
        reservation = await self._calls.permit(
            provider.name, self._calls.estimate(payload, provider.name, len(request))
        )
        stream = provider.open_stream(payload)
        start = CallStart(
            attempt=0,
            provider=provider.name,
            model=payload.model,
            account=provider.account,
            epoch=epoch,
            started_at=datetime.now(UTC),
            manifest=encode_manifest(build_manifest(payload)),
            request_hash=hashlib.sha256(request).digest(),
            layer_order=read_order({}, find_profile(provider.name, payload.model)),
            warnings=(*stream.warnings, dict(note)),
        )
        begun = await self._begin(replay_conversation_id, start)
        failure = await listen(stream)
        end = build_end(stream, payload.model, CacheExpectation(), None if failure is None else failure.code)
        ended = replace(begun, end=end)
        self._calls.observer.call_ended(begun.start, end, CallPurpose.JUDGE)
        spent = CallSpending(
            usd=price_answer(payload.model, start.started_at, stream.answer), tokens=count_tokens(stream.answer.usage)
        )
        await run_to_completion(self._write_down(replay_conversation_id, ended, reservation, spent))
        return ended, stream.answer if failure is None else failure

    async def _begin(self, replay_conversation_id: str, start: CallStart) -> Call:
        """The call under a number of its own: compactions take numbers too."""
        while True:
            call = Call(turn_seq=-start.epoch, start=replace(start, attempt=len(self._asked) + 1), end=None)
            if await self._replay_store.record_call(self._tenant_id, replay_conversation_id, call):
                return call
            await self._look(replay_conversation_id, start.epoch)

    async def _write_down(
        self, replay_conversation_id: str, call: Call, reservation: UUID, spent: CallSpending
    ) -> None:
        await retry_write(lambda: self._replay_store.record_call(self._tenant_id, replay_conversation_id, call))
        self._asked.append(call)
        await self._calls.settle(reservation, spent)

    async def _look(self, replay_conversation_id: str, epoch: int) -> None:
        self._asked = [*await self._replay_store.list_calls(self._tenant_id, replay_conversation_id, -epoch)]
        self._epoch = epoch

    def _find(self, provider: Provider, request_hash: bytes) -> ProviderAnswer | None:
        """What the same question has been answered with before."""
        for call in self._asked:
            end = call.end
            if call.start.request_hash == request_hash and end is not None and not end.error_code and end.raw_response:
                return provider.fold_body(end.raw_response)
        return None


def _read(answer: ProviderAnswer) -> JudgeResult:
    said = read_score("".join(block.text for block in answer.blocks if isinstance(block, TextBlock)))
    if said is None:
        return JudgeResult(score=None, error_code=UNREADABLE)
    score, reason = said
    return JudgeResult(score=score, reason=reason)
