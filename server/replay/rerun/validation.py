"""Validation of a replay's draft before it is stored. The candidate is checked by `candidate`."""

import json
from collections.abc import Iterator
from typing import Final

from server.conversation.errors import ValidationFailed
from server.payload.settings import check_settings
from server.providers.choice import KEY_VARIABLES
from server.providers.model_name import find_name_fault
from server.replay.rerun.json_codec import to_json
from server.replay.rerun.replay import (
    CONVERSATION_LIMIT,
    ITEM_LIMIT,
    PARALLELISM_LIMIT,
    REPETITION_LIMIT,
    Assertion,
    Judge,
    ReplayDraft,
    ReplayLimits,
    Selection,
)

_NAME_LIMIT: Final = 200
_ASSERTION_LIMIT: Final = 100
_ASSERTIONS_CHARS: Final = 1_000_000
"""Of all assertions as JSON. They are sent to the evaluating process with every answer."""
_CALLS_LIMIT: Final = 1_000_000
_TOKENS_LIMIT: Final = 2**62
_USD_LIMIT: Final = 10**9


def check_draft(draft: ReplayDraft) -> None:
    """Check a draft. Raises `ValidationFailed` with every invalid field."""
    faults = [*_find_name_faults(draft.name), *_find_selection_faults(draft.selection)]
    faults += [*find_limit_faults(draft.limits), *_find_assertion_faults(draft.assertions)]
    if draft.judge is not None:
        faults += _find_judge_faults(draft.judge)
    refuse(faults)


def check_size(conversation_count: int, limits: ReplayLimits) -> None:
    """Check the number of conversations and items. Raises `ValidationFailed`."""
    if not conversation_count:
        refuse([("selection", "No conversation matches.")])
    if conversation_count > CONVERSATION_LIMIT or conversation_count * limits.repetitions > ITEM_LIMIT:
        sizes = f"{CONVERSATION_LIMIT} conversations, and {ITEM_LIMIT} items with all repetitions"
        refuse([("selection", f"A replay has at most {sizes}. Use a sample.")])


def find_limit_faults(limits: ReplayLimits) -> Iterator[tuple[str, str]]:
    """Yield invalid fields, each with a message."""
    if not 1 <= limits.repetitions <= REPETITION_LIMIT:
        yield "limits.repetitions", f"This takes a number from 1 to {REPETITION_LIMIT}."
    if not 1 <= limits.parallelism <= PARALLELISM_LIMIT:
        yield "limits.parallelism", f"This takes a number from 1 to {PARALLELISM_LIMIT}."
    if limits.calls_per_minute is not None and not 1 <= limits.calls_per_minute <= _CALLS_LIMIT:
        yield "limits.calls_per_minute", f"This takes a number from 1 to {_CALLS_LIMIT}."
    if limits.budget_tokens is not None and not 1 <= limits.budget_tokens <= _TOKENS_LIMIT:
        yield "limits.budget_tokens", "This takes a positive number."
    if limits.budget_usd is not None and not (limits.budget_usd.is_finite() and 0 < limits.budget_usd <= _USD_LIMIT):
        yield "limits.budget_usd", f"This takes an amount above 0, at most {_USD_LIMIT}."


def refuse(faults: list[tuple[str, str]]) -> None:
    """Raise `ValidationFailed` if there are faults, given as fields and messages."""
    errors = [{"path": path, "source": "body", "message": message} for path, message in faults]
    if errors:
        raise ValidationFailed(f"{errors[0]['path']}: {errors[0]['message']}", errors=errors)


def _find_name_faults(name: str) -> Iterator[tuple[str, str]]:
    if not name.strip() or len(name) > _NAME_LIMIT:
        yield "name", f"This takes a text of at most {_NAME_LIMIT} characters."


def _find_selection_faults(selection: Selection) -> Iterator[tuple[str, str]]:
    ids = selection.conversation_ids
    if ids is not None and (not ids or len(ids) > CONVERSATION_LIMIT):
        yield "selection.conversation_ids", f"This takes 1 to {CONVERSATION_LIMIT} ids."
    elif ids is not None and len(set(ids)) != len(ids):
        yield "selection.conversation_ids", "An id occurs twice. Use `limits.repetitions` to repeat conversations."
    if selection.sample_count is not None and not 1 <= selection.sample_count <= CONVERSATION_LIMIT:
        yield "selection.sample_count", f"This takes a number from 1 to {CONVERSATION_LIMIT}."


def _find_assertion_faults(assertions: tuple[Assertion, ...]) -> Iterator[tuple[str, str]]:
    if len(assertions) > _ASSERTION_LIMIT:
        yield "assertions", f"At most {_ASSERTION_LIMIT} assertions are allowed."
    if len(json.dumps(to_json(assertions), ensure_ascii=False)) > _ASSERTIONS_CHARS:
        yield "assertions", f"All assertions together have at most {_ASSERTIONS_CHARS} characters as JSON."
    names = [assertion.name for assertion in assertions]
    if len(set(names)) != len(names):
        yield "assertions", "Each assertion needs a unique name."
    for position, assertion in enumerate(assertions):
        if not assertion.name.strip() or (assertion.expression is None) == (assertion.schema is None):
            yield f"assertions.{position}", "This takes a name, and either an expression or a schema."


def _find_judge_faults(judge: Judge) -> Iterator[tuple[str, str]]:
    if not judge.prompt.strip():
        yield "judge.prompt", "This takes a text."
    if judge.provider not in KEY_VARIABLES:
        yield "judge.provider", f"There is no provider called {judge.provider}."
        return
    if fault := find_name_fault(judge.provider, judge.model):
        yield "judge.model", fault
        return
    try:
        check_settings(judge.provider, judge.model, judge.settings)
    except ValidationFailed as error:
        yield "judge.settings", error.message
