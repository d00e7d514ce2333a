"""Explanations of how calls ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.caching.expectation import MissReason
from server.conversation.call import Call
from server.conversation.errors import every_error
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import Usage
from server.inspection.call_explanation import (
    PROVIDER_UNKNOWN,
    UNREADABLE,
    CacheVerdict,
    OutcomeKind,
    explain_cache,
    explain_error,
    explain_miss,
    explain_outcome,
    explain_repair,
    explain_stop,
    explain_template,
    explain_warning,
    explain_withheld,
)
from server.inspection.judge_payload import JUDGE
from server.payload import history
from server.payload import messages as history_messages
from server.payload.signatures import WithheldReason
from server.replay.rerun.answers import NOT_ASKED
from server.replay.rerun.conversation import CALL_LOST
from tests.support.builders import A_TIME, call_end, call_start


def call(expected: int | None, read: int, reason: str | None = None, fresh: int = 100) -> Call:
    usage = Usage(fresh_input_tokens=fresh, cache_read_tokens=read)
    return Call(
        turn_seq=2,
        start=call_start(cache_expected_tokens=expected),
        end=call_end(usage=usage, cache_miss_reason=reason),
    )


def turn(**changes: Any) -> ModelResponseTurn:
    made = ModelResponseTurn(
        seq=2,
        created_at=A_TIME,
        blocks=(),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.END_TURN,
        error_code=None,
        provider="gemini",
        model="gemini-3.1-pro-preview",
        usage=Usage(),
        cost_usd=None,
        attempt=1,
        revision=2,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (call(1000, 1000), CacheVerdict.AS_EXPECTED),
        (call(1000, 960), CacheVerdict.AS_EXPECTED),
        (call(1000, 2000), CacheVerdict.MORE),
        (call(1000, 0), CacheVerdict.MISS),
        (call(0, 0), CacheVerdict.NOTHING),
        (call(0, 0, MissReason.BELOW_MINIMUM), CacheVerdict.LESS),
        (call(0, 0, MissReason.PREFIX_BREAK), CacheVerdict.MISS),
        (call(1000, 0, "system_changed"), CacheVerdict.MISS),
        (call(1000, 0, MissReason.TTL_EXPIRED), CacheVerdict.MISS),
        (call(0, 500), CacheVerdict.MORE),
        (call(None, 500), CacheVerdict.UNKNOWN),
        (call(1000, 0, fresh=0), CacheVerdict.UNKNOWN),
        (replace(call(1000, 0), end=None), CacheVerdict.UNKNOWN),
    ],
)
def test_the_cache_result_is_explained(made: Call, verdict: CacheVerdict) -> None:
    found = explain_cache(made)

    assert found.verdict is verdict
    assert found.explanation.endswith(".")


def test_the_end_of_a_call_is_explained() -> None:
    done = call(0, 0)
    assert explain_outcome(done, turn(), "tool_use").explanation == "The model called tools."
    assert explain_outcome(done, turn(state=TurnState.CANCELLED), None).kind is OutcomeKind.STOPPED
    # Another attempt was cancelled, not this one.
    assert explain_outcome(done, turn(state=TurnState.CANCELLED, attempt=2), None).kind is OutcomeKind.ANSWERED
    assert explain_outcome(replace(done, end=None), None, None).kind is OutcomeKind.RUNNING
    assert explain_outcome(replace(done, end=None), turn(), None).kind is OutcomeKind.LOST
    failed = explain_outcome(replace(done, end=call_end(error_code="provider_overloaded")), turn(), None)
    assert failed.kind is OutcomeKind.FAILED
    assert failed.explanation == "The provider is overloaded."


def test_every_recorded_code_has_a_sentence() -> None:
    assert all(explain_miss(reason).endswith(".") for reason in MissReason)
    assert all("provider's reason" not in explain_miss(reason) for reason in MissReason)
    assert explain_miss("system_changed") == "The provider's reason: system_changed."
    assert all(explain_withheld(reason) != reason for reason in WithheldReason)
    assert all(explain_stop(reason) for reason in StopReason)
    assert all(explain_error(kind.code).message for kind in every_error())
    assert explain_error("nonsense").message == ""
    assert explain_error(PROVIDER_UNKNOWN).message
    assert explain_error(UNREADABLE).message
    for kind in ("parse", "render", "too_long", "too_large", "not_json"):
        assert explain_template({"kind": kind})
    for kind in ("profile_assumed", "prefix_break", "summary", "signed_compaction"):
        assert explain_warning({"kind": kind})
    withheld = {"kind": "signatures_withheld", "reason": "provider", "seqs": [2]}
    assert explain_warning(withheld) == "Answers were sent without their signatures: another provider made it."
    assert explain_warning({"kind": "new"}) == ""


REPAIRS = (
    "answer_left_out",
    "task_joined",
    "task_supplied",
    "call_abandoned",
    "result_supplied",
    "orphan_result_dropped",
    "repeated_result_dropped",
    "call_renamed",
)


@pytest.mark.parametrize("kind", REPAIRS)
def test_every_repair_has_a_sentence(kind: str) -> None:
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (history, history_messages)]

    assert any(f'"{kind}"' in source for source in sources)
    assert explain_repair({"kind": kind}).endswith(".")


def test_errors_that_only_replayed_calls_have_are_explained() -> None:
    assert all(explain_error(code).message for code in (NOT_ASKED, CALL_LOST))
    assert all(explain_warning({"kind": kind}) for kind in (NOT_ASKED, JUDGE))
