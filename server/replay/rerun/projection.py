"""Replays, items, results, reports and estimates as JSON values, the same for the API, the terminal and exports.

Times are ISO 8601. Amounts of replays and items are numbers; those of answers are text, as they are stored.
"""

from decimal import Decimal
from typing import Any

from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.full_results import FullResult
from server.replay.rerun.json_codec import to_json
from server.replay.rerun.replay import Replay, ReplayEstimate, ReplayItem
from server.replay.rerun.report import ReplayReport
from server.replay.rerun.result import StoredResult


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
        "cost_usd": _amount(estimate.cost_usd),
        "uncached_cost_usd": _amount(estimate.uncached_cost_usd),
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


def full_result_to_json(full: FullResult) -> dict[str, Any]:
    """Encode a result with the task and both answers."""
    return {
        **result_to_json(full.stored),
        "task": full.task,
        "recorded_answer": None if full.recorded is None else _content_to_json(full.recorded),
        "candidate_answer": _content_to_json(full.candidate),
    }


def report_to_json(report: ReplayReport) -> dict[str, Any]:
    """Encode a report."""
    return {"same_share": report.same_share, **_encode(report)}


def calls_to_json(content: AnswerContent) -> list[dict[str, Any]]:
    """Encode the tool calls of an answer."""
    return [{"name": call.name, "arguments": dict(call.arguments)} for call in content.calls]


def _content_to_json(content: AnswerContent) -> dict[str, Any]:
    return {"text": content.text, "tool_calls": calls_to_json(content)}


def _encode(value: Any) -> dict[str, Any]:
    encoded: Any = to_json(value)
    return dict(encoded)


def _amount(value: Decimal | None) -> float | None:
    return None if value is None else float(value)
