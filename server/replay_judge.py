"""Asking a judge: a call of the shadow that belongs to none of its turns, kept and paid for like any other."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from server.block import Block, TextBlock
from server.cache_expectation import CacheExpectation
from server.call import Call, CallStart
from server.call_records import cost_of, describe_end
from server.call_settings import read_order
from server.errors import ProviderFailed, ProviderNotConfigured
from server.judge_payload import JUDGE, build_judge_payload, read_score, write_question
from server.manifest import build_manifest, encode_manifest
from server.model_profile import find_profile
from server.payload import Payload
from server.provider import Provider, ProviderAnswer
from server.replay import CallSpending, Judge
from server.replay_call import CandidateCalls, count_tokens, insist, listen
from server.replay_result import JudgeResult
from server.replay_walk import WalkStep
from server.store import Store

UNREADABLE: Final = "judge_unreadable"
"""The error code of an answer that holds no score."""


class JudgeCalls:
    """Asks the judge of one replay about the answers of one item."""

    def __init__(
        self,
        shadows: Store,
        providers: Mapping[str, Provider],
        calls: CandidateCalls,
        judge: Judge | None,
        tenant_id: str,
    ) -> None:
        self._shadows = shadows
        self._providers = providers
        self._calls = calls
        self._judge = judge
        self._tenant_id = tenant_id

    async def ask(
        self, shadow_id: str, step: WalkStep, recorded: Sequence[Block], candidate: Sequence[Block]
    ) -> JudgeResult | None:
        """None where there is no judge. What was asked before, and answered, is not asked again.

        Raises `ItemHalted`, `LeaseLost`, `ProviderNotConfigured`.
        """
        judge = self._judge
        if judge is None:
            return None
        provider = self._providers.get(judge.provider)
        if provider is None:
            raise ProviderNotConfigured(f"This process has no key for {judge.provider}.")
        question = write_question(step.input.blocks, recorded, candidate)
        payload = build_judge_payload(provider, judge.model, judge.prompt, judge.settings, question)
        request = await provider.encode_request(payload)
        epoch = (await self._shadows.load_conversation(self._tenant_id, shadow_id)).epoch
        known = await self._find(shadow_id, epoch, provider, hashlib.sha256(request).digest())
        if known is not None:
            return _read(known)
        note = {
            "kind": JUDGE,
            "place": step.place,
            "prompt": judge.prompt,
            "settings": dict(judge.settings),
            "question": question,
        }
        return await self._ask_patiently(shadow_id, epoch, provider, payload, request, note)

    async def _ask_patiently(
        self,
        shadow_id: str,
        epoch: int,
        provider: Provider,
        payload: Payload,
        request: bytes,
        note: Mapping[str, object],
    ) -> JudgeResult:
        began, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            answered = await self._attempt(shadow_id, epoch, provider, payload, request, note)
            if isinstance(answered, ProviderAnswer):
                return _read(answered)
            elapsed = time.monotonic() - began
            delay = self._calls.plan_delay(provider.name, payload.model, answered, attempt, elapsed)
            await self._calls.hold_back(provider.name, answered)
            if delay is None:
                return JudgeResult(score=None, error_code=answered.code)
            await self._calls.wait(delay)

    async def _attempt(
        self,
        shadow_id: str,
        epoch: int,
        provider: Provider,
        payload: Payload,
        request: bytes,
        note: Mapping[str, object],
    ) -> ProviderAnswer | ProviderFailed:
        reservation = await self._calls.permit(
            provider.name, self._calls.foresee(payload, provider.name, len(request), None)
        )
        earlier = await self._shadows.list_calls(self._tenant_id, shadow_id, -epoch)
        profile = find_profile(provider.name, payload.model)
        stream = provider.open_stream(payload)
        start = CallStart(
            attempt=len(earlier) + 1,
            provider=provider.name,
            model=payload.model,
            account=provider.account,
            epoch=epoch,
            started_at=datetime.now(UTC),
            manifest=encode_manifest(build_manifest(payload)),
            request_hash=hashlib.sha256(request).digest(),
            layer_order=read_order({}, profile),
            warnings=(*stream.warnings, dict(note)),
        )
        call = Call(turn_seq=-epoch, start=start, end=None)
        await self._shadows.record_call(self._tenant_id, shadow_id, call)
        failure = await listen(stream)
        end = describe_end(stream, payload.model, CacheExpectation(), None if failure is None else failure.code)
        ended = Call(turn_seq=-epoch, start=start, end=end)
        await insist(lambda: self._shadows.record_call(self._tenant_id, shadow_id, ended))
        spent = CallSpending(
            usd=cost_of(payload.model, start.started_at, stream.answer), tokens=count_tokens(stream.answer.usage)
        )
        await self._calls.settle(reservation, spent)
        return stream.answer if failure is None else failure

    async def _find(self, shadow_id: str, epoch: int, provider: Provider, request_hash: bytes) -> ProviderAnswer | None:
        """What the same question has been answered with before."""
        for call in await self._shadows.list_calls(self._tenant_id, shadow_id, -epoch):
            end = call.end
            if call.start.request_hash == request_hash and end is not None and end.error_code is None:
                return provider.fold_body(end.raw_response or b"")
        return None


def _read(answer: ProviderAnswer) -> JudgeResult:
    said = read_score("".join(block.text for block in answer.blocks if isinstance(block, TextBlock)))
    if said is None:
        return JudgeResult(score=None, error_code=UNREADABLE)
    score, reason = said
    return JudgeResult(score=score, reason=reason)
