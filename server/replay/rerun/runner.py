"""One item of a replay, from its claim to its end.

Both modes are one loop over the steps of a walk: store the next input, run the candidate's turn, compare its answer,
store the result. The turn runs like a live one (`server.turns.runner`), with `BatchRules`. In a teacher-forced replay
conversation the recorded answer is stored in place of the candidate's, so that each turn follows the recorded history;
in a free-running one the candidate's answer is stored.

Every step is durable piece by piece, and the next process continues from the stored pieces:

| in the replay conversation       | left to do                                                        |
|----------------------------------|-------------------------------------------------------------------|
| no input                         | the whole step                                                    |
| an input, and a call without end | the call is ended; if its answer is not complete, another is made |
| an answer, and no result         | the result, from the bytes of the stored call                     |
| an answer, and a result          | nothing: the next step                                            |
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from server.compaction.compactor import Compactor
from server.conversation.assistant import AssistantDefinition
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import (
    Internal,
    ProviderAuthentication,
    ProviderNotConfigured,
    ProviderQuotaExceeded,
    SummaryUnavailable,
)
from server.conversation.shutdown import run_to_completion
from server.conversation.store import NewAnswer
from server.conversation.turn import ModelResponseTurn, TurnState
from server.payload.preparation import PreparedPayload
from server.replay.rerun.admission import ItemAdmission
from server.replay.rerun.answers import copy_answer, force_answer, needs_placeholder, read_answer
from server.replay.rerun.assertions import AssertionChecker
from server.replay.rerun.candidate import build_definition
from server.replay.rerun.conversation import OpenTurn, ReplayConversation
from server.replay.rerun.judge import JudgeCalls
from server.replay.rerun.observer import ReplayObserver
from server.replay.rerun.payload import ReplayPreparation, ReplayRenderer, mark_arguments
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import ClaimedItem, ItemState, ReplayMode
from server.replay.rerun.result import JudgeResult
from server.replay.rerun.result_builder import build_result, build_subject, is_comparable
from server.replay.rerun.source import RecordedStep, ReplaySource, list_turns
from server.replay.rerun.walk import NextStep, WalkEnd, WalkStep, open_walk
from server.turns.live import LiveTurn
from server.turns.recovery import TurnRecovery
from server.turns.runner import BatchRules, TurnRunner
from server.turns.tools import TurnTools

_FATAL: Final = frozenset(
    error.code for error in (ProviderNotConfigured, ProviderAuthentication, ProviderQuotaExceeded)
)
"""Error codes after which every other turn of the conversation would fail too."""
_log = logging.getLogger("strata.replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemEnd:
    """How an item ended."""

    state: ItemState
    error_code: str | None = None


@dataclass(slots=True, kw_only=True)
class ItemRunner:
    """Runs one item. `server.replay.rerun.items` builds it."""

    claimed: ClaimedItem
    source: ReplaySource
    replays: Replays
    turns: TurnTools
    """For turns of the replay conversation: its store, its limits, and `preparation`."""
    renderer: ReplayRenderer
    preparation: ReplayPreparation
    admission: ItemAdmission
    compactor: Compactor
    assertions: AssertionChecker
    judge: JudgeCalls | None
    observer: ReplayObserver
    _chosen: AssistantDefinition | None = field(default=None, init=False)
    _recorded_step: RecordedStep | None = field(default=None, init=False)
    _passed: list[WalkStep] = field(default_factory=list, init=False)
    """Steps of the current exchange that were done before."""
    _replay_conversation: ReplayConversation | None = field(default=None, init=False)

    async def run(self) -> ItemEnd:
        """Run all steps that are not done yet.

        Raises `ItemHalted` if the item has to be continued later, `LeaseLost` if another process has claimed it,
        `DatabaseUnavailable`, and any other `StrataError` that ends it.
        """
        draft = self.claimed.draft
        walk = open_walk(draft.mode, self.source.turns, draft.on_missing_result)
        next_step = walk.begin()
        if next_step.step is None:
            return ItemEnd(state=ItemState.DONE)
        answers = await self._open_replay_conversation(next_step.step)
        while (step := next_step.step) is not None:
            self._passed = [] if step.is_task else self._passed
            stored = answers.get(step.answer_seq)
            if stored is not None and step.position <= self.claimed.result_count:
                self._passed.append(step)
                next_step = walk.advance(stored.blocks, complete=stored.state is TurnState.COMPLETE)
                continue
            recorded_step = await self._enter(step)
            answer = await self._get_answer(step, recorded_step, is_stored=stored is not None)
            blocks = () if answer is None else answer.blocks
            next_step = walk.advance(blocks, complete=answer is None or answer.error_code is None)
            await self._record(step, recorded_step, answer, next_step)
            if answer is not None and (next_step.end is WalkEnd.CANDIDATE_FAILED or answer.error_code in _FATAL):
                return ItemEnd(state=ItemState.FAILED, error_code=answer.error_code)
        return ItemEnd(state=ItemState.DONE)

    async def _open_replay_conversation(self, first: WalkStep) -> Mapping[int, ModelResponseTurn]:
        """Open the replay conversation, new or as the previous process left it, and return its answers by seq."""
        recorded_step = await self._load_recorded_step(first)
        recorded, tenant_id, store = self.source.conversation, self.claimed.tenant_id, self.turns.store
        conversation = await self.replays.open_replay_conversation(
            self.claimed.lease,
            tenant_id,
            await self._definition_at(recorded_step),
            ConversationDraft(
                assistant_id="",
                identifier=recorded.identifier,
                source=recorded.source,
                direction=recorded.direction,
                mode=recorded.mode,
                args=mark_arguments(recorded.args, recorded_step.arguments_hash),
                context=recorded.context,
                metadata=recorded.metadata,
            ),
        )
        self._replay_conversation = ReplayConversation(
            store, tenant_id, conversation, TurnRecovery(self.turns), self.turns.owner
        )
        await self._replay_conversation.take_over()
        turns = await list_turns(store, tenant_id, conversation.id)
        return {turn.seq: turn for turn in turns if isinstance(turn, ModelResponseTurn)}

    async def _enter(self, step: WalkStep) -> RecordedStep:
        """Load the recording of the step, and let the renderer and the preparation use it."""
        for each in (*self._passed, step):
            recorded_step = await self._load_recorded_step(each)
            definition = await self._definition_at(recorded_step)
            self.renderer.move_to(recorded_step, definition, is_task=each.is_task)
        self._passed = []
        self.preparation.recorded = recorded_step.call
        return recorded_step

    async def _load_recorded_step(self, step: WalkStep) -> RecordedStep:
        """Load the recording of a step. A step without a recorded answer has that of the step before."""
        if step.recorded is not None:
            self._recorded_step = await self.source.load_recorded_step(step.recorded)
        if self._recorded_step is None:
            raise Internal("A walk begins with a recorded answer.")
        return self._recorded_step

    async def _definition_at(self, recorded_step: RecordedStep) -> AssistantDefinition:
        candidate = self.claimed.draft.candidate
        if candidate.assistant_id is None and candidate.assistant_version is None:
            return build_definition(recorded_step.definition, candidate)
        if self._chosen is None:
            chosen = await self.source.load_definition(candidate.assistant_id, candidate.assistant_version)
            self._chosen = build_definition(chosen, candidate)
        return self._chosen

    async def _get_answer(self, step: WalkStep, recorded_step: RecordedStep, *, is_stored: bool) -> NewAnswer | None:
        """Return the candidate's answer, from the stored calls or by running the turn; None if it is not called."""
        if is_stored:
            return read_answer(await self._opened().list_calls(step.answer_seq), self.turns.folds)
        turn = await self._open_turn(step, recorded_step)
        if step.is_called:
            return await self._run_turn(step, recorded_step, turn)
        await self._copy_recorded(step, recorded_step, turn)
        return None

    async def _open_turn(self, step: WalkStep, recorded_step: RecordedStep) -> OpenTurn:
        """Return the turn that the previous process left open, or a new one with the input of the step."""
        replay_conversation = self._opened()
        turn = replay_conversation.take_open_turn()
        if turn is not None:
            return turn
        definition = await self._definition_at(recorded_step)
        if step.position > 1:
            await self._compact_if_due(replay_conversation.id)
        if step.is_task:
            args = mark_arguments(self.source.conversation.args, recorded_step.arguments_hash)
            await replay_conversation.update(definition, args)
        return await replay_conversation.open_turn(step, await self.source.load_blobs(step.input.blocks))

    async def _compact_if_due(self, replay_conversation_id: str) -> None:
        """Compact the replay conversation if the candidate's policy requires it.

        A summary that is not available now is requested again after the next answer. Raises `ItemHalted` if a summary
        is needed and its call is not admitted.
        """
        try:
            await self.compactor.compact(self.claimed.tenant_id, replay_conversation_id)
        except SummaryUnavailable as error:
            _log.warning(
                "replay.compaction_postponed", extra={"conversation_id": replay_conversation_id, "code": error.code}
            )

    async def _run_turn(self, step: WalkStep, recorded_step: RecordedStep, turn: OpenTurn) -> NewAnswer:
        """Get the candidate's answer and store the turn. An answer that another process has received is not requested
        again.
        """
        replay_conversation, next_attempt = self._opened(), turn.next_attempt
        is_forced = self.claimed.draft.mode is ReplayMode.TEACHER_FORCED
        forced = step.recorded if is_forced else None

        def substitute(prepared: PreparedPayload, own: NewAnswer) -> NewAnswer:
            if forced is None:
                return own
            return force_answer(forced, recorded_step, prepared, own, spare_attempt=next_attempt)

        def first_attempt(prepared: PreparedPayload) -> int:
            has_spare = forced is not None and needs_placeholder(prepared, forced, recorded_step)
            return next_attempt + has_spare

        own = turn.find_answer(self.turns.folds)
        if own is not None:
            stored = substitute(await self._prepare(), own)
            await run_to_completion(replay_conversation.finish_turn(turn, stored))
            return own
        lease = turn.lease
        live = LiveTurn(
            tenant_id=self.claimed.tenant_id,
            conversation_id=lease.conversation_id,
            input_seq=lease.turn_seq - 1,
            seq=lease.turn_seq,
        )
        rules = BatchRules(
            admission=self.admission.limits(recorded_step.call),
            substitute=substitute,
            first_attempt=first_attempt,
            earlier_ends=turn.ends,
        )
        runner = TurnRunner(self.turns, self.claimed.tenant_id, lease, live, began=time.monotonic(), batch=rules)
        await runner.run()
        if runner.finished is None:
            raise Internal("A turn that has run is stored.")
        own, finished = runner.finished
        replay_conversation.turn_finished(finished)
        return own

    async def _copy_recorded(self, step: WalkStep, recorded_step: RecordedStep, turn: OpenTurn) -> None:
        """Store an incomplete recorded answer. The candidate is not called."""
        if step.recorded is None:
            raise Internal("The candidate is called in every step without a recorded answer.")
        prepared, request = None, b""
        if recorded_step.call is not None:
            prepared = await self._prepare()
            request = await prepared.provider.encode_request(prepared.built.payload)
        request_hash = hashlib.sha256(request).digest()
        answer = copy_answer(step.recorded, recorded_step, prepared, turn.next_attempt, request_hash)
        await self._opened().finish_turn(turn, answer)

    async def _prepare(self) -> PreparedPayload:
        source = await self.preparation.load(self.claimed.tenant_id, self._opened().id)
        return await self.preparation.prepare(self.claimed.tenant_id, source)

    async def _record(
        self, step: WalkStep, recorded_step: RecordedStep, answer: NewAnswer | None, next_step: NextStep
    ) -> None:
        """Compare the answer, ask the judge, evaluate the assertions, and store the result."""
        note = WalkEnd.NO_RECORDED_RESULT if next_step.missing_ids else next_step.end
        result = build_result(
            step,
            answer,
            recorded_step.call,
            note=None if note is None else note.value,
            judge=await self._ask_judge(step, answer),
        )
        assertions = self.claimed.draft.assertions
        if answer is not None and assertions:
            subject = build_subject(step, answer, result)
            checked = await self.assertions.check(self.claimed.tenant_id, assertions, subject)
            result = replace(result, assertions=checked)
        await self.replays.record_result(self.claimed.lease, result, () if answer is None else answer.blocks)
        self.observer.result_recorded(result.outcome)

    async def _ask_judge(self, step: WalkStep, answer: NewAnswer | None) -> JudgeResult | None:
        recorded = step.recorded
        if self.judge is None or answer is None or answer.error_code is not None:
            return None
        if recorded is None or not is_comparable(recorded):
            return None
        return await self.judge.ask(self._opened().id, step, recorded.blocks, answer.blocks)

    def _opened(self) -> ReplayConversation:
        if self._replay_conversation is None:
            raise Internal("The replay conversation is not open.")
        return self._replay_conversation
