"""A replay is encoded as JSON and decoded without loss."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from server.conversation.assistant import Instructions, Tool
from server.conversation.payload import LayerOrder
from server.conversation.turn import StopReason
from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectedState, InspectionFilter
from server.replay.rerun.json_codec import (
    assertions_from_json,
    draft_from_json,
    facts_from_json,
    judge_result_from_json,
    to_json,
)
from server.replay.rerun.replay import (
    Assertion,
    Candidate,
    Judge,
    OnMissingResult,
    ReplayDraft,
    ReplayLimits,
    ReplayMode,
    Selection,
)
from server.replay.rerun.result import AnswerFacts, AssertionResult, JudgeResult
from tests.support.builders import NASTY

FULL = ReplayDraft(
    name=NASTY,
    selection=Selection(
        conversation_ids=("conv_a", "conv_b"),
        filters=InspectionFilter(
            model="m",
            state=InspectedState.FAILED,
            stop_reason=StopReason.LENGTH,
            has_repairs=True,
            cost_from=Decimal("0.10"),
            tokens_to=7,
            active_after=datetime(2026, 11, 1, tzinfo=UTC),
            text=NASTY,
        ),
        sample_count=5,
        sample_seed=-3,
    ),
    candidate=Candidate(
        provider="anthropic",
        model="claude-opus-5",
        assistant_id="asst_x",
        assistant_version=3,
        settings={"thinking": None, "temperature": 0.5},
        instructions=Instructions(roles=NASTY),
        variables={"b": 1, "a": 2},
        tools=(Tool(name="t", description=NASTY, parameters={"type": "object", "properties": {"z": {}, "a": {}}}),),
        layer_order=LayerOrder.APPEND_ONLY,
        compaction={"policy": "off"},
        templates={"gemini_static_prompt.j2": NASTY},
    ),
    mode=ReplayMode.FREE_RUNNING,
    on_missing_result=OnMissingResult.NEAREST,
    limits=ReplayLimits(repetitions=3, parallelism=2, calls_per_minute=60, budget_usd=Decimal("1.5"), budget_tokens=9),
    assertions=(
        Assertion(name="a", expression="len(text) < 3"),
        Assertion(name="b", schema={"type": "object"}, tool_name="t"),
    ),
    judge=Judge(provider="gemini", model="m", prompt=NASTY, settings={"temperature": 0}),
)


@pytest.mark.parametrize("draft", [FULL, ReplayDraft(name="least", selection=Selection())], ids=lambda d: len(d.name))
def test_a_draft_comes_back_as_it_was(draft: ReplayDraft) -> None:
    assert draft_from_json(json.loads(json.dumps(to_json(draft), ensure_ascii=False))) == draft


def test_the_order_of_keys_is_kept() -> None:
    (tool,) = draft_from_json(json.loads(json.dumps(to_json(FULL)))).candidate.tools or ()
    assert [*tool.parameters["properties"]] == ["z", "a"]


def test_the_facts_of_an_answer_come_back_unchanged() -> None:
    facts = AnswerFacts(
        stop_reason=StopReason.TOOL_USE,
        error_code="x",
        usage=Usage(fresh_input_tokens=1, cache_read_tokens=3, output_tokens=2),
        cost_usd=Decimal("0.0000000001"),
        latency_ms=3,
        first_byte_ms=1,
    )
    checks = (AssertionResult(name="a", passed=False, message=NASTY),)
    verdict = JudgeResult(score=0.5, reason=NASTY, error_code=None)
    assert facts_from_json(json.loads(json.dumps(to_json(facts)))) == facts
    assert facts.cache_share == 0.75
    assert AnswerFacts().cache_share is None
    assert facts_from_json(None) is None
    assert assertions_from_json(to_json(checks)) == checks
    assert judge_result_from_json(to_json(verdict)) == verdict
    assert judge_result_from_json(None) is None
