"""Verification: everything stored verifies, and any change in the store is found."""

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.turn import TurnState
from server.postgres.codec import decode_raw
from server.postgres.engine import Database, Statement
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.replay.verify.recorded_calls import CallFilter, Flaw, RecordedCall
from server.replay.verify.verification import Subject, Verified
from tests.conftest import StrataServer
from tests.support.archive_driver import steps, take_step
from tests.support.compaction_driver import NARROW, build_compactor, drive_to_full_window
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed
from tests.support.verifying import verify, verify_damaged


async def read_recorded(database: Database, ids: Sequence[str], **limits: Any) -> list[RecordedCall | Flaw]:
    driver = PostgresRecordedCalls(database, **limits)
    return [item async for _, items in driver.conversations(ids, CallFilter()) async for item in items]


async def change(database: Database, sql: str, *values: Any) -> None:
    async with database.connection() as connection:
        assert int((await connection.execute(sql, *values)).split()[-1]) > 0, "nothing was changed"


def findings_of(verified: Verified) -> list[tuple[Subject, int | None, str]]:
    return [(each.subject, each.turn_seq, each.position) for each in verified.mismatches]


@settings(max_examples=12)
@given(provider=st.sampled_from(BOTH), taken=st.lists(steps, min_size=1, max_size=8), forked=st.booleans())
async def test_after_any_history_a_conversation_verifies(
    *,
    database: Database,
    strata_server: StrataServer,
    emulated: EmulatedProviders,
    provider: str,
    taken: list[tuple[Any, ...]],
    forked: bool,
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=NARROW)
    compactor = build_compactor(strata_server.program, Observed())
    for step in taken:
        await take_step(driver, compactor, step)
    turns = await driver.turns()
    ids = [driver.conversation_id]
    if forked and turns:
        ids.append((await driver.fork(len(turns))).conversation_id)

    verified = await verify(database, ids)

    assert verified.mismatches == ()
    calls = len(await driver.calls()) * len(ids) + len(await driver.background_calls())
    assert (verified.counts.call_count, verified.counts.answer_count) == (calls, calls)
    assert verified.counts.request_count == calls
    whole = await read_recorded(database, ids)
    assert len(whole) == calls
    # For any page size, the calls have the same sources and answers.
    for page_rows, page_bytes in ((1, 2**20), (3, 400)):
        assert await read_recorded(database, ids, page_rows=page_rows, page_bytes=page_bytes) == whole


@pytest.fixture
async def driver(strata_server: StrataServer, emulated: EmulatedProviders) -> ConversationDriver:
    """Six turns: tools, an image, a cut, a cancelled answer, and history in a segment."""
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, BOTH[0], settings=NARROW)
    await driver.change(context={"todos": ["stay"]})
    await driver.task("First.", tool_reply("Oslo"), text_reply("Cold."))
    await build_compactor(strata_server.program, Observed()).compact(
        driver.tenant_id, driver.conversation_id, force=True
    )
    await driver.task("Second.", text_reply("Grey."), picture=True)
    await build_compactor(strata_server.program, Observed()).compact(
        driver.tenant_id, driver.conversation_id, force=True
    )
    await driver.fail("Third.", text_reply("One two three four."), after_chunks=3)
    await driver.cancel("Fourth.", text_reply("One two three four."), after_events=1)
    await driver.task("Fifth.", text_reply("Fine."), picture=True)
    return driver


_BYTES = {
    "calls": ("raw_response", "request_hash", "dynamic"),
    "turns": ("native",),
    "blobs": ("data",),
    "epochs": ("static_hash",),
}
_KEYS = {
    "calls": "turn_seq || '/' || attempt",
    "turns": "seq::text",
    "blobs": "encode(sha256, 'hex')",
    "epochs": "number::text",
}


@settings(max_examples=40)
@given(data=st.data())
async def test_any_flipped_byte_is_found(database: Database, driver: ConversationDriver, data: st.DataObject) -> None:
    conversation = decode_id(CONVERSATION, driver.conversation_id)
    table = data.draw(st.sampled_from(sorted(_BYTES)))
    name, key_sql = data.draw(st.sampled_from(_BYTES[table])), _KEYS[table]
    own = "$1::uuid IS NOT NULL" if table == "blobs" else "conversation_id = $1"
    async with database.connection() as connection:
        found = await connection.fetch(
            f"SELECT {key_sql} AS key, {name} AS value FROM {table} WHERE {own} AND octet_length({name}) > 0",  # noqa: S608
            conversation,
        )
    key, value = data.draw(st.sampled_from(sorted((row["key"], row["value"]) for row in found)))
    place, bit = data.draw(st.integers(0, len(value) - 1)), data.draw(st.integers(0, 7))
    flipped = value[:place] + bytes([value[place] ^ (1 << bit)]) + value[place + 1 :]
    update = f"UPDATE {table} SET {name} = $2 WHERE {own} AND {key_sql} = $3"  # noqa: S608
    await change(database, update, conversation, flipped, key)
    verified = await verify(database, [driver.conversation_id])
    await change(database, update, conversation, value, key)
    if name == "raw_response" and _is_same_raw(value, flipped):
        return
    assert verified.counts.mismatch_count > 0
    assert {each.conversation_id for each in verified.mismatches} == {driver.conversation_id}
    assert (await verify(database, [driver.conversation_id])).mismatches == ()


def _is_same_raw(value: bytes, flipped: bytes) -> bool:
    """A meaningless bit of a compression frame: the content is unchanged."""
    try:
        return decode_raw(flipped) == decode_raw(value)
    except zstandard.ZstdError:
        return False


_DAMAGES: dict[str, list[tuple[Subject, int | None, str]]] = {
    "UPDATE calls SET raw_response = overlay(raw_response placing 'x' from 20) WHERE turn_seq = 4": [
        (Subject.BYTES, 4, "raw_response")
    ],
    "UPDATE calls SET request_hash = overlay(request_hash placing 'x' from 1) WHERE turn_seq = 4": [
        (Subject.REQUEST, 4, "request")
    ],
    "UPDATE calls SET output_tokens = output_tokens + 1 WHERE turn_seq = 6": [
        (Subject.ANSWER, 6, "call.usage.output_tokens")
    ],
    "UPDATE calls SET response_id = '!' WHERE turn_seq = 6": [(Subject.ANSWER, 6, "call.response_id at character 0")],
    "UPDATE turns SET reasoning_tokens = 77 WHERE seq = 6": [(Subject.ANSWER, 6, "usage.reasoning_tokens")],
    "UPDATE turns SET state = 'complete', error_code = NULL WHERE seq = 8": [(Subject.ANSWER, 8, "state")],
    "UPDATE turns SET error_code = 'provider_empty' WHERE seq = 8": [(Subject.ANSWER, 8, "error_code")],
    "UPDATE turns SET stop_reason = 'length' WHERE seq = 12": [(Subject.ANSWER, 12, "stop_reason")],
    """UPDATE turns SET blocks = jsonb_set(blocks, '{1,text}', '"Fair."') WHERE seq = 12""": [
        (Subject.ANSWER, 12, "blocks[1].text at character 1")
    ],
    """UPDATE turns SET blocks = jsonb_set(blocks, '{0,text}', '"Sixth."') WHERE seq = 11""": [
        (Subject.BYTES, None, "turn 11 blocks[0].text at character 0")
    ],
    "DELETE FROM blobs": [(Subject.BYTES, seq, "image") for seq in (6, 8, 10, 12)],
}


async def test_each_kind_of_damage_is_named(database: Database, driver: ConversationDriver) -> None:
    for sql, expected in _DAMAGES.items():
        assert findings_of(await verify_damaged(database, [driver.conversation_id], sql)) == expected, sql
    found = findings_of(await verify_damaged(database, [driver.conversation_id], "DELETE FROM turns WHERE seq = 9"))
    assert found[0] == (Subject.BYTES, None, "turn 9")
    assert [each[:2] for each in found[1:]] == [(Subject.REQUEST, 10), (Subject.REQUEST, 12)]
    # A request that cannot even be encoded does not end the run.
    odd = "UPDATE assistants SET model = U&'\\+10FFFF0000'"
    assert {each[0] for each in findings_of(await verify_damaged(database, [driver.conversation_id], odd))} == {
        Subject.REQUEST
    }
    many = "UPDATE conversations SET epoch = 2000000000"
    assert findings_of(await verify_damaged(database, [driver.conversation_id], many)) == [
        (Subject.BYTES, None, "epoch 3")
    ]


async def test_damage_of_shared_data_is_named_where_it_is(database: Database, driver: ConversationDriver) -> None:
    verified = await verify_damaged(
        database, [driver.conversation_id], "UPDATE segments SET text = overlay(text placing '~' from 3)"
    )
    [text, *requests] = verified.mismatches
    assert (text.subject, text.turn_seq, text.position) == (Subject.BYTES, None, "epoch 2")
    assert [(each.subject, each.turn_seq) for each in requests] == [(Subject.REQUEST, seq) for seq in (8, 10, 12)]
    assert {each.note for each in requests} == {"The first block that differs is the static layer's static."}
    sql = "UPDATE turns SET native = overlay(native placing 'x' from 12) WHERE seq = 6"
    [answer, *requests] = (await verify_damaged(database, [driver.conversation_id], sql)).mismatches
    assert (answer.subject, answer.turn_seq, answer.position) == (Subject.ANSWER, 6, "native at byte 11")
    assert [each.turn_seq for each in requests] == [8, 10, 12]
    assert {each.note for each in requests} == {
        "The first block that differs is the buffered layer's message of turn 6."
    }
    assert all(", at byte " in each.position for each in requests)


async def test_what_cannot_be_compared_is_counted_and_is_no_mismatch(
    database: Database, driver: ConversationDriver
) -> None:
    conversation = decode_id(CONVERSATION, driver.conversation_id)
    for sql in (
        "UPDATE calls SET raw_response = NULL WHERE conversation_id = $1 AND turn_seq = 2",
        # As while the last turn runs.
        "UPDATE calls SET ended_at = NULL, raw_response = NULL WHERE conversation_id = $1 AND turn_seq = 12",
        "DELETE FROM turns WHERE conversation_id = $1 AND seq = 12",
        """UPDATE conversations SET lease_token = id, lease_owner = 'me', lease_expires_at = now(), lease_turn_seq = 12
        WHERE id = $1""",
        "UPDATE calls SET provider = 'acme' WHERE conversation_id = $1 AND turn_seq = 4",
    ):
        await change(database, sql, conversation)
    verified = await verify(database, [driver.conversation_id])
    counts = verified.counts
    assert verified.mismatches == ()
    assert (counts.call_count, counts.without_bytes_count, counts.running_count) == (6, 1, 1)
    assert (counts.unknown_count, counts.unknown_providers) == (1, {"acme": 1})
    assert (counts.answer_count, counts.request_count) == (3, 5)
    other = await verify(database, [driver.conversation_id], requests=False)
    assert (other.counts.answer_count, other.counts.request_count) == (3, 0)


@pytest.mark.parametrize("provider", BOTH)
async def test_background_calls_are_verified_too(
    database: Database, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_to_full_window(strata_server, emulated, provider)
    emulated[provider].queue_replies(text_reply("It was about foxes."))
    await build_compactor(strata_server.program, Observed()).compact(driver.tenant_id, driver.conversation_id)
    await driver.task("And on?", text_reply("On and on."))
    [call] = await driver.background_calls()
    assert (await verify(database, [driver.conversation_id])).mismatches == ()
    conversation = decode_id(CONVERSATION, driver.conversation_id)
    await change(
        database, "UPDATE calls SET output_tokens = 7 WHERE conversation_id = $1 AND turn_seq < 0", conversation
    )
    await change(
        database,
        "UPDATE calls SET warnings = jsonb_set(warnings, '{0,task}', '\"Tell lies.\"') "
        "WHERE conversation_id = $1 AND turn_seq < 0",
        conversation,
    )
    found = findings_of(await verify(database, [driver.conversation_id]))
    assert found[0] == (Subject.ANSWER, call.turn_seq, "call.usage.output_tokens")
    assert [each[:2] for each in found[1:]] == [(Subject.REQUEST, call.turn_seq)]


async def test_a_tenant_sees_no_other_and_an_erased_conversation_is_left_out(
    database: Database, strata_server: StrataServer, driver: ConversationDriver
) -> None:
    other = await strata_server.key_ring.create_tenant("other")
    assert (await verify(database, [driver.conversation_id], tenant_id=other.id)).counts.conversation_count == 0
    await driver.program.store.erase_conversation(driver.tenant_id, driver.conversation_id)
    assert (await verify(database, [driver.conversation_id])).counts.conversation_count == 0


@pytest.mark.parametrize("provider", BOTH)
async def test_concurrent_turns_are_no_mismatch(
    database: Database, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=NARROW)
    compactor = build_compactor(strata_server.program, Observed())

    async def take_turns() -> None:
        for number in range(6):
            await driver.task(f"Task {number}.", tool_reply("Oslo"), text_reply("Cold."), picture=number % 2 == 0)
            await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)

    taking = asyncio.create_task(take_turns())
    looks = 0
    while not taking.done():
        assert (await verify(database, [driver.conversation_id])).mismatches == ()
        looks += 1
    await taking
    assert looks > 1
    assert (await verify(database, [driver.conversation_id])).counts.call_count == 12


async def test_a_long_conversation_is_read_once(
    database: Database, strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, BOTH[1])
    for number in range(30):
        ended = await driver.task(f"Task {number}.", text_reply("So be it."))
        assert ended.turn.state is TurnState.COMPLETE
    counting = _Counting(database.options)
    try:
        verified = await verify(counting, [driver.conversation_id])
    finally:
        await counting.close()
    assert (verified.counts.call_count, verified.mismatches) == (30, ())
    # 60 turns, 30 calls, and some few others.
    assert counting.row_count < 100


class _Counting(Database):
    """Counts the rows that are read."""

    row_count = 0

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: Any) -> list[asyncpg.Record]:
        rows = await super().run(statement, repeatable=repeatable, **values)
        self.row_count += len(rows)
        return rows
