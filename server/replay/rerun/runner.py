"""One item of a replay, from its claim to its end.

Both modes are one loop over the steps of a walk: store the next input, run the candidate's turn, compare its answer,
store the result. The turn runs like a live one (`server.turns.runner`), with `BatchRules`. In a teacher-forced replay
conversation the recorded answer is stored in place of the candidate's, so that each turn follows the recorded history;
in a free-running one the candidate's answer is stored.

Every step is durable piece by piece, and the next process continues from the stored pieces:

| in the replay conversation       | left to do                                                        |
|----------------------------------|-------------------------------------------------------------------|
| no input                         | all of the step                                                   |
| an input, and a call without end | the call is ended; if its answer is not complete, another is made |
| an answer, and no result         | the result, from the bytes of the stored call                     |
| an answer, and a result          | nothing: the next step                                            |
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from server.conversation.assistant import AssistantDefinition
from server.conversation.call import Call
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import (
    Internal,
    ProviderAuthentication,
    ProviderNotConfigured,
    ProviderQuotaExceeded,
)
from server.conversation.shutdown import run_to_completion
from server.conversation.store import NewAnswer
from server.conversation.turn import ModelResponseTurn, TurnState
from server.payload.preparation import PreparedPayload
from server.replay.rerun.admission import ItemAdmission
from server.replay.rerun.answers import force_answer, needs_stand_in, pass_answer, read_answer
from server.replay.rerun.candidate import build_definition
from server.replay.rerun.compaction import CompactionCalls, SourceLengths, compact_if_due
from server.replay.rerun.conversation import OpenTurn, ReplayConversation, mark_arguments
from server.replay.rerun.judge import JudgeCalls
from server.replay.rerun.observer import CandidateTurns
from server.replay.rerun.preparation import ReplayPreparation
from server.replay.rerun.renderer import ReplayRenderer
from server.replay.rerun.replay import ClaimedItem, ItemState, ReplayDraft, ReplayMode
from server.replay.rerun.result import JudgeResult
from server.replay.rerun.result_builder import CandidateAnswer, build_result, build_subject, is_comparable
from server.replay.rerun.source import RecordedStep, ReplaySource, list_turns, open_source
from server.replay.rerun.tools import ReplayTools
from server.replay.rerun.walk import NextStep, Walk, WalkEnd, WalkStep, open_walk
from server.turns.live import LiveTurn
from server.turns.recovery import TurnRecovery
from server.turns.runner import BatchRules, TurnRunner
from server.turns.tools import TurnLimits, TurnTools

_HOPELESS: Final = (ProviderNotConfigured, ProviderAuthentication, ProviderQuotaExceeded)
"""After these failures every other turn of the conversation would fail too."""
_LIMITS: Final = TurnLimits(lease_seconds=0.0, flush_seconds=5.0)
"""The lease of a turn expires at once, see `server.replay.rerun.conversation`. No reader follows the checkpoints."""
_log = logging.getLogger("strata.replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemEnd:
    """How an item ended."""

    state: ItemState
    error_code: str | None = None


async def walk_item(tools: ReplayTools, claimed: ClaimedItem) -> ItemEnd:
    """Runs the item to its end.

    Raises `ItemHalted` if it has to be continued later, `LeaseLost` if another process has claimed it,
    `DatabaseUnavailable`, and any other `StrataError` that ends it.
    """
    draft = claimed.draft
    source = await open_source(tools.store, claimed.tenant_id, claimed.item.conversation_id, until=claimed.made_at)
    walk = open_walk(draft.mode, source.turns, draft.on_missing_result)
    first = walk.begin()
    if first.step is None:
        return ItemEnd(state=ItemState.DONE)
    runner = ItemRunner(tools, claimed, source)
    await runner.open_replay_conversation(first.step)
    return await runner.walk(walk, first)


class ItemRunner:
    """Runs one item."""

    def __init__(self, tools: ReplayTools, claimed: ClaimedItem, source: ReplaySource) -> None:
        """Raises `ProviderNotConfigured` if the judge could not be asked."""
        self._tools = tools
        self._claimed = claimed
        self._draft: ReplayDraft = claimed.draft
        self._is_forced = self._draft.mode is ReplayMode.TEACHER_FORCED
        self._tenant_id = claimed.tenant_id
        self._source = source
        self._renderer = ReplayRenderer(
            tools.renderer_of(self._draft.candidate.templates), self._draft.candidate, source.conversation
        )
        self._preparation = ReplayPreparation(tools.replay_store, self._renderer, tools.providers, texts=tools.texts)
        self._turns = TurnTools(
            owner=tools.owner,
            store=tools.replay_store,
            preparation=self._preparation,
            observer=CandidateTurns(tools.observer),
            folds=tools.folds,
            limits=_LIMITS,
            retry_policy=tools.retry_policy,
            estimate=tools.estimate,
        )
        self._admission = ItemAdmission(tools.replays, claimed.lease, estimate=tools.estimate, shutdown=tools.shutdown)
        self._compactor = tools.compactor_of(
            self._renderer,
            CompactionCalls(tools.observer),
            SourceLengths(tools.lengths, source.conversation.assistant_id),
            self._admission.limits(),
        )
        self._judge: JudgeCalls | None = None
        if self._draft.judge is not None:
            self._judge = JudgeCalls(
                tools.replay_store,
                self._tenant_id,
                self._draft.judge,
                tools.providers,
                tools.retry_policy,
                self._admission.limits(),
                tools.observer,
            )
        self._chosen: AssistantDefinition | None = None
        self._recorded_step: RecordedStep | None = None
        self._passed: list[WalkStep] = []
        """Steps of the present exchange that were done before."""
        self._replay_conversation: ReplayConversation | None = None
        self._answers: Mapping[int, ModelResponseTurn] = {}

    async def open_replay_conversation(self, first: WalkStep) -> None:
        """Opens the replay conversation, new or as the former process has left it."""
        recorded_step = await self._load_recorded_step(first)
        recorded = self._source.conversation
        conversation = await self._tools.replays.open_replay_conversation(
            self._claimed.lease,
            self._tenant_id,
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
            self._tools.replay_store, self._tenant_id, conversation, TurnRecovery(self._turns), self._tools.owner
        )
        await self._replay_conversation.take_over()
        turns = await list_turns(self._tools.replay_store, self._tenant_id, conversation.id)
        self._answers = {turn.seq: turn for turn in turns if isinstance(turn, ModelResponseTurn)}

    async def walk(self, walk: Walk, next_step: NextStep) -> ItemEnd:
        """Takes all steps that are not done yet."""
        while (step := next_step.step) is not None:
            self._passed = [] if step.is_task else self._passed
            there = self._answers.get(2 * step.position)
            if there is not None and step.position <= self._claimed.result_count:
                self._passed.append(step)
                next_step = walk.go_on(there.blocks, complete=there.state is TurnState.COMPLETE)
                continue
            recorded_step = await self._enter(step)
            own: NewAnswer | None = None
            if there is not None:
                own = read_answer(await self._opened().list_calls(step.position), self._tools.folds)
            elif step.asks:
                own = await self._run_turn(step, recorded_step, await self._open_turn(step, recorded_step))
            else:
                await self._pass(step, recorded_step, await self._open_turn(step, recorded_step))
            answer = None if own is None else _candidate_answer(own, 2 * step.position)
            next_step = _go_on(walk, answer)
            await self._record(step, recorded_step, answer, next_step)
            if answer is not None and _is_hopeless(answer, next_step):
                return ItemEnd(state=ItemState.FAILED, error_code=answer.error_code)
        return ItemEnd(state=ItemState.DONE)

    async def _enter(self, step: WalkStep) -> RecordedStep:
        """Loads the recording of the step. From now on the renderer renders what was recorded for it."""
        for each in (*self._passed, step):
            recorded_step = await self._load_recorded_step(each)
            definition = await self._definition_at(recorded_step)
            self._renderer.move_to(recorded_step, definition, is_task=each.is_task)
        self._passed = []
        self._preparation.recorded = recorded_step.call
        return recorded_step

    async def _load_recorded_step(self, step: WalkStep) -> RecordedStep:
        """For a step without a recorded answer: the recording of the step before."""
        if step.recorded is not None:
            self._recorded_step = await self._source.load_recorded_step(step.recorded)
        if self._recorded_step is None:
            raise Internal("A walk begins with a recorded answer.")
        return self._recorded_step

    async def _definition_at(self, recorded_step: RecordedStep) -> AssistantDefinition:
        candidate = self._draft.candidate
        if candidate.assistant_id is None and candidate.assistant_version is None:
            return build_definition(recorded_step.definition, candidate)
        if self._chosen is None:
            chosen = await self._source.load_definition(candidate.assistant_id, candidate.assistant_version)
            self._chosen = build_definition(chosen, candidate)
        return self._chosen

    async def _open_turn(self, step: WalkStep, recorded_step: RecordedStep) -> OpenTurn:
        """The turn that the former process has left open, or a new one with the input of the step."""
        replay_conversation = self._opened()
        turn = replay_conversation.take_open_turn()
        if turn is not None:
            return turn
        definition = await self._definition_at(recorded_step)
        if step.position > 1:
            await compact_if_due(self._compactor, self._tenant_id, replay_conversation.id)
        if step.is_task:
            args = mark_arguments(self._source.conversation.args, recorded_step.arguments_hash)
            await replay_conversation.update(definition, args)
        return await replay_conversation.open_turn(step, await self._source.load_blobs(step.input.blocks))

    async def _run_turn(self, step: WalkStep, recorded_step: RecordedStep, turn: OpenTurn) -> NewAnswer:
        """Gets the candidate's answer and stores the turn. An answer that another process has received is not asked
        for again.
        """
        replay_conversation, recorded, next_attempt = self._opened(), step.recorded, turn.next_attempt

        def substitute(prepared: PreparedPayload, own: NewAnswer) -> NewAnswer:
            if not self._is_forced or recorded is None:
                return own
            return force_answer(recorded, recorded_step, prepared, own, spare_attempt=next_attempt)

        def first_attempt(prepared: PreparedPayload) -> int:
            has_spare = self._is_forced and recorded is not None and needs_stand_in(prepared, recorded, recorded_step)
            return next_attempt + has_spare

        own = turn.find_answer(self._tools.folds)
        if own is not None:
            stored = substitute(await self._prepare(), own)
            await run_to_completion(replay_conversation.finish_turn(turn, stored))
            return own
        lease = turn.lease
        live = LiveTurn(
            tenant_id=self._tenant_id,
            conversation_id=lease.conversation_id,
            input_seq=lease.turn_seq - 1,
            seq=lease.turn_seq,
        )
        rules = BatchRules(
            admission=self._admission.limits(recorded_step.call),
            substitute=substitute,
            first_attempt=first_attempt,
            earlier_ends=turn.ends,
        )
        runner = TurnRunner(self._turns, self._tenant_id, lease, live, began=time.monotonic(), batch=rules)
        await runner.run()
        if runner.finished is None:
            raise Internal("A turn that has run is stored.")
        own, finished = runner.finished
        replay_conversation.turn_finished(finished)
        return own

    async def _pass(self, step: WalkStep, recorded_step: RecordedStep, turn: OpenTurn) -> None:
        """Stores a recorded answer that broke off. The candidate is not asked."""
        if step.recorded is None:
            raise Internal("A step without a recorded answer is asked.")
        prepared, request = None, b""
        if recorded_step.call is not None:
            prepared = await self._prepare()
            request = await prepared.provider.encode_request(prepared.built.payload)
        request_hash = hashlib.sha256(request).digest()
        answer = pass_answer(step.recorded, recorded_step, prepared, turn.next_attempt, request_hash)
        await self._opened().finish_turn(turn, answer)

    async def _prepare(self) -> PreparedPayload:
        source = await self._preparation.load(self._tenant_id, self._opened().id)
        return await self._preparation.prepare(self._tenant_id, source)

    async def _record(
        self, step: WalkStep, recorded_step: RecordedStep, answer: CandidateAnswer | None, next_step: NextStep
    ) -> None:
        note = WalkEnd.NO_RECORDED_RESULT if next_step.missing_ids else next_step.end
        result = build_result(
            step,
            answer,
            recorded_step.call,
            note=None if note is None else note.value,
            judge=await self._ask_judge(step, answer),
        )
        if answer is not None and self._draft.assertions:
            subject = build_subject(step, answer, result)
            checked = await self._tools.assertions.check(self._tenant_id, self._draft.assertions, subject)
            result = replace(result, assertions=checked)
        await self._tools.replays.record_result(self._claimed.lease, result, () if answer is None else answer.blocks)
        self._tools.observer.result_recorded(result.outcome)

    async def _ask_judge(self, step: WalkStep, answer: CandidateAnswer | None) -> JudgeResult | None:
        recorded = step.recorded
        if self._judge is None or answer is None or answer.error_code is not None:
            return None
        if recorded is None or not is_comparable(recorded):
            return None
        return await self._judge.ask(self._opened().id, step, recorded.blocks, answer.blocks)

    def _opened(self) -> ReplayConversation:
        if self._replay_conversation is None:
            raise Internal("The replay conversation is not open.")
        return self._replay_conversation


def _candidate_answer(own: NewAnswer, turn_seq: int) -> CandidateAnswer:
    if own.start is None or own.end is None:
        raise Internal("A candidate that was asked has a call.")
    return CandidateAnswer(
        blocks=own.blocks,
        stop_reason=own.stop_reason,
        error_code=own.error_code,
        call=Call(turn_seq=turn_seq, start=own.start, end=own.end),
        usage=own.usage,
        cost_usd=own.cost_usd,
    )


def _go_on(walk: Walk, answer: CandidateAnswer | None) -> NextStep:
    if answer is None:
        return walk.go_on((), complete=True)
    return walk.go_on(answer.blocks, complete=answer.error_code is None)


def _is_hopeless(answer: CandidateAnswer, next_step: NextStep) -> bool:
    codes = {error.code for error in _HOPELESS}
    return next_step.end is WalkEnd.CANDIDATE_FAILED or answer.error_code in codes
