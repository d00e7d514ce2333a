"""Replays, one item after the other, with the emulators: requests, comparisons and marks."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.conversation.assistant import Instructions
from server.conversation.audit import OPERATOR
from server.conversation.call import Call
from server.conversation.errors import PriceUnknown, ValidationFailed
from server.conversation.turn import ModelResponseTurn, StopReason, ToolResponseTurn, TurnState
from server.conversation.usage import add_usages
from server.emulator.reply import Fault, FaultKind
from server.payload.dynamic_clock import decode_clock
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from server.providers.continuation import continued_attempts
from server.replay.rerun.replay import (
    Assertion,
    Candidate,
    ItemState,
    Judge,
    OnMissingResult,
    Replay,
    ReplayLimits,
    ReplayMode,
    ReplayState,
)
from server.replay.rerun.result import DivergenceKind, Outcome
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    eventually,
    messages_of,
    start_driver,
    text_reply,
    tool_reply,
    until_asked,
)
from tests.support.emulators import BOTH, MODELS, EmulatedProviders
from tests.support.replay_driver import (
    arm_again,
    create_replay,
    draft_of,
    items_of,
    results_of,
    run_replay,
    shadow_calls,
    shadow_turns,
)
from tests.support.turn_steps import steps, take_step

PAUSE = Fault(kind=FaultKind.PAUSE)


class TestTeacherForced:
    @pytest.mark.parametrize("provider", BOTH)
    @settings(max_examples=4)
    @example(taken=[("tools", "Hi", 2), ("fail", 4), ("task", "Again", True), ("args", "x"), ("tools", "So", 1)])
    @example(taken=[("leave", 1), ("switch", BOTH[0]), ("leave", 1), ("switch", BOTH[1]), ("leave", 2), ("cancel", 1)])
    @given(taken=st.lists(steps, min_size=1, max_size=5))
    async def test_an_unchanged_candidate_sends_the_recorded_bytes_and_does_not_diverge(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str, taken: list[tuple[Any, ...]]
    ) -> None:
        program, tenant_id = strata_server.program, strata_server.tenant.id
        driver = await start_driver(program, tenant_id, emulated, provider)
        for step in taken:
            await take_step(driver, step)
        turns = await driver.turns()
        recorded = {call.turn_seq: call for call in await driver.calls()}
        arm_again(emulated, turns)

        replay = await run_replay(program, tenant_id, draft_of([driver.conversation_id]))

        if not turns:
            return
        answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
        sent = await shadow_calls(program, replay)
        whole = [turn.seq for turn in answers if turn.state is TurnState.COMPLETE]
        assert {seq: sent[seq].start.request_hash for seq in whole} == {
            seq: recorded[seq].start.request_hash for seq in whole
        }
        results = await results_of(program, replay)
        assert [result.outcome for result in results] == [
            Outcome.SAME if turn.state is TurnState.COMPLETE else Outcome.NOT_COMPARED for turn in answers
        ]
        assert replay.state is ReplayState.DONE
        assert [item.state for item in await items_of(program, replay)] == [ItemState.DONE]
        for name in BOTH:
            assert_all_accepted(emulated[name].requests())
            emulated[name].state.request_log.clear()

    @pytest.mark.parametrize("provider", BOTH)
    async def test_exactly_the_changed_answers_differ(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant_id = strata_server.program, strata_server.tenant.id
        driver = await _drive_conversation(strata_server, emulated, provider)
        changed = {4: tool_reply("Narvik"), 8: text_reply("Cold and very wet."), 10: text_reply("Fine.")}
        arm_again(emulated, await driver.turns(), changed)

        replay = await run_replay(program, tenant_id, draft_of([driver.conversation_id]))

        results = {result.source_seq: result for result in await results_of(program, replay)}
        assert {seq: result.kinds for seq, result in results.items() if result.outcome is not Outcome.SAME} == {
            4: (DivergenceKind.TOOL_ARGUMENTS,),
            8: (DivergenceKind.TEXT,),
        }
        assert results[8].similarity == pytest.approx(2 / 7)
        assert results[4].severity > results[8].severity > 0 == results[10].severity
        assert [item.diverged_at_seq for item in await items_of(program, replay)] == [4]
        assert results[10].candidate is not None
        assert results[10].candidate.usage.output_tokens > 0
        assert replay.spent_tokens > 0
        # The replay conversation continues with what was recorded.
        assert [turn.blocks for turn in await shadow_turns(program, replay)] == [
            turn.blocks for turn in await driver.turns()
        ]
        assert_all_accepted(emulated[provider].requests())

    @pytest.mark.parametrize("provider", BOTH)
    async def test_another_provider_accepts_the_recorded_history(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, provider)
        other = next(name for name in BOTH if name != provider)
        arm_again(emulated, await driver.turns())
        emulated[other].lines.turns.extend(emulated[provider].lines.turns)
        emulated[provider].lines.turns.clear()
        asked_before = len(emulated[provider].requests())

        candidate = Candidate(provider=other, model=MODELS[other])
        replay = await run_replay(
            strata_server.program, driver.tenant_id, draft_of([driver.conversation_id], candidate)
        )

        assert {result.outcome for result in await results_of(strata_server.program, replay)} == {Outcome.SAME}
        assert len(emulated[provider].requests()) == asked_before
        assert_all_accepted(emulated[other].requests())

    async def test_the_recorded_time_of_a_task_is_sent_in_the_other_order(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, GEMINI)
        arm_again(emulated, await driver.turns())
        times = [decode_clock(call.start.caching).input_time for call in await driver.calls()]
        emulated[ANTHROPIC].lines.turns.extend(emulated[GEMINI].lines.turns)
        emulated[GEMINI].lines.turns.clear()

        candidate = Candidate(provider=ANTHROPIC, model=MODELS[ANTHROPIC])
        await run_replay(strata_server.program, driver.tenant_id, draft_of([driver.conversation_id], candidate))

        sent = [messages_of(ANTHROPIC, request["body"])[-1] for request in emulated[ANTHROPIC].requests()]
        recorded = [json.loads(text)["current_datetime"] for text in times if text is not None]
        tasks = [message["content"][0]["text"] for message in sent if message["content"][0]["type"] == "text"]
        assert [json.loads(text)["current_datetime"] for text in tasks] == recorded

    async def test_thinking_is_withheld_after_another_prompt(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        """The emulated Claude refuses thinking that was created with another prompt."""
        driver = await _drive_conversation(strata_server, emulated, "anthropic")
        arm_again(emulated, await driver.turns())
        candidate = Candidate(variables={"tone": "gruff"}, templates={"anthropic_static_prompt.j2": "Be {{ tone }}."})
        replay = await run_replay(
            strata_server.program, driver.tenant_id, draft_of([driver.conversation_id], candidate)
        )
        assert {result.outcome for result in await results_of(strata_server.program, replay)} == {Outcome.SAME}
        assert "Be gruff." in str(emulated.anthropic.requests()[-1]["body"])
        assert_all_accepted(emulated.anthropic.requests())

    async def test_another_prompt_is_rendered_with_the_recorded_args(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, "gemini")
        for tone in ("calm", "stern", "mild"):
            await driver.change(args={"tone": tone})
            await driver.task(f"Be {tone}.", text_reply("Yes."))
        arm_again(emulated, await driver.turns())
        asked_before = len(emulated.gemini.requests())

        candidate = Candidate(templates={"gemini_static_prompt.j2": "Sound {{ tone }}, please."})
        await run_replay(strata_server.program, driver.tenant_id, draft_of([driver.conversation_id], candidate))

        asked = [str(request["body"]) for request in emulated.gemini.requests()[asked_before:]]
        tones = [re.findall(r"Sound (\w+), please", body) for body in asked]
        assert tones == [["calm"], ["stern"], ["mild"]]

    @pytest.mark.parametrize("provider", BOTH)
    async def test_a_recorded_compaction_after_an_answer_is_repeated_at_the_same_position(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant_id = strata_server.program, strata_server.tenant.id
        policy = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1}}
        driver = await start_driver(program, tenant_id, emulated, provider, settings=policy)
        for number in range(4):
            await driver.task(f"Task {number}.", tool_reply("Oslo"), text_reply(f"Answer {number}."))
            await program.compactor.compact(tenant_id, driver.conversation_id)
        recorded = {call.turn_seq: call.start for call in await driver.calls()}
        arm_again(emulated, await driver.turns())

        replay = await run_replay(program, tenant_id, draft_of([driver.conversation_id]))

        sent = {seq: call.start for seq, call in (await shadow_calls(program, replay)).items()}
        assert {seq: (start.epoch, start.request_hash) for seq, start in sent.items()} == {
            seq: (start.epoch, start.request_hash) for seq, start in recorded.items()
        }
        assert sent[16].epoch > sent[2].epoch
        assert {result.outcome for result in await results_of(program, replay)} == {Outcome.SAME}
        # With the policy off the same conversation is sent whole.
        arm_again(emulated, await driver.turns())
        candidate = Candidate(compaction={"policy": "off"})
        replay = await run_replay(program, tenant_id, draft_of([driver.conversation_id], candidate))
        whole = await shadow_calls(program, replay)
        assert {call.start.epoch for call in whole.values()} == {1}
        assert {result.outcome for result in await results_of(program, replay)} == {Outcome.SAME}
        assert_all_accepted(emulated[provider].requests())

    async def test_a_setting_that_the_model_does_not_support_fails_the_item_before_anything_is_sent(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "anthropic")
        asked_before = len(emulated.anthropic.requests())
        candidate = Candidate(settings={"temperature": 1})
        replay = await run_replay(
            strata_server.program, driver.tenant_id, draft_of([driver.conversation_id], candidate)
        )
        items = await items_of(strata_server.program, replay)
        assert [(item.state, item.error_code) for item in items] == [(ItemState.FAILED, "validation_failed")]
        assert len(emulated.anthropic.requests()) == asked_before


class TestFreeRunning:
    @pytest.mark.parametrize("provider", BOTH)
    async def test_recorded_tool_results_are_served_by_name_and_arguments(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        """The candidate calls all tools at once, in another order, and so needs a step less."""
        driver = await _drive_conversation(strata_server, emulated, provider)
        recorded = [turn for turn in await driver.turns() if isinstance(turn, ToolResponseTurn)]
        emulated[provider].lines.turns.clear()
        emulated[provider].queue_replies(
            tool_reply("Tromsø", "Bergen", "Oslo"),
            text_reply("Cold."),
            tool_reply("Bergen"),
            text_reply("Wet."),
            text_reply("Fine."),
        )
        draft = draft_of([driver.conversation_id], mode=ReplayMode.FREE_RUNNING)

        replay = await run_replay(strata_server.program, driver.tenant_id, draft)

        results = await results_of(strata_server.program, replay)
        assert [(result.position, result.source_seq, result.outcome) for result in results] == [
            (1, 2, Outcome.DIFFERENT),
            (2, 4, Outcome.DIFFERENT),
            (3, 8, Outcome.DIFFERENT),
            (4, None, Outcome.NOT_COMPARED),
            (5, 10, Outcome.SAME),
        ]
        assert results[0].kinds == (DivergenceKind.TOOL_MISSING,)
        assert results[1].kinds == (DivergenceKind.TOOL_MISSING, DivergenceKind.STOP_REASON, DivergenceKind.TEXT)
        assert len(recorded) == 2
        assert [item.diverged_at_seq for item in await items_of(strata_server.program, replay)] == [2]
        assert_all_accepted(emulated[provider].requests())

    @pytest.mark.parametrize(
        ("policy", "served", "place_count"),
        [
            (OnMissingResult.STOP, None, 1),
            (OnMissingResult.NEAREST, {"celsius": 4}, 4),
            (OnMissingResult.SYNTHETIC_ERROR, {"error": "No result was recorded for this call."}, 4),
        ],
    )
    async def test_a_call_without_a_recorded_result_follows_the_policy(
        self,
        strata_server: StrataServer,
        emulated: EmulatedProviders,
        policy: OnMissingResult,
        served: object,
        place_count: int,
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        emulated.gemini.lines.turns.clear()
        emulated.gemini.queue_replies(
            tool_reply("Narvik"), text_reply("Cold."), text_reply("Wet."), text_reply("Fine.")
        )
        draft = draft_of([driver.conversation_id], mode=ReplayMode.FREE_RUNNING, on_missing_result=policy)

        replay = await run_replay(strata_server.program, driver.tenant_id, draft)

        results = await results_of(strata_server.program, replay)
        assert len(results) == place_count
        assert (results[0].outcome, results[0].note) == (Outcome.DIFFERENT, "no_recorded_result")
        items = await items_of(strata_server.program, replay)
        assert [(item.state, item.diverged_at_seq) for item in items] == [(ItemState.DONE, 2)]
        outputs = [
            block.output
            for turn in await shadow_turns(strata_server.program, replay)
            if isinstance(turn, ToolResponseTurn)
            for block in turn.blocks
            if hasattr(block, "output")
        ]
        assert outputs == ([] if served is None else [served])
        assert_all_accepted(emulated.gemini.requests())


class TestPausedAnswers:
    @pytest.mark.parametrize("mode", ReplayMode)
    async def test_a_paused_answer_is_continued_as_one_turn(
        self, strata_server: StrataServer, emulated: EmulatedProviders, database: Database, mode: ReplayMode
    ) -> None:
        program = strata_server.program
        driver = await start_driver(program, strata_server.tenant.id, emulated, "anthropic", model="claude-fable-5-2")
        emulated.anthropic.queue_replies(PAUSE)
        await driver.task("Search for it.", text_reply("At last."))
        await driver.task("And then?", text_reply("That was all."))
        emulated.anthropic.queue_replies(PAUSE, PAUSE, text_reply("At last."), text_reply("That was all."))
        asked_before = len(emulated.anthropic.requests())

        replay = await run_replay(program, driver.tenant_id, draft_of([driver.conversation_id], mode=mode))

        results = await results_of(program, replay)
        assert [result.attempt for result in results] == [3, 1]
        assert results[1].outcome is Outcome.SAME
        assert results[0].candidate is not None
        assert (results[0].candidate.error_code, results[0].candidate.stop_reason) == (None, StopReason.END_TURN)
        calls = await _tries(strata_server, replay)
        assert [continued_attempts(call.start) for call in calls] == [(), (1,), (1, 2)]
        ends = [call.end for call in calls if call.end is not None]
        assert results[0].candidate.usage == add_usages([end.usage for end in ends])
        assert len(emulated.anthropic.requests()) - asked_before == 4
        assert replay.reserved_tokens == 0
        assert_all_accepted(emulated.anthropic.requests())
        # The whole answer is parsed from the bytes of all its calls, without another request.
        async with database.connection() as connection:
            await connection.execute("DELETE FROM replay_results; UPDATE replay_items SET state = 'waiting'")
            await connection.execute("UPDATE replays SET state = 'running'")
        await program.replays.items.run_all(replay.id)
        again = await results_of(program, replay)
        assert [(result.kinds, result.similarity) for result in again] == [
            (result.kinds, result.similarity) for result in results
        ]
        assert again[0].candidate is not None
        assert again[0].candidate.usage == results[0].candidate.usage
        assert len(emulated.anthropic.requests()) - asked_before == 4

    async def test_an_answer_whose_continuation_was_lost_is_requested_again(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program = strata_server.program
        driver = await start_driver(program, strata_server.tenant.id, emulated, "anthropic", model="claude-fable-5-2")
        emulated.anthropic.queue_replies(PAUSE)
        await driver.task("Search for it.", text_reply("At last."))
        replay = await create_replay(program, driver.tenant_id, draft_of([driver.conversation_id]))
        emulated.anthropic.queue_replies(PAUSE, Fault(kind=FaultKind.SILENCE, after_chunks=1))
        asked_before = len(emulated.anthropic.requests())
        running = asyncio.create_task(program.replays.items.run_all(replay.id))

        async def is_continued() -> bool:
            return len(emulated.anthropic.requests()) - asked_before == 2

        await eventually(is_continued)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        driver.calm()
        emulated.anthropic.queue_replies(PAUSE, text_reply("At last."))

        await program.replays.items.run_all(replay.id)

        assert [(result.outcome, result.attempt) for result in await results_of(program, replay)] == [(Outcome.SAME, 4)]
        codes = [None if call.end is None else call.end.error_code for call in await _tries(strata_server, replay)]
        assert codes == [None, "call_lost", None, None]


class TestLimits:
    async def test_a_budget_stops_the_replay_and_a_larger_one_continues_it(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        limits = ReplayLimits(repetitions=3, budget_tokens=4_000)
        replay = await run_replay(
            strata_server.program, driver.tenant_id, draft_of([driver.conversation_id], limits=limits)
        )
        assert replay.state is ReplayState.STOPPED_BY_BUDGET
        assert 0 < replay.spent_tokens <= 4_000
        assert replay.reserved_tokens == 0
        first = len(await results_of(strata_server.program, replay))
        assert first > 0

        replays = strata_server.program.replays.replays
        larger = ReplayLimits(repetitions=3, budget_tokens=1_000_000)
        await replays.continue_replay(driver.tenant_id, replay.id, actor=OPERATOR, limits=larger)
        # Turns after the creation of a replay are not part of it.
        await driver.task("Later.", text_reply("Yes."))
        before = len(emulated.gemini.requests())
        await strata_server.program.replays.items.run_all(replay.id)
        replay = await replays.load_replay(driver.tenant_id, replay.id)
        assert replay.state is ReplayState.DONE
        results = await results_of(strata_server.program, replay)
        assert len(results) == 15
        assert len(emulated.gemini.requests()) - before == 15 - first

    async def test_a_delay_of_the_provider_postpones_the_call(
        self, strata_server: StrataServer, emulated: EmulatedProviders, database: Database
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "anthropic")
        arm_again(emulated, await driver.turns())
        emulated.anthropic.inject_fault(FaultKind.RATE_LIMITED)
        emulated.anthropic.inject_fault(FaultKind.RATE_LIMITED, retry_after_seconds=1)
        replay = await run_replay(strata_server.program, driver.tenant_id, draft_of([driver.conversation_id]))
        results = await results_of(strata_server.program, replay)
        assert {result.outcome for result in results} == {Outcome.SAME}
        assert [result.attempt for result in results] == [3, 1, 1, 1, 1]
        # No call was sent during the delay, by this process or another.
        tries = [call.start.started_at for call in await _tries(strata_server, replay)]
        assert (tries[1] - tries[0]).total_seconds() >= 0.5
        assert (tries[2] - tries[1]).total_seconds() >= 1
        async with database.connection() as connection:
            held = await connection.fetchval("SELECT held_until FROM provider_holds WHERE provider = 'anthropic'")
        assert held > tries[1]

    async def test_the_failure_of_a_candidate_is_recorded_by_turn(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "anthropic")
        arm_again(emulated, await driver.turns())
        emulated.anthropic.inject_fault(FaultKind.MALFORMED_JSON)
        replay = await run_replay(strata_server.program, driver.tenant_id, draft_of([driver.conversation_id]))
        results = await results_of(strata_server.program, replay)
        assert [result.outcome for result in results] == [Outcome.FAILED, *[Outcome.SAME] * 4]
        assert results[0].kinds == (DivergenceKind.ERROR,)
        assert replay.state is ReplayState.DONE

    async def test_an_interrupted_item_is_released_and_continued(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        program = strata_server.program
        arm_again(emulated, await driver.turns())
        replay = await create_replay(program, driver.tenant_id, draft_of([driver.conversation_id]))
        for name in BOTH:
            emulated[name].inject_fault(FaultKind.SILENCE, after_chunks=2)
        running = asyncio.create_task(program.replays.items.run_all(replay.id))
        await until_asked(emulated)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [item.state for item in await items_of(program, replay)] == [ItemState.WAITING]

        driver.calm()
        arm_again(emulated, await driver.turns())
        await program.replays.items.run_all(replay.id)
        results = await results_of(program, replay)
        assert [(result.outcome, result.attempt) for result in results][:2] == [(Outcome.SAME, 2), (Outcome.SAME, 1)]
        assert [item.lost_count for item in await items_of(program, replay)] == [1]

    async def test_answers_are_compared_later_from_their_bytes_and_not_requested_again(
        self, strata_server: StrataServer, emulated: EmulatedProviders, database: Database
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        program = strata_server.program
        arm_again(emulated, await driver.turns())
        emulated.anthropic.queue_replies(*[text_reply('{"score": 1}')] * 5)
        judge = Judge(provider="anthropic", model=MODELS["anthropic"], prompt="Which one is better?")
        replay = await run_replay(program, driver.tenant_id, draft_of([driver.conversation_id], judge=judge))
        asked_before = len(emulated.gemini.requests()), len(emulated.anthropic.requests())
        async with database.connection() as connection:
            await connection.execute("DELETE FROM replay_results; UPDATE replay_items SET state = 'waiting'")
            await connection.execute("UPDATE replays SET state = 'running'")
            # By retention: deleted bytes cannot be compared, and are not treated as an empty answer.
            await connection.execute("UPDATE replay.calls SET raw_response = NULL WHERE turn_seq = 4")

        await program.replays.items.run_all(replay.id)

        results = await results_of(program, replay)
        gone = [Outcome.SAME, Outcome.FAILED, Outcome.SAME, Outcome.SAME, Outcome.SAME]
        assert [result.outcome for result in results] == gone
        assert results[1].candidate is not None
        assert results[1].candidate.error_code == "answer_gone"
        assert [None if result.judge is None else result.judge.score for result in results] == [1, None, 1, 1, 1]
        assert (len(emulated.gemini.requests()), len(emulated.anthropic.requests())) == asked_before

    async def test_an_answer_over_which_several_processes_have_died_is_abandoned(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        program = strata_server.program
        draft = draft_of([driver.conversation_id], mode=ReplayMode.FREE_RUNNING)
        replay = await create_replay(program, driver.tenant_id, draft)
        asked_before = len(emulated.gemini.requests())
        for _ in range(5):
            for name in BOTH:
                emulated[name].inject_fault(FaultKind.SILENCE, after_chunks=1)
            running = asyncio.create_task(program.replays.items.run_all(replay.id))
            await until_asked(emulated)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            driver.calm()

        await program.replays.items.run_all(replay.id)

        assert len(emulated.gemini.requests()) - asked_before == 5
        (item,) = await items_of(program, replay)
        assert (item.state, item.error_code, item.lost_count) == (ItemState.FAILED, "call_lost", 5)
        (result,) = await results_of(program, replay)
        assert (result.outcome, result.kinds) == (Outcome.FAILED, (DivergenceKind.ERROR,))


class TestAsking:
    async def test_a_draft_is_checked_planned_and_queued(
        self, strata_server: StrataServer, emulated: EmulatedProviders, database: Database
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        service = strata_server.program.replays.service
        limits = ReplayLimits(repetitions=3, parallelism=2)
        draft = draft_of([driver.conversation_id], limits=limits)
        judge = Judge(provider="anthropic", model=MODELS["anthropic"], prompt="?", settings={"temperature": 1})
        wrong = [
            (replace(draft, candidate=Candidate(settings={"thinking": "loud"})), "candidate.settings.thinking"),
            (replace(draft, candidate=Candidate(templates={"other.j2": ""})), "candidate.templates.other.j2"),
            (
                replace(draft, candidate=Candidate(instructions=Instructions(roles="{{ system.current_date }}"))),
                "candidate.instructions",
            ),
            (replace(draft, assertions=(Assertion(name="a", expression="import"),)), "assertions.0"),
            (replace(draft, judge=judge), "judge.settings"),
        ]
        for faulty, path in wrong:
            with pytest.raises(ValidationFailed) as caught:
                await service.create(driver.tenant_id, faulty, actor=OPERATOR)
            assert caught.value.details["errors"][0]["path"] == path  # type: ignore[index]  # reason: details are objects
        unpriced = Judge(provider="gemini", model="gemini-99", prompt="Which one is better?")
        with pytest.raises(PriceUnknown):
            await service.create(
                driver.tenant_id,
                replace(draft, judge=unpriced, limits=replace(limits, budget_usd=Decimal(1))),
                actor=OPERATOR,
            )
        async with database.connection() as connection:
            await connection.execute("DELETE FROM pgqueuer")

        plan = await service.plan(driver.tenant_id, draft)
        replay = await service.create(driver.tenant_id, draft, actor=OPERATOR)

        assert (list(plan.conversation_ids), plan.estimate.call_count) == ([driver.conversation_id], 15)
        assert (replay.item_count, replay.state) == (3, ReplayState.RUNNING)
        async with database.connection() as connection:
            keys = [row["dedupe_key"] for row in await connection.fetch("SELECT dedupe_key FROM pgqueuer ORDER BY id")]
        assert keys == [f"replay:{replay.id}:0", f"replay:{replay.id}:1"]
        # The newest version is that of this moment, for every conversation.
        newest = replace(draft, candidate=Candidate(assistant_id=driver.assistant_id))
        pinned = await service.create(driver.tenant_id, newest, actor=OPERATOR)
        assert pinned.draft.candidate == Candidate(assistant_id=driver.assistant_id, assistant_version=1)


class TestAssertionsAndJudges:
    async def test_without_a_judge_no_judgement_is_requested(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        program = strata_server.program
        judge = Judge(provider="anthropic", model=MODELS["anthropic"], prompt="Which one is better?")
        replay = await create_replay(program, driver.tenant_id, draft_of([driver.conversation_id], judge=judge))
        asked_before = len(emulated.gemini.requests())
        items_runner = program.replays.items
        providers = {"gemini": items_runner.providers["gemini"]}
        await replace(items_runner, providers=providers).run_all(replay.id)
        items = await items_of(program, replay)
        assert [(item.state, item.error_code) for item in items] == [(ItemState.FAILED, "provider_not_configured")]
        assert len(emulated.gemini.requests()) == asked_before

    async def test_assertions_are_checked_and_answers_are_judged(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        driver = await _drive_conversation(strata_server, emulated, "gemini")
        arm_again(emulated, await driver.turns())
        # The judge is the other provider: one answer after the other is judged as it arrives.
        emulated.anthropic.queue_replies(
            *[text_reply('{"score": 0.5, "reason": "So so."}')] * 4, text_reply("No idea.")
        )
        assertions = (
            Assertion(name="short", expression="len(text) < 6 and stop_reason in ['end_turn', 'tool_use']"),
            Assertion(name="a city", schema={"properties": {"city": {"enum": ["Oslo"]}}}, tool_name="get_weather"),
        )
        judge = Judge(provider="anthropic", model=MODELS["anthropic"], prompt="Which one is better?")
        draft = draft_of([driver.conversation_id], assertions=assertions, judge=judge)

        replay = await run_replay(strata_server.program, driver.tenant_id, draft)

        results = await results_of(strata_server.program, replay)
        passed = [[check.passed for check in result.assertions] for result in results]
        assert passed == [[True, False], [True, False], [True, True], [True, True], [True, True]]
        judged = [result.judge for result in results]
        assert [verdict.score for verdict in judged if verdict is not None] == [0.5, 0.5, 0.5, 0.5, None]
        assert judged[-1] is not None
        assert judged[-1].error_code == "judge_unreadable"
        item = (await items_of(strata_server.program, replay))[0]
        assert item.replay_conversation_id is not None
        kept = await strata_server.program.replays.replay_store.list_calls(
            driver.tenant_id, item.replay_conversation_id, -1
        )
        assert len(kept) == 5
        assert replay.spent_tokens > sum(call.end.usage.input_tokens for call in kept if call.end is not None)
        # Five live answers, five of the candidate, five of the judge: each is counted in its own metric.
        async with httpx2.AsyncClient(base_url=strata_server.url) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        for counter, answers in (
            ("strata_calls_total{", 5),
            ('strata_replay_calls_total{.*purpose="answer"', 5),
            ('strata_replay_calls_total{.*purpose="judge"', 5),
            ('strata_replay_results_total{outcome="same"', 5),
            ('strata_replay_items_total{departure="done"', 1),
        ):
            assert sum(float(line.rpartition(" ")[2]) for line in lines if re.match(counter, line)) == answers


async def _tries(server: StrataServer, replay: Replay) -> Sequence[Call]:
    """Of the first answer."""
    item = (await items_of(server.program, replay))[0]
    assert item.replay_conversation_id is not None
    return await server.program.replays.replay_store.list_calls(replay.tenant_id, item.replay_conversation_id, 2)


async def _drive_conversation(server: StrataServer, emulated: EmulatedProviders, provider: str) -> ConversationDriver:
    """Answers 2, 4, 6 of one exchange, 8 and 10 of one each."""
    driver = await start_driver(server.program, server.tenant.id, emulated, provider)
    await driver.task("First.", tool_reply("Oslo", "Bergen"), tool_reply("Tromsø"), text_reply("Cold."), picture=True)
    await driver.task("Second.", text_reply("Wet."))
    ended = await driver.task("Third.", text_reply("Fine."))
    assert ended.turn.stop_reason is StopReason.END_TURN
    return driver
