"""Values of replays as JSON.

`to_json` encodes drafts and results as they are stored, and `*_from_json` decodes them to equal values. Times are ISO
8601; amounts are text.

`replay_to_json`, `estimate_to_json`, `item_to_json`, `result_to_json` and `report_to_json` encode values for the API,
the terminal and exports. There, the amounts of replays, items and estimates are numbers.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from server.conversation.assistant import Instructions, Tool
from server.conversation.block import JsonValue
from server.conversation.payload import LayerOrder
from server.conversation.turn import StopReason
from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectedState, InspectionFilter
from server.replay.rerun.replay import (
    Assertion,
    Candidate,
    Judge,
    OnMissingResult,
    Replay,
    ReplayDraft,
    ReplayEstimate,
    ReplayItem,
    ReplayLimits,
    ReplayMode,
    Selection,
)
from server.replay.rerun.report import ReplayReport
from server.replay.rerun.result import AnswerFacts, AssertionResult, JudgeResult, StoredResult

_AMOUNTS: Final = ("cost_from", "cost_to")
_TIMES: Final = ("active_after", "active_before")


def to_json(value: Any) -> JsonValue:
    """Encode any value of a replay, with all members in their order."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(member) for member in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}"
    # Members of a StrEnum become plain texts.
    return str(value) if isinstance(value, str) else value


def draft_from_json(item: Mapping[str, Any]) -> ReplayDraft:
    """Decode a draft."""
    judge = item["judge"]
    return ReplayDraft(
        name=item["name"],
        selection=_selection_from(item["selection"]),
        candidate=_candidate_from(item["candidate"]),
        mode=ReplayMode(item["mode"]),
        on_missing_result=OnMissingResult(item["on_missing_result"]),
        limits=_limits_from(item["limits"]),
        assertions=tuple(Assertion(**assertion) for assertion in item["assertions"]),
        judge=None if judge is None else Judge(**judge),
    )


def facts_from_json(item: Mapping[str, Any] | None) -> AnswerFacts | None:
    """Decode the facts of an answer."""
    if item is None:
        return None
    reason = item["stop_reason"]
    return AnswerFacts(
        **dict(item)
        | {
            "stop_reason": None if reason is None else StopReason(reason),
            "usage": Usage(**item["usage"]),
            "cost_usd": _amount(item["cost_usd"]),
        }
    )


def assertions_from_json(items: list[Mapping[str, Any]]) -> tuple[AssertionResult, ...]:
    """Decode the results of assertions."""
    return tuple(AssertionResult(**item) for item in items)


def judge_result_from_json(item: Mapping[str, Any] | None) -> JudgeResult | None:
    """Decode the rating of a judge."""
    return None if item is None else JudgeResult(**item)


def replay_to_json(replay: Replay) -> dict[str, Any]:
    """Encode a replay."""
    return _encode(
        {
            "id": replay.id,
            "name": replay.draft.name,
            "state": replay.state,
            "mode": replay.draft.mode,
            "draft": replay.draft,
            "item_count": replay.item_count,
            "items": replay.item_counts,
            "spent_usd": float(replay.spent_usd),
            "spent_tokens": replay.spent_tokens,
            "reserved_usd": float(replay.reserved_usd),
            "unpriced_count": replay.unpriced_count,
            "created_at": replay.created_at,
            "created_by": replay.created_by,
            "ended_at": replay.ended_at,
        }
    )


def estimate_to_json(estimate: ReplayEstimate) -> dict[str, Any]:
    """Encode an estimate."""
    return {
        **_encode(estimate),
        "cost_usd": _number(estimate.cost_usd),
        "uncached_cost_usd": _number(estimate.uncached_cost_usd),
    }


def item_to_json(item: ReplayItem) -> dict[str, Any]:
    """Encode an item, without its lease and its replay conversation."""
    hidden = {"replay_id", "replay_conversation_id", "owner", "lease_expires_at"}
    members = {name: value for name, value in _encode(item).items() if name not in hidden}
    return {**members, "spent_usd": float(item.spent_usd)}


def result_to_json(stored: StoredResult) -> dict[str, Any]:
    """Encode a result."""
    return {
        "item": stored.number,
        "conversation_id": stored.conversation_id,
        "repetition": stored.repetition,
        **_encode(stored.result),
    }


def report_to_json(report: ReplayReport) -> dict[str, Any]:
    """Encode a report."""
    return {"same_share": report.same_share, **_encode(report)}


def _selection_from(item: Mapping[str, Any]) -> Selection:
    ids = item["conversation_ids"]
    return Selection(
        conversation_ids=None if ids is None else tuple(ids),
        filters=_filters_from(item["filters"]),
        sample_count=item["sample_count"],
        sample_seed=item["sample_seed"],
    )


def _filters_from(item: Mapping[str, Any]) -> InspectionFilter:
    read: dict[str, Any] = dict(item)
    read |= {name: _amount(item[name]) for name in _AMOUNTS}
    read |= {name: None if item[name] is None else datetime.fromisoformat(item[name]) for name in _TIMES}
    read["state"] = None if item["state"] is None else InspectedState(item["state"])
    read["stop_reason"] = None if item["stop_reason"] is None else StopReason(item["stop_reason"])
    return InspectionFilter(**read)


def _candidate_from(item: Mapping[str, Any]) -> Candidate:
    instructions, tools, order = item["instructions"], item["tools"], item["layer_order"]
    return Candidate(
        **dict(item)
        | {
            "instructions": None if instructions is None else Instructions(**instructions),
            "tools": None if tools is None else tuple(Tool(**tool) for tool in tools),
            "layer_order": None if order is None else LayerOrder(order),
        }
    )


def _limits_from(item: Mapping[str, Any]) -> ReplayLimits:
    return ReplayLimits(**dict(item) | {"budget_usd": _amount(item["budget_usd"])})


def _amount(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)


def _encode(value: Any) -> dict[str, Any]:
    encoded: Any = to_json(value)
    return dict(encoded)


def _number(value: Decimal | None) -> float | None:
    return None if value is None else float(value)
