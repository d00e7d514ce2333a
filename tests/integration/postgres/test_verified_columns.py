"""Every stored column of a conversation is verified, or is listed here with the reason why not."""

from typing import Any

import pytest
from sqlalchemy import ARRAY, UUID, Column, Integer, LargeBinary, Text

from server.postgres.archive.fields import ARCHIVED
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.compaction_driver import build_compactor, drive_to_full_window
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import EmulatedProviders
from tests.support.fakes.compaction_observer import Observed
from tests.support.verifying import verify, verify_damaged

_FOR_PEOPLE = "says when, which nothing goes by"
_PRESENT = "the conversation as it is now: no past call was made of it"
_RENDERED = "was rendered into the epoch's text, which is proven"
_MONEY = "prices are a release's"
_LEASE = "of who writes now"
_NOTE = "a note for operators on how the call came about"
_ABOUT = "an estimate"
_REQUEST = "of the request that brought it"
_ORIGIN = "where it comes from: that one may be erased"
_UNDOING = "what a summary stands for, for undoing it"
_EXCUSED: dict[str, dict[str, str]] = {
    "conversations": {
        "id": "its name",
        "tenant_id": "whose it is",
        "assistant_version": _PRESENT,
        "revision": _PRESENT,
        "identifier": _PRESENT,
        "source": _PRESENT,
        "direction": _PRESENT,
        "mode": _PRESENT,
        "args": _PRESENT,
        "context": _PRESENT,
        "metadata": _PRESENT,
        "forked_from_id": _ORIGIN,
        "forked_from_seq": _ORIGIN,
        "lease_token": _LEASE,
        "lease_owner": _LEASE,
        "lease_expires_at": _LEASE,
        "lease_turn_seq": _LEASE,
        "cancel_requested_at": _LEASE,
        "listened_until": _LEASE,
        "created_at": _FOR_PEOPLE,
        "updated_at": _FOR_PEOPLE,
    },
    "assistants": {
        "tenant_id": "whose it is",
        "name": _RENDERED,
        "language": _RENDERED,
        "description": _RENDERED,
        "instructions": _RENDERED,
        "variables": _RENDERED,
        "created_at": _FOR_PEOPLE,
    },
    "templates": {"created_at": _FOR_PEOPLE},
    "epochs": {
        "reason": "why it began, for people",
        "signed_summary_text": "what the signed block says, for when it is worth nothing any more",
        "signed_summary_tokens": _ABOUT,
        "created_at": _FOR_PEOPLE,
    },
    "segments": {
        "token_count": _ABOUT,
        "summarises_generation": _UNDOING,
        "summarises_count": _UNDOING,
        "created_at": _FOR_PEOPLE,
    },
    "blobs": {"created_at": _FOR_PEOPLE},
    "blob_references": {},
    "turns": {
        "cost_usd": _MONEY,
        "language": "was rendered into the dynamic layer, which is proven",
        "args": "was rendered into the dynamic layer, which is proven",
        "idempotency_key": _REQUEST,
        "body_hash": _REQUEST,
        "written_by_lease": "of the lease that it was written under",
        "revision": "of the conversation's changes, of which there is no other trace",
        "ending": "what the provider said about the end, for people; the bytes of the call have it too",
        "created_at": _FOR_PEOPLE,
    },
    "calls": {
        "cache_expected_tokens": _NOTE,
        "cache_miss_reason": _NOTE,
        "repairs": _NOTE,
        "template_failures": _NOTE,
        "started_at": _FOR_PEOPLE,
        "first_byte_at": _FOR_PEOPLE,
        "ended_at": _FOR_PEOPLE,
        "headers": "what the provider said beside its answer",
        "cost_usd": _MONEY,
    },
}
"""Of the verified tables, the columns that are not verified."""
_CHANGES: dict[tuple[str, str], str] = {
    ("turns", "kind"): "CASE kind WHEN 'tool_response' THEN 'user_task' ELSE 'tool_response' END",
    ("turns", "state"): "CASE state WHEN 'complete' THEN 'cancelled' ELSE 'complete' END",
    ("turns", "stop_reason"): "CASE stop_reason WHEN 'length' THEN 'end_turn' ELSE 'length' END",
    ("calls", "layer_order"): "CASE layer_order WHEN 'layered' THEN 'append_only' ELSE 'layered' END",
    ("calls", "provider"): "CASE provider WHEN 'gemini' THEN 'anthropic' ELSE 'gemini' END",
    ("assistants", "provider"): "CASE provider WHEN 'gemini' THEN 'anthropic' ELSE 'gemini' END",
    ("assistants", "settings"): """'{"max_output_tokens": 77}'""",
    ("assistants", "tools"): "'[]'",
    ("epochs", "args"): """'{"tone": "odd"}'""",
    ("epochs", "rejected"): """'{"gemini": {"signatures": 3, "calls": 0}}'""",
    ("calls", "manifest"): "jsonb_set(manifest, '{0,length}', '1')",
    ("calls", "caching"): "jsonb_set(caching, '{breakpoints}', '[]')",
    ("calls", "usage_reported"): """usage_reported || '{"odd": 1}'""",
    ("calls", "warnings"): "'[]'",
    ("turns", "blocks"): """blocks || '[{"type": "text", "text": "odd"}]'""",
    ("blobs", "tenant_id"): "(SELECT id FROM tenants WHERE id <> blobs.tenant_id LIMIT 1)",
}

_WHERE: dict[tuple[str, str], str] = {
    # Without segments it has no meaning.
    ("epochs", "generation"): "segment_count > 0",
    # For the call of a turn they are notes for operators; for a background call they describe the request.
    ("calls", "warnings"): "turn_seq < 0",
}


def _change(column: Column[Any]) -> str:
    """A different value."""
    name = column.name
    if (changed := _CHANGES.get((column.table.name, name))) is not None:
        return changed
    match column.type:
        case LargeBinary():
            last = f"length({name}) - 1"
            return f"set_byte({name}, {last}, 255 - get_byte({name}, {last}))"
        case Integer():
            # As a part of the key, far from any other.
            return f"{name} + {1000 if column.primary_key else 1}"
        case Text():
            return f"{name} || '~'"
        case UUID():
            return "'7d3c0e0e-0000-7000-8000-000000000000'"
        case ARRAY():
            return f"{name} || '{{odd}}'"
        case _:
            raise AssertionError(f"{column}: say in _CHANGES how it is changed.")


def _damage(column: Column[Any]) -> str:
    """Change it in the newest row that has a value."""
    table, keys = column.table.name, [key.name for key in column.table.primary_key]
    has_value = f"length({column.name}) > 0" if isinstance(column.type, LargeBinary) else f"{column.name} IS NOT NULL"
    which = _WHERE.get((table, column.name), has_value)
    order = ", ".join(f"{key} DESC" for key in keys)
    newest = f"SELECT {', '.join(keys)} FROM {table} WHERE {which} ORDER BY {order} LIMIT 1"  # noqa: S608
    return f"UPDATE {table} SET {column.name} = {_change(column)} WHERE ({', '.join(keys)}) = ({newest})"  # noqa: S608


@pytest.fixture
async def drivers(strata_server: StrataServer, emulated: EmulatedProviders) -> list[ConversationDriver]:
    """Everything that is stored of conversations: tools, images, segments, a summary, a signed summary, failed
    turns, rejected signatures.
    """
    await strata_server.key_ring.create_tenant("other")
    rejected = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI)
    await rejected.task("Task 1.", tool_reply("Oslo"), text_reply("Answer 1."))
    emulated[GEMINI].state.signer.replace_secret()
    await rejected.task("Task 2.", text_reply("Answer 2."))
    summed = await drive_to_full_window(strata_server, emulated, GEMINI)
    await summed.change(context={"todos": ["stay"]}, args={"tone": "mild"})
    emulated[GEMINI].queue_replies(text_reply("It was about foxes."))
    await build_compactor(strata_server.program, Observed()).compact(summed.tenant_id, summed.conversation_id)
    await summed.task("A picture.", text_reply("Grey."), picture=True)
    await summed.fail("Broken.", text_reply("One two three four."), after_chunks=3)
    await summed.cancel("Cancelled.", text_reply("One two three four."), after_events=1)
    await summed.task("And on?", text_reply("On and on."))
    settings = {"compaction": {"policy": "off", "keep_exchanges": 1, "signed": True}}
    signed = await start_driver(
        strata_server.program, strata_server.tenant.id, emulated, ANTHROPIC, settings=settings, model="claude-fable-5-2"
    )
    for number in range(3):
        await signed.task(f"Task {number}.", text_reply(f"Answer {number}."))
    compactor = strata_server.program.compactor
    await compactor.compact(signed.tenant_id, signed.conversation_id, force=True)
    await signed.task("And now?", text_reply("Now this."))
    return [summed, signed, rejected]


async def test_every_column_is_verified_or_excused(database: Database, drivers: list[ConversationDriver]) -> None:
    ids = [driver.conversation_id for driver in drivers]
    assert (await verify(database, ids)).mismatches == ()
    # An archive contains everything of a conversation.
    assert set(_EXCUSED) == {table.name for table in ARCHIVED.values()}
    for table in ARCHIVED.values():
        excused = _EXCUSED[table.name]
        assert set(excused) <= set(table.c.keys()), table.name
        for column in table.c:
            if column.name not in excused:
                assert (await verify_damaged(database, ids, _damage(column))).mismatches, column
