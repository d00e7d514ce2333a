"""One item of a replay, from its claim to its end.

Both modes are one loop over the steps of a walk: put the next input to the candidate, ask, write down what it said,
compare. In a teacher-forced replay conversation the recorded answer takes the candidate's place once it is given, so
that each one answers the recorded history; in a free-running one the candidate's own stays.

Every step is durable piece by piece, and whoever goes on finds out from the replay conversation and the results where
to:

| in the replay conversation                    | what is left to do                                                   |
|----------------------------------|----------------------------------------------------------------------|
| no input                         | all of the step                                                      |
| an input, and a call without end | the call is lost: it is ended, and another attempt made              |
| an answer, and no result         | the result, from the bytes of the stored call: nobody is asked again |
| an answer, and a result          | nothing: the next step                                               |
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from server.caching.policy import apply_caching
from server.conversation.assistant import AssistantDefinition
from server.conversation.call import Call, CallEnd
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import (
    Internal,
    ProviderAuthentication,
    ProviderNotConfigured,
    ProviderQuotaExceeded,
)
from server.conversation.manifest import encode_manifest
from server.conversation.shutdown import run_to_completion
from server.conversation.turn import ModelResponseTurn, TurnState
from server.payload.preparation import PayloadPreparation
from server.payload.renderer import Renderer
from server.providers.calls import REJECTIONS
from server.replay.rerun.answers import (
    NOT_ASKED,
    PreparedStep,
    forced_answer,
    have_same_blocks,
    own_answer,
    passed_answer,
)
from server.replay.rerun.call import CallOutcome, CandidateCalls, recall_outcome, retry_write
from server.replay.rerun.candidate import build_definition
from server.replay.rerun.compaction import ReplayCompaction, SourceLengths
from server.replay.rerun.conversation import OpenTurn, ReplayConversation, mark_arguments
from server.replay.rerun.judge import JudgeCalls
from server.replay.rerun.renderer import ReplayRenderer
from server.replay.rerun.replay import ClaimedItem, ItemState, ReplayDraft, ReplayMode
from server.replay.rerun.result import JudgeResult
from server.replay.rerun.source import RecordedStep, ReplaySource, list_turns, open_source
from server.replay.rerun.tools import ReplayTools
from server.replay.rerun.verdict import CandidateAnswer, build_result, build_subject, is_comparable
from server.replay.rerun.walk import NextStep, Walk, WalkEnd, WalkStep, open_walk

_HOPELESS: Final = (ProviderNotConfigured, ProviderAuthentication, ProviderQuotaExceeded)
"""With these no other turn of the conversation would fare better."""
_log = logging.getLogger("strata.replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemEnd:
    """How an item ended."""

    state: ItemState
    error_code: str | None = None


async def walk_item(tools: ReplayTools, claimed: ClaimedItem) -> ItemEnd:
    """Runs the item to its end.

    Raises `ItemHalted` where it cannot go on now, `LeaseLost` where it is somebody else's, `DatabaseUnavailable`, and
    any other `StrataError` that ends it.
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
        self._tools = tools
        self._claimed = claimed
        self._draft: ReplayDraft = claimed.draft
        self._is_forced = self._draft.mode is ReplayMode.TEACHER_FORCED
        self._tenant_id = claimed.tenant_id
        self._source = source
        renderer: Renderer = tools.renderer_of(self._draft.candidate.templates)
        self._renderer = ReplayRenderer(renderer, self._draft.candidate, source.conversation)
        self._preparation = PayloadPreparation(tools.replay_store, self._renderer, tools.providers, texts=tools.texts)
        self._calls = CandidateCalls(
            tools.replays,
            tools.replay_store,
            claimed.lease,
            estimate=tools.estimate,
            retry_policy=tools.retry_policy,
            shutdown=tools.shutdown,
            observer=tools.observer,
        )
        lengths = SourceLengths(tools.lengths, source.conversation.assistant_id)
        self._compaction = ReplayCompaction(tools.compactor_of, self._renderer, lengths, self._calls, self._tenant_id)
        self._judge = JudgeCalls(tools.replay_store, tools.providers, self._calls, self._draft.judge, self._tenant_id)
        self._chosen: AssistantDefinition | None = None
        self._recorded_step: RecordedStep | None = None
        self._passed: list[WalkStep] = []
        """Steps of the present exchange that were done before."""
        self._replay_conversation: ReplayConversation | None = None
        self._answers: Mapping[int, ModelResponseTurn] = {}

    async def open_replay_conversation(self, first: WalkStep) -> None:
        """The replay conversation, new or as its last runner left it."""
        self._judge.check()
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
            self._tools.replay_store, self._tenant_id, conversation, self._tools.owner
        )
        await self._replay_conversation.take_over()
        turns = await list_turns(self._tools.replay_store, self._tenant_id, conversation.id)
        self._answers = {turn.seq: turn for turn in turns if isinstance(turn, ModelResponseTurn)}

    async def walk(self, walk: Walk, next_step: NextStep) -> ItemEnd:
        """Step by step, over those that are done to the first that is not."""
        while (step := next_step.step) is not None:
            self._passed = [] if step.is_task else self._passed
            there = self._answers.get(2 * step.place)
            if there is not None and step.place <= self._claimed.result_count:
                self._passed.append(step)
                next_step = walk.go_on(there.blocks, complete=there.state is TurnState.COMPLETE)
                continue
            recorded_step = await self._stand_at(step)
            answer = await self._ask(step, recorded_step) if there is None else await self._recall(step)
            next_step = _go_on(walk, answer)
            await self._record(step, recorded_step, answer, next_step)
            if answer is not None and _is_hopeless(answer, next_step):
                return ItemEnd(state=ItemState.FAILED, error_code=answer.error_code)
        return ItemEnd(state=ItemState.DONE)

    async def _stand_at(self, step: WalkStep) -> RecordedStep:
        """What was recorded of the step, from now on also for the renderer."""
        for passed in self._passed:
            await self._look_at(passed)
        self._passed = []
        return await self._look_at(step)

    async def _look_at(self, step: WalkStep) -> RecordedStep:
        recorded_step = await self._load_recorded_step(step)
        self._renderer.stand_at(recorded_step, await self._definition_at(recorded_step), is_task=step.is_task)
        return recorded_step

    async def _load_recorded_step(self, step: WalkStep) -> RecordedStep:
        """Where nobody was, it is as it was before."""
        if step.recorded is not None:
            self._recorded_step = await self._source.load_recorded_step(step.recorded)
        if self._recorded_step is None:
            raise Internal("A walk begins where somebody was.")
        return self._recorded_step

    async def _definition_at(self, recorded_step: RecordedStep) -> AssistantDefinition:
        candidate = self._draft.candidate
        if candidate.assistant_id is None and candidate.assistant_version is None:
            return build_definition(recorded_step.definition, candidate)
        if self._chosen is None:
            chosen = await self._source.load_definition(candidate.assistant_id, candidate.assistant_version)
            self._chosen = build_definition(chosen, candidate)
        return self._chosen

    async def _ask(self, step: WalkStep, recorded_step: RecordedStep) -> CandidateAnswer | None:
        """None where nobody is asked, since the recorded answer is only history."""
        replay_conversation = self._opened()
        turn = replay_conversation.find_open_turn()
        if turn is None:
            definition = await self._definition_at(recorded_step)
            if step.place > 1:
                await self._compaction.compact(replay_conversation.id, definition)
            if step.is_task:
                args = mark_arguments(self._source.conversation.args, recorded_step.arguments_hash)
                await replay_conversation.follow(definition, args)
            turn = await replay_conversation.open_turn(step, await self._source.load_blobs(step.input.blocks))
        if not step.asks:
            await self._pass_by(step, recorded_step, turn)
            return None
        prepared_step = await self._ready(recorded_step)
        outcome = await self._listen(step, recorded_step, turn, prepared_step)
        await run_to_completion(self._write_down(step, recorded_step, turn, prepared_step, outcome))
        return CandidateAnswer(
            blocks=outcome.answer.blocks,
            stop_reason=outcome.answer.stop_reason,
            error_code=outcome.end.error_code,
            call=Call(turn_seq=turn.lease.turn_seq, start=outcome.start, end=outcome.end),
            ends=_ends_of(turn, outcome),
        )

    async def _listen(
        self, step: WalkStep, recorded_step: RecordedStep, turn: OpenTurn, prepared_step: PreparedStep
    ) -> CallOutcome:
        """What the candidate says, or has said to whoever ran the item before."""
        known = turn.answered or turn.given_up
        if known is not None:
            return recall_outcome(known, prepared_step.prepared.provider)
        recorded = step.recorded
        spares = (
            recorded is not None and self._is_forced and prepared_step.needs_stand_in(recorded, recorded_step.native)
        )
        return await self._calls.ask(
            turn.lease,
            prepared_step.prepared,
            first_attempt=turn.next_attempt + spares,
            recorded=recorded_step.call,
        )

    async def _write_down(
        self,
        step: WalkStep,
        recorded_step: RecordedStep,
        turn: OpenTurn,
        prepared_step: PreparedStep,
        outcome: CallOutcome,
    ) -> None:
        """The answer first: what is durable is never asked for again. Then what it came to."""
        replay_conversation, prepared = self._opened(), prepared_step.prepared
        ends = _ends_of(turn, outcome)
        if self._is_forced and step.recorded is not None:
            answer = forced_answer(
                step.recorded, recorded_step, prepared_step, outcome, ends, spare_attempt=turn.next_attempt
            )
            if answer.start is not outcome.start:
                await retry_write(lambda: replay_conversation.end_call(turn, outcome.start, outcome.end))
        else:
            answer = own_answer(prepared, outcome, ends)
        if isinstance(outcome.failure, REJECTIONS):
            # Sending the same again would fail every time. Before the turn ends: its request is what is looked at.
            await self._preparation.leave_out_rejected(self._tenant_id, prepared, outcome.failure)
        await retry_write(lambda: replay_conversation.end_turn(turn, answer))
        await self._calls.settle_outcome(outcome)

    async def _pass_by(self, step: WalkStep, recorded_step: RecordedStep, turn: OpenTurn) -> None:
        """Nobody is asked, since the recorded answer is no answer."""
        if step.recorded is None:
            raise Internal("What nobody has recorded is asked for.")
        prepared_step = None if recorded_step.call is None else await self._ready(recorded_step)
        answer = passed_answer(step.recorded, recorded_step, prepared_step, turn.next_attempt)
        await self._opened().end_turn(turn, answer)

    async def _ready(self, recorded_step: RecordedStep) -> PreparedStep:
        """The payload. One that says the same as the recorded one asks the same of the cache."""
        source = await self._preparation.load(self._tenant_id, self._opened().id)
        prepared = await self._preparation.prepare(self._tenant_id, source)
        start = None if recorded_step.call is None else recorded_step.call.start
        is_same = (
            start is not None
            and start.provider == prepared.provider.name
            and have_same_blocks(encode_manifest(prepared.built.manifest), start.manifest)
        )
        if is_same and start is not None and start.model == prepared.model and "cached_content" not in start.caching:
            payload = apply_caching(prepared.built.payload, start.caching)
            prepared = replace(prepared, built=replace(prepared.built, payload=payload))
        request = await prepared.provider.encode_request(prepared.built.payload)
        return PreparedStep(prepared=prepared, request=request, is_same_request=is_same)

    async def _recall(self, step: WalkStep) -> CandidateAnswer | None:
        """The answer of a step whose result nobody has written down, from the bytes of its call."""
        calls = await self._opened().list_calls(step.place)
        asked = [call for call in calls if call.end is not None and call.end.error_code != NOT_ASKED]
        if not asked:
            return None
        call = asked[-1]
        provider = self._tools.providers.get(call.start.provider)
        if provider is None:
            raise ProviderNotConfigured(f"This process has no key for {call.start.provider}.")
        outcome = recall_outcome(call, provider)
        return CandidateAnswer(
            blocks=outcome.answer.blocks,
            stop_reason=outcome.answer.stop_reason,
            error_code=outcome.end.error_code,
            call=call,
            ends=tuple(call.end for call in asked if call.end is not None),
        )

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
        if answer is None or answer.error_code is not None or recorded is None or not is_comparable(recorded):
            return None
        return await self._judge.ask(self._opened().id, step, recorded.blocks, answer.blocks)

    def _opened(self) -> ReplayConversation:
        if self._replay_conversation is None:
            raise Internal("A replay conversation is opened first.")
        return self._replay_conversation


def _ends_of(turn: OpenTurn, outcome: CallOutcome) -> tuple[CallEnd, ...]:
    """Of all calls that were made for a turn. The one that counts may have been made by another process."""
    before = (end for end in turn.ends if end is not outcome.end)
    return (*before, *outcome.earlier, outcome.end)


def _go_on(walk: Walk, answer: CandidateAnswer | None) -> NextStep:
    if answer is None:
        return walk.go_on((), complete=True)
    return walk.go_on(answer.blocks, complete=answer.error_code is None)


def _is_hopeless(answer: CandidateAnswer, next_step: NextStep) -> bool:
    codes = {error.code for error in _HOPELESS}
    return next_step.end is WalkEnd.CANDIDATE_FAILED or answer.error_code in codes
