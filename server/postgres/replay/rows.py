"""Decoding of rows of replays, and encoding of drafts and results for their columns."""

from dataclasses import replace
from typing import Any, Final

from server.conversation.identifiers import API_KEY, CONVERSATION, REPLAY, TENANT, encode_id
from server.postgres.codec import decode_json, decode_text, encode_json
from server.postgres.rows import Row, json_or_none, text_or_none
from server.replay.rerun.json_codec import (
    assertions_from_json,
    draft_from_json,
    facts_from_json,
    judge_result_from_json,
    to_json,
)
from server.replay.rerun.replay import ItemState, Replay, ReplayDraft, ReplayItem, ReplayLimits, ReplayState
from server.replay.rerun.result import DivergenceKind, Outcome, StoredResult, TurnResult

REPLAY_COLUMNS: Final = """
    r.*, (
        SELECT json_object_agg(counted.state, counted.total) FROM (
            SELECT i.state, count(*) AS total FROM replay_items i WHERE i.replay_id = r.id GROUP BY i.state
        ) AS counted
    ) AS item_counts
"""
"""Columns of `replays r` for `replay_from`."""
ITEM_COLUMNS: Final = """
    i.replay_id, i.number, i.conversation_id, i.repetition, i.state,
    i.replay_conversation_id, i.error_code, i.diverged_at_seq,
    i.spent_usd, i.spent_tokens, i.lost_count, i.started_at, i.ended_at,
    CASE WHEN i.state = 'running' THEN i.lease_owner END AS lease_owner,
    CASE WHEN i.state = 'running' THEN i.lease_expires_at END AS lease_expires_at
"""
"""Columns of `replay_items i` for `item_from`."""


def encode_draft(draft: ReplayDraft) -> str:
    """Encode a draft without the ids of its conversations, which the items name."""
    ids = None if draft.selection.conversation_ids is None else ()
    return encode_json(to_json(replace(draft, selection=replace(draft.selection, conversation_ids=ids))))


def replay_from(row: Row) -> Replay:
    """Decode a row of `REPLAY_COLUMNS`."""
    counts = json_or_none(row["item_counts"]) or {}
    return Replay(
        id=encode_id(REPLAY, row["id"]),
        tenant_id=encode_id(TENANT, row["tenant_id"]),
        draft=draft_from(row),
        state=ReplayState(row["state"]),
        item_count=row["item_count"],
        item_counts={state: counts.get(state.value, 0) for state in ItemState},
        spent_usd=row["spent_usd"],
        spent_tokens=row["spent_tokens"],
        reserved_usd=row["reserved_usd"],
        reserved_tokens=row["reserved_tokens"],
        unpriced_count=row["unpriced_count"],
        created_at=row["created_at"],
        created_by=None if row["created_by"] is None else encode_id(API_KEY, row["created_by"]),
        ended_at=row["ended_at"],
    )


def draft_from(row: Row) -> ReplayDraft:
    """Decode the draft in a row of `replays`, with the limits of the other columns."""
    return replace(draft_from_json(decode_json(row["draft"])), limits=limits_from(row))


def limits_from(row: Row) -> ReplayLimits:
    """Decode the limits in a row of `replays`."""
    return ReplayLimits(
        repetitions=row["repetitions"],
        parallelism=row["parallelism"],
        calls_per_minute=row["calls_per_minute"],
        budget_usd=row["budget_usd"],
        budget_tokens=row["budget_tokens"],
    )


def item_from(row: Row) -> ReplayItem:
    """Decode a row of `ITEM_COLUMNS`."""
    return ReplayItem(
        replay_id=encode_id(REPLAY, row["replay_id"]),
        number=row["number"],
        conversation_id=encode_id(CONVERSATION, row["conversation_id"]),
        repetition=row["repetition"],
        state=ItemState(row["state"]),
        replay_conversation_id=None
        if row["replay_conversation_id"] is None
        else encode_id(CONVERSATION, row["replay_conversation_id"]),
        error_code=text_or_none(row["error_code"]),
        diverged_at_seq=row["diverged_at_seq"],
        spent_usd=row["spent_usd"],
        spent_tokens=row["spent_tokens"],
        lost_count=row["lost_count"],
        owner=text_or_none(row["lease_owner"]),
        lease_expires_at=row["lease_expires_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )


def result_values(result: TurnResult) -> dict[str, Any]:
    """Encode a result for its columns."""
    return {
        "position": result.position,
        "source_seq": result.source_seq,
        "replay_seq": result.replay_seq,
        "attempt": result.attempt,
        "outcome": str(result.outcome),
        "kinds": [str(kind) for kind in result.kinds],
        "similarity": result.similarity,
        "severity": result.severity,
        "note": result.note,
        "recorded": None if result.recorded is None else encode_json(to_json(result.recorded)),
        "candidate": None if result.candidate is None else encode_json(to_json(result.candidate)),
        "assertions": encode_json(to_json(result.assertions)),
        "has_failed_assertion": any(not assertion.passed for assertion in result.assertions),
        "judge": None if result.judge is None else encode_json(to_json(result.judge)),
    }


def result_from(row: Row) -> StoredResult:
    """Decode a row of `replay_results` with the replay conversation of its item."""
    return StoredResult(
        number=row["number"],
        conversation_id=encode_id(CONVERSATION, row["conversation_id"]),
        repetition=row["repetition"],
        replay_conversation_id=None
        if row["replay_conversation_id"] is None
        else encode_id(CONVERSATION, row["replay_conversation_id"]),
        result=TurnResult(
            position=row["position"],
            source_seq=row["source_seq"],
            replay_seq=row["replay_seq"],
            attempt=row["attempt"],
            outcome=Outcome(decode_text(row["outcome"])),
            kinds=tuple(DivergenceKind(kind) for kind in row["kinds"]),
            similarity=row["similarity"],
            severity=row["severity"],
            note=text_or_none(row["note"]),
            recorded=facts_from_json(json_or_none(row["recorded"])),
            candidate=facts_from_json(json_or_none(row["candidate"])),
            assertions=assertions_from_json(decode_json(row["assertions"])),
            judge=judge_result_from_json(json_or_none(row["judge"])),
        ),
    )
