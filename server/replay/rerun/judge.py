"""The calls to a replay's judge. They belong to the replay conversation and to none of its turns."""

from collections.abc import Mapping, Sequence
from typing import Final

from server.compaction.background_call import BackgroundCallLog, BackgroundQuestion, ask_in_background
from server.conversation.block import Block, TextBlock
from server.conversation.call import CallEnd, CallStart
from server.conversation.errors import ProviderFailed, ProviderNotConfigured
from server.conversation.store import Store
from server.inspection.judge_payload import JUDGE, build_judge_payload, read_score, write_question
from server.payload.settings import read_order
from server.providers.calls import Admission
from server.providers.model_profile import find_profile
from server.providers.provider import Provider, ProviderAnswer
from server.providers.retry_policy import RetryPolicy
from server.replay.rerun.observer import CallPurpose, ReplayObserver
from server.replay.rerun.replay import Judge
from server.replay.rerun.result import JudgeResult
from server.replay.rerun.walk import WalkStep

UNREADABLE: Final = "judge_unreadable"
"""The error code of an answer without a score."""


class JudgeCalls:
    """Calls the judge of one replay about the answers of one item."""

    def __init__(
        self,
        replay_store: Store,
        tenant_id: str,
        judge: Judge,
        providers: Mapping[str, Provider],
        policy: RetryPolicy,
        admission: Admission,
        observer: ReplayObserver,
    ) -> None:
        """Raises `ProviderNotConfigured`."""
        provider = providers.get(judge.provider)
        if provider is None:
            raise ProviderNotConfigured(f"This process has no key for {judge.provider}.")
        self._store = replay_store
        self._tenant_id = tenant_id
        self._judge = judge
        self._provider = provider
        self._policy = policy
        self._admission = admission
        self._observer = observer
        self._log: BackgroundCallLog | None = None

    async def ask(
        self, replay_conversation_id: str, step: WalkStep, recorded: Sequence[Block], candidate: Sequence[Block]
    ) -> JudgeResult:
        """Return the judge's rating of two answers. A question that was answered before is not asked again.

        Raises `ItemHalted`, `LeaseLost`, `DatabaseUnavailable`.
        """
        judge, provider = self._judge, self._provider
        text = write_question(step.input.blocks, recorded, candidate)
        payload = build_judge_payload(provider, judge.model, judge.prompt, judge.settings, text)
        epoch = (await self._store.load_conversation(self._tenant_id, replay_conversation_id)).epoch
        if self._log is None or self._log.epoch != epoch:
            self._log = BackgroundCallLog(self._store, self._tenant_id, replay_conversation_id, epoch)
        question = BackgroundQuestion(
            provider=provider,
            payload=payload,
            layer_order=read_order({}, find_profile(provider.name, payload.model)),
            note={
                "kind": JUDGE,
                "position": step.position,
                "prompt": judge.prompt,
                "settings": dict(judge.settings),
                "question": text,
            },
        )
        try:
            answer = await ask_in_background(
                self._log,
                question,
                self._policy,
                accepts=lambda _answer: True,
                on_ended=self._notify,
                admission=self._admission,
                is_exclusive=True,
            )
        except ProviderFailed as failure:
            return JudgeResult(score=None, error_code=failure.code)
        return _read(answer)

    def _notify(self, start: CallStart, end: CallEnd) -> None:
        self._observer.call_ended(start, end, CallPurpose.JUDGE)


def _read(answer: ProviderAnswer) -> JudgeResult:
    scored = read_score("".join(block.text for block in answer.blocks if isinstance(block, TextBlock)))
    if scored is None:
        return JudgeResult(score=None, error_code=UNREADABLE)
    score, reason = scored
    return JudgeResult(score=score, reason=reason)
