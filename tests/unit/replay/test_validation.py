"""Validation of a replay draft."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from server.conversation.errors import ValidationFailed
from server.replay.rerun.replay import CONVERSATION_LIMIT, Assertion, Judge, ReplayDraft, ReplayLimits, Selection
from server.replay.rerun.validation import check_draft, check_size

GOOD = ReplayDraft(name="nightly", selection=Selection())


def limits(**changes: Any) -> ReplayDraft:
    return replace(GOOD, limits=ReplayLimits(**changes))


@pytest.mark.parametrize(
    "draft",
    [
        GOOD,
        limits(repetitions=100, parallelism=64, calls_per_minute=1, budget_tokens=1, budget_usd=Decimal("0.01")),
        replace(GOOD, selection=Selection(conversation_ids=("a", "b"), sample_count=1)),
        replace(GOOD, assertions=(Assertion(name="a", expression="1"), Assertion(name="b", schema={}))),
    ],
)
def test_a_valid_draft_is_accepted(draft: ReplayDraft) -> None:
    check_draft(draft)


@pytest.mark.parametrize(
    ("draft", "path"),
    [
        (replace(GOOD, name=" "), "name"),
        (replace(GOOD, name="x" * 201), "name"),
        (limits(repetitions=0), "limits.repetitions"),
        (limits(parallelism=65), "limits.parallelism"),
        (limits(calls_per_minute=0), "limits.calls_per_minute"),
        (limits(budget_tokens=0), "limits.budget_tokens"),
        (limits(budget_usd=Decimal(0)), "limits.budget_usd"),
        (limits(budget_usd=Decimal("NaN")), "limits.budget_usd"),
        (replace(GOOD, selection=Selection(conversation_ids=())), "selection.conversation_ids"),
        (replace(GOOD, selection=Selection(conversation_ids=("a", "a"))), "selection.conversation_ids"),
        (replace(GOOD, selection=Selection(sample_count=0)), "selection.sample_count"),
        (replace(GOOD, assertions=(Assertion(name="a"),)), "assertions.0"),
        (replace(GOOD, assertions=(Assertion(name="a", expression="1", schema={}),)), "assertions.0"),
        (replace(GOOD, assertions=(Assertion(name="a", expression="1"),) * 2), "assertions"),
        (replace(GOOD, assertions=(Assertion(name="a", schema={"const": "x" * 1_000_000}),)), "assertions"),
        (replace(GOOD, judge=Judge(provider="gemini", model="m", prompt=" ")), "judge.prompt"),
    ],
)
def test_an_invalid_draft_is_refused_with_its_field(draft: ReplayDraft, path: str) -> None:
    with pytest.raises(ValidationFailed) as refused:
        check_draft(draft)
    errors: Any = refused.value.details["errors"]
    assert [error["path"] for error in errors] == [path]


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ValidationFailed) as refused:
        check_draft(replace(limits(repetitions=0, parallelism=0), name=""))
    errors: Any = refused.value.details["errors"]
    assert len(errors) == 3


@pytest.mark.parametrize(("count", "repetitions"), [(0, 1), (CONVERSATION_LIMIT + 1, 1), (CONVERSATION_LIMIT, 3)])
def test_a_selection_is_neither_empty_nor_unbounded(count: int, repetitions: int) -> None:
    check_size(CONVERSATION_LIMIT, ReplayLimits(repetitions=2))
    with pytest.raises(ValidationFailed):
        check_size(count, ReplayLimits(repetitions=repetitions))
