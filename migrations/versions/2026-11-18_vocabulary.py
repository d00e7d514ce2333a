"""Rename columns, stored words and comments to the field's terms: signed summaries, replay conversations, recovery.

Rules: it waits at most 4 s for a lock and works at most 60 s in one statement; what needs longer is split, or raises
the limit below with the reason. Once landed, this file is never edited.

This revision renames columns, so the previous release cannot serve while it runs. No release has been made yet.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261118_30"
down_revision: str | None = "20261118_20"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_SCHEMAS = ("public", "replay")
_COLUMNS = {
    "turns": {"written_under": "written_by_lease"},
    "epochs": {
        "opening": "signed_summary",
        "opening_start_seq": "signed_summary_start_seq",
        "opening_text": "signed_summary_text",
        "opening_tokens": "signed_summary_tokens",
        "opening_kept_hash": "signed_summary_kept_hash",
    },
    "conversation_facts": {
        "through_seq": "last_indexed_seq",
        "through_background": "last_indexed_background_seq",
        "counted_at": "indexed_at",
        "was_reaped": "was_recovered",
    },
    "index_progress": {"looked_until": "indexed_until"},
    "replay_items": {"shadow_id": "replay_conversation_id"},
    "replay_results": {"shadow_seq": "replay_seq"},
}
_EPOCH_REASONS = {"opening_set_down": "summary_inlined"}
_ERROR_CODES = {"opening_rejected": "summary_rejected", "provider_cut": "provider_disconnected"}
_MISS_REASONS = {"ttl_passed": "ttl_expired"}
_BLOCK_KINDS = {"opening": "signed_summary"}
_FLAGS = {"was_reaped": "was_recovered"}
"""Of conversation_facts; filters and labels name them too."""
_ONLY_PUBLIC = {
    "tenants",
    "api_keys",
    "rate_windows",
    "admin_sessions",
    "login_failures",
    "saved_views",
    "audit_log",
    "index_progress",
    "replays",
    "replay_items",
    "replay_results",
    "provider_holds",
}
"""Tables that schema `replay` does not have."""
_TABLE_COMMENTS: dict[str, str] = {
    "audit_log": "Actions of operators. Insert-only: no statement changes a row.",
    "blob_references": "Which turns contain which blobs; the number of rows is the reference count.",
    "call_chunks": "Raw bytes of running calls, read by resume and recovery. Deleted when the call ends.",
    "calls": "One row per provider call and attempt. Updated at its end, and when retention removes its bytes.",
    "compaction_alarms": "Conversations that must be compacted and cannot be.",
    "conversation_facts": "Search index of conversations, derived from turns and calls in the background. Rebuildable.",
    "epochs": "The periods in which the static layer does not change. Insert-only.",
    "index_progress": "Progress of the background indexers.",
    "login_failures": "Failed logins by key or address. Outdated rows are deleted at the next login.",
    "provider_cache_uses": "Which conversations use a cache; it is deleted with its last use, found by the index.",
    "provider_holds": "Providers that asked to wait: no call of a replay is sent to them before `held_until`.",
    "rate_windows": "Requests per API key and window. Past windows of a key are deleted when a new one begins.",
    "segments": "Compacted history. Insert-only; the turns themselves are kept.",
    "templates": "The sources of rendered templates, shared by all tenants. Insert-only.",
    "tenants": "The owners of data. Every query is restricted to one tenant.",
    "turn_texts": "Texts of turns for search, written in the background. Rebuildable.",
    "turns": "The turns of conversations. Insert-only: no statement updates a turn.",
    "waiting_turns": "Turns that wait for a busy conversation. Void tickets are deleted when the next one is issued.",
    "api_keys": "API keys, as hashes of their secrets.",
    "assistants": "One row per version. A conversation pins a version; a change of version starts an epoch.",
    "blobs": "Images by content hash. Deleted with the last reference.",
    "conversations": "The one row that a turn locks, briefly. The fill factor leaves room for updates in place.",
    "replays": "Batch runs over stored conversations. Each process that runs items locks the row briefly.",
    "saved_views": "Saved filters of the list of conversations.",
    "admin_sessions": "Sessions of operators in the admin pages. Expired sessions are deleted at the next login.",
    "replay_results": "One row per answer of the candidate. Insert-only.",
}
_COLUMN_COMMENTS: dict[str, dict[str, str]] = {
    "audit_log": {
        "id": "Ordered by time of writing, approximately.",
        "tenant_id": "The tenant whose data was concerned; null if unknown.",
        "happened_at": "Informational.",
        "api_key_id": "The acting key; null: the command line, or an unknown key.",
        "session_id": "Null: not through an admin page.",
        "action": "The action that was performed or attempted.",
        "object": "The id of the object of the action.",
        "details": "Details of the action; never content or secrets.",
    },
    "call_chunks": {"byte_offset": "Offset of the first byte; identifies a repeated write."},
    "calls": {
        "turn_seq": "The model turn that the call belongs to; negative for calls without a turn.",
        "attempt": "1, incremented by each retry.",
        "epoch": "The epoch whose static text was sent.",
        "manifest": "The blocks as sent: layer, role, hash, length, cache marker.",
        "request_hash": "SHA-256 of the request body; a rebuild must yield the same.",
        "cache_expected_tokens": "Input tokens that the provider should have read from its cache.",
        "cache_miss_reason": "Why fewer tokens were read, if that can be determined.",
        "repairs": "Repairs of a broken history in this payload.",
        "template_failures": "Templates that could not be rendered and were sent as their source.",
        "warnings": "Assumptions and omissions of this payload.",
        "started_at": "When the request was sent, by the clock of the process.",
        "ended_at": "Null while the call runs.",
        "status": "HTTP status; null if there was no response.",
        "headers": "Response headers, including request ids.",
        "usage_reported": "The provider's usage object, from which the token counts were derived.",
        "cost_usd": "Null if the price is not known.",
        "raw_response": "Every byte of the response body, zstd. Null while the call runs, and after retention.",
        "raw_length": "Length of the response body before compression.",
        "layer_order": "layered or append_only: in the latter, `dynamic` is a permanent part of the input.",
        "caching": "What was asked of the provider's cache: markers, lifetimes, the name of a cache.",
        "response_id": "The provider's id of its response; the next request may refer to it.",
    },
    "compaction_alarms": {
        "reason": "Why the conversation cannot be compacted.",
        "request_tokens": "Estimated tokens of the request that is too long.",
        "seq": "The model turn after which it was found; a later one ends the alarm.",
        "epoch": "The epoch in which it was found; the next one ends the alarm.",
        "began_at": "When the alarm began.",
    },
    "conversation_facts": {
        "last_indexed_seq": "The newest indexed turn.",
        "last_indexed_background_seq": "The same for calls without a turn, which have negative numbers.",
        "call_count": "All attempts. A fork counts only its own calls, not the copied ones.",
        "models": "Models that answered.",
        "providers": "Providers that answered.",
        "states": "States of its model turns.",
        "stop_reasons": "Stop reasons of its model turns.",
        "error_codes": "Error codes of model turns and of all attempts.",
        "has_repairs": "A payload contained repairs of the history.",
        "has_missing_signature": "The model returned a tool call without a required signature.",
        "has_withheld_signature": "Signatures were withheld from a model that does not accept them.",
        "has_prefix_break": "A request did not begin with the prefix of the previous one.",
        "fresh_input_tokens": "Tokens of all indexed calls, including failed ones.",
        "cost_usd": "Cost of the calls with a known price.",
        "unpriced_count": "Calls without a known price; `cost_usd` is a lower bound if there are any.",
        "last_activity_at": "Time of the newest turn, or of the creation.",
        "excerpt": "The beginning of the first user task.",
        "labels": "All values that can be filtered by equality, as `kind:value`, including the tenant.",
        "indexed_at": "When the row was last updated.",
    },
    "epochs": {
        "generation": "The generation of the segments that follow the base text.",
        "segment_count": "The number of these segments.",
        "base_text": "The rendered static prompt without history. Never changes.",
        "static_hash": "SHA-256 of the complete static text.",
        "buffer_start_seq": "The first turn of the buffer when the epoch began.",
        "created_at": "Informational.",
        "prefix_hash": "SHA-256 of the static text and tools, which signatures of thinking are bound to.",
        "signed_summary": "The message with the signed summary, sent before the buffer.",
        "signed_summary_start_seq": "The first turn that the signed summary replaces.",
        "signed_summary_text": "The content of the signed summary as the text of a segment. Never changes.",
        "signed_summary_tokens": "Estimated tokens of that text.",
        "signed_summary_kept_hash": "The prefix hashes whose thinking stays valid after the signed summary.",
        "args": "The args; null if they were not stored.",
        "rejected": "By provider: the last turn whose signatures, and whose calls, it rejected; they are omitted.",
    },
    "index_progress": {"name": "The indexer.", "indexed_until": "Turns created before this time are indexed."},
    "login_failures": {
        "subject": "The id of a key, or an address.",
        "failure_count": "Failures since `began_at`; a successful login resets them.",
        "began_at": "Time of the first counted failure.",
    },
    "rate_windows": {
        "began_at": "Start of the window, by the database's clock.",
        "used": "Requests reserved in this window; may exceed the limit.",
    },
    "segments": {
        "generation": "Incremented when old segments are summarised.",
        "position": "0, 1, 2: segments are only appended.",
        "text": "The transcript without reasoning. Never changes.",
        "summarises_generation": "Summaries: the generation whose segments it replaces.",
        "summarises_count": "Summaries: the number of replaced segments.",
        "created_at": "Informational.",
    },
    "templates": {"hash": "SHA-256 of the source, referenced by epochs.", "created_at": "Informational."},
    "tenants": {"name": "Chosen by operators; unique.", "created_at": "Informational."},
    "turn_texts": {
        "text": "The readable text of the turn, truncated if very long.",
        "tsv": "The words of the text, and a word for the tenant.",
    },
    "turns": {
        "seq": "1, 2, 3 without gaps, assigned under the lock of the conversation's row.",
        "blocks": "For display and search: escaped, without signatures.",
        "native": "The exact bytes as sent to the provider, with signatures.",
        "dialect": "The format of `native`: strata for input turns, else the provider.",
        "provider": "Model turns: the provider; its signatures are valid only there.",
        "model": "Model turns: the requested model.",
        "attempt": "Model turns: the attempt that gave the answer.",
        "cost_usd": "Null if the price is not known.",
        "language": "User tasks: prompt argument message.language.",
        "args": "Input turns: prompt arguments of this turn only.",
        "body_hash": "Input turns: SHA-256 of the request; distinguishes a retry from a reused key.",
        "written_by_lease": "The lease that wrote the turn; identifies a repeated write.",
        "created_at": "Informational; turns are ordered by seq.",
        "revision": "Model turns: the conversation's revision when the turn ended; null if copied by a fork.",
        "model_version": "Model turns: the model version that the response names.",
        "ending": "Model turns: details of the provider about the end; null if there are none.",
    },
    "waiting_turns": {
        "ticket": "The lowest ticket is next; negative for turns that go before all others.",
        "expires_at": "Extended by its holder; afterwards the ticket is void.",
    },
    "api_keys": {
        "id": "Part of the key's text; finds the row before the secret is compared.",
        "tenant_id": "Indexed for lists.",
        "name": "Chosen by the operator.",
        "secret_hash": "SHA-256 of the secret, which is not stored.",
        "created_at": "Informational.",
        "revoked_at": "Set once; the row is kept.",
        "last_used_at": "Updated at most once a minute, so that most lookups only read.",
    },
    "assistants": {
        "version": "1, 2, 3: each change adds a row; no row is edited.",
        "settings": "Output limit, thinking, layer order and other settings.",
        "created_at": "Informational.",
    },
    "blobs": {
        "sha256": "SHA-256 of `data`; the same image is stored once.",
        "media_type": "Detected from the bytes.",
        "created_at": "Informational.",
    },
    "conversations": {
        "revision": "Incremented by every change; clients compare it before they write.",
        "buffer_start_seq": "The first turn that is not compacted.",
        "epoch": "The current epoch; 0 before the first payload.",
        "pending_call_ids": "Tool calls without results, in call order; a new turn is validated against them.",
        "identifier": "The application's own name for the conversation.",
        "context": "The current content of the dynamic layer.",
        "metadata": "Set by the application; never interpreted.",
        "forked_from_id": "The conversation that this one was forked from; it may be erased.",
        "forked_from_seq": "The last turn that was copied.",
        "lease_token": "Set while a turn runs. Every write of the turn must name it; it is never reused.",
        "lease_owner": "The process that runs the turn; read by operators and at shutdown.",
        "lease_expires_at": "Extended by the heartbeat; afterwards any process may end the turn.",
        "lease_turn_seq": "The seq that the running model turn will have.",
        "cancel_requested_at": "When a cancel of the running turn was requested; null if none runs.",
        "created_at": "Informational.",
        "updated_at": "Informational.",
        "exchange_count": "User tasks so far; null until the next accepted turn counts them.",
    },
    "provider_caches": {
        "prefix_hash": "SHA-256 of the cached static text and tools.",
        "name": "The provider's name for the cache, sent in place of its content.",
        "created_at": "When the cache was created; determines the storage cost.",
        "removing_at": "When removal at the provider began; the cache is no longer used.",
    },
    "replays": {
        "draft": "The request, without the ids of its conversations and its limits.",
        "item_count": "Items at creation; fewer remain if sources are erased.",
        "parallelism": "Maximum number of items that run at the same time.",
        "spent_usd": "Lost calls are counted by their estimates.",
        "reserved_usd": "Estimated cost of the calls that run now.",
        "next_call_at": "No call is sent before this time; null: no limit.",
        "created_at": "Informational.",
        "created_by": "The API key; null: the command line.",
    },
    "saved_views": {
        "name": "Chosen by operators; unique within the tenant.",
        "filters": "The filters as in the query string of the list.",
        "api_key_id": "The key that saved the view. Informational.",
        "created_at": "Informational.",
    },
    "admin_sessions": {
        "id": "Names the session in the audit log; is not a credential.",
        "api_key_id": "The session ends when this key is revoked or expires.",
        "token_hash": "SHA-256 of the token in the cookie, which is not stored.",
        "csrf_secret": "Signs the forms of the session.",
        "address": "The client address at login. Informational.",
        "created_at": "The maximum age is counted from here.",
        "last_seen_at": "Updated at most once a minute; an idle session expires.",
    },
    "replay_items": {
        "conversation_id": "The source conversation; its items are deleted when it is erased.",
        "number": "1, 2, 3 within the replay, in the order of execution.",
        "replay_conversation_id": "The conversation in schema `replay` that the item writes.",
        "diverged_at_seq": "The first recorded answer that differs from the candidate's.",
        "lost_count": "Calls whose process died before they ended.",
        "lease_token": "Every write must name it. Kept when the item ends, to identify repeated writes.",
        "lease_owner": "The process that runs the item; read by operators.",
        "lease_expires_at": "Afterwards any process may claim the item.",
        "call_id": "The call that runs now; null: none.",
        "call_usd": "Its estimated cost; null if the price is not known.",
        "call_tokens": "Its estimated tokens.",
        "started_at": "When the item was first claimed.",
    },
    "replay_results": {
        "conversation_id": "The source conversation; its results are deleted when it is erased.",
        "number": "The number of the item.",
        "source_seq": "The recorded answer that it is compared with; null if there is none.",
        "replay_seq": "The turn of the replay conversation whose calls produced it.",
        "attempt": "The attempt that gave the answer.",
        "kinds": "The kinds of differences between the answers.",
        "similarity": "Similarity of the texts, 0 to 1.",
        "severity": "0 (the same) to 1.",
        "note": "A remark on the result, as one word.",
        "candidate": "The same for the candidate's answer.",
        "assertions": "The outcome of each assertion.",
        "judge": "The verdict of the judge; null without a judge.",
        "blocks": "The blocks of the candidate's answer. Not read by lists.",
        "created_at": "Informational.",
    },
}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Calls have no index on these values, so each statement below reads the whole table once.
    op.execute("SET LOCAL statement_timeout = '30min'")
    for table, columns in _COLUMNS.items():
        for schema in _schemas_of(table):
            for old, new in columns.items():
                op.alter_column(table, old, new_column_name=new, schema=schema)
    for table, comment in _TABLE_COMMENTS.items():
        for schema in _schemas_of(table):
            op.create_table_comment(table, comment, schema=schema)
    for table, comments in _COLUMN_COMMENTS.items():
        for schema in _schemas_of(table):
            for column, comment in comments.items():
                op.alter_column(table, column, comment=comment, schema=schema)
    _rewrite(_EPOCH_REASONS, _ERROR_CODES, _MISS_REASONS, _BLOCK_KINDS, _FLAGS)


def downgrade() -> None:
    """Restore the names of columns and the stored words. Comments stay: they have no effect."""
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Calls have no index on these values, so each statement below reads the whole table once.
    op.execute("SET LOCAL statement_timeout = '30min'")
    _rewrite(*(_reverse(words) for words in (_EPOCH_REASONS, _ERROR_CODES, _MISS_REASONS, _BLOCK_KINDS, _FLAGS)))
    for table, columns in _COLUMNS.items():
        for schema in _schemas_of(table):
            for old, new in columns.items():
                op.alter_column(table, new, new_column_name=old, schema=schema)


def _schemas_of(table: str) -> Sequence[str]:
    return ("public",) if table in _ONLY_PUBLIC else _SCHEMAS


def _reverse(words: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in words.items()}


def _rewrite(
    reasons: dict[str, str],
    codes: dict[str, str],
    misses: dict[str, str],
    blocks: dict[str, str],
    flags: dict[str, str],
) -> None:
    for schema in _SCHEMAS:
        for old, new in reasons.items():
            _set(schema, "epochs", "reason", old, new)
        for old, new in codes.items():
            _set(schema, "turns", "error_code", old, new)
            _set(schema, "calls", "error_code", old, new)
            _rewrite_members(schema, "warnings", "code", old, new)
            _run(
                f"UPDATE {schema}.conversation_facts SET error_codes = array_replace(error_codes, :old, :new),"
                " labels = array_replace(labels, 'error:' || :old, 'error:' || :new) WHERE :old = ANY (error_codes)",
                old=old,
                new=new,
            )
        for old, new in misses.items():
            _set(schema, "calls", "cache_miss_reason", old, new)
        for old, new in blocks.items():
            _rewrite_members(schema, "manifest", "kind", old, new)
            _rewrite_members(schema, "warnings", "block", old, new)
        for old, new in flags.items():
            _run(
                f"UPDATE {schema}.conversation_facts SET labels = array_replace(labels, 'has:' || :old, 'has:' || :new)"
                " WHERE labels @> ARRAY['has:' || :old]",
                old=old,
                new=new,
            )
    for old, new in codes.items():
        _set("public", "replay_items", "error_code", old, new)
    for old, new in flags.items():
        # Names of filters: members of saved views and of the selections of replays, items of a list in the audit log.
        for table, column, kind in (
            ("saved_views", "filters", "jsonb"),
            ("replays", "draft", "json"),
            ("audit_log", "details", "jsonb"),
        ):
            _run(
                f"UPDATE {table} SET {column} = CAST(replace({column}::text, :old, :new) AS {kind})"
                f" WHERE strpos({column}::text, :old) > 0",
                old=f'"{old}"',
                new=f'"{new}"',
            )


def _set(schema: str, table: str, column: str, old: str, new: str) -> None:
    _run(f"UPDATE {schema}.{table} SET {column} = :new WHERE {column} = :old", old=old, new=new)


def _rewrite_members(schema: str, column: str, member: str, old: str, new: str) -> None:
    """Rename a value of one member in the objects of a JSON array. The other members keep their values."""
    _run(
        f"""
UPDATE {schema}.calls SET {column} = (
    SELECT jsonb_agg(
        CASE
            WHEN entry->>:member = :old THEN jsonb_set(entry, ARRAY[:member], to_jsonb(CAST(:new AS text)))
            ELSE entry
        END ORDER BY position
    )
    FROM jsonb_array_elements({column}) WITH ORDINALITY AS entries (entry, position)
)
WHERE {column} @> jsonb_build_array(jsonb_build_object(CAST(:member AS text), CAST(:old AS text)))
""",
        member=member,
        old=old,
        new=new,
    )


def _run(statement: str, **values: str) -> None:
    op.execute(sa.text(statement).bindparams(**values))
