"""A conversation that was exported, erased and imported is the same conversation, byte for byte."""

import hashlib
import json
import re
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.archive.file import RecordKind
from server.cli.archive_files import read_lines, writing
from server.compaction.report import CompactionOutcome
from server.conversation.api_key import KeyRing, Tenant
from server.conversation.call import Call
from server.conversation.conversation import ConversationDraft
from server.conversation.errors import (
    ArchiveInvalid,
    AssistantExists,
    ConversationBusy,
    ConversationExists,
    ConversationNotFound,
)
from server.conversation.identifiers import CONVERSATION, new_id
from server.postgres.archive.exporter import PostgresArchives
from server.postgres.archive.fields import ARCHIVED, NOT_ARCHIVED
from server.postgres.archive.importer import Importer, ImportOptions
from server.postgres.engine import Database
from server.postgres.schema import metadata
from server.postgres.store import PostgresStore
from server.providers.choice import ANTHROPIC
from tests.conftest import StrataServer
from tests.support.archive_driver import (
    export_lines,
    export_several,
    forget_shared,
    import_lines,
    rows_of,
    steps,
    take_step,
)
from tests.support.builders import (
    NASTY,
    accept,
    answer,
    call_end,
    call_start,
    create_assistant,
    create_conversation,
    epoch,
    picture,
    take_exchange,
    user_input,
)
from tests.support.compaction_driver import NARROW, build_compactor, drive_to_full_window
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    rebuild,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed
from tests.support.turn_steps import TEXT

_CLOCK = re.compile(rb"current_datetime[^,}]+")


async def next_request(driver: ConversationDriver) -> bytes:
    """The next request, without the time."""
    await driver.task("And now?", text_reply("Later."), picture=True, abandons_calls=True)
    call: Call = (await driver.calls())[-1]
    _, body = await rebuild(driver, call)
    assert hashlib.sha256(body).digest() == call.start.request_hash
    return _CLOCK.sub(b"", body)


@settings(max_examples=20)
@given(provider=st.sampled_from(BOTH), taken=st.lists(steps, min_size=1, max_size=8), forked=st.booleans())
async def test_an_imported_conversation_is_equal_and_continues_as_before(
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
    if forked and turns:
        driver = await driver.fork(len(turns))
    before = await rows_of(database, driver.conversation_id)
    lines = await export_lines(database, driver.tenant_id, driver.conversation_id)
    expected = await next_request(driver)
    await driver.program.store.erase_conversation(driver.tenant_id, driver.conversation_id)
    await forget_shared(database)

    assert await import_lines(database, driver.tenant_id, lines) == [driver.conversation_id]
    assert await rows_of(database, driver.conversation_id) == before
    assert await export_lines(database, driver.tenant_id, driver.conversation_id) == lines
    await assert_rebuilds(driver)
    assert await next_request(driver) == expected
    await assert_rebuilds(driver)
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())
        emulated[name].state.request_log.clear()


@pytest.mark.parametrize("provider", BOTH)
async def test_compacted_and_summarised_history_comes_back_under_new_ids_in_another_tenant(
    database: Database, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_to_full_window(strata_server, emulated, provider)
    emulated[provider].queue_replies(text_reply("It was about foxes."))
    await build_compactor(strata_server.program, Observed()).compact(driver.tenant_id, driver.conversation_id)
    assert await driver.background_calls()
    lines = await export_lines(database, driver.tenant_id, driver.conversation_id)
    assert {json.loads(line)["record"] for line in lines} >= {"segment", "epoch", "call", "template"}
    other = await strata_server.key_ring.create_tenant("other")
    async with database.connection() as connection:
        # The archive has those of the static texts and of the summary.
        await connection.execute("DELETE FROM templates")

    [made] = await import_lines(database, other.id, lines, new_ids=True)

    assert made != driver.conversation_id
    conversation = await driver.program.store.load_conversation(other.id, made)
    assert conversation.assistant_id != driver.assistant_id
    copy = ConversationDriver(
        program=driver.program,
        tenant_id=other.id,
        emulated=emulated,
        conversation_id=made,
        assistant_id=conversation.assistant_id,
    )
    assert await assert_rebuilds(copy) == await assert_rebuilds(driver)
    assert await next_request(copy) == await next_request(driver)


async def test_a_signed_summary_comes_back_and_is_accepted_again(
    database: Database, strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    signing = {"compaction": {"policy": "off", "keep_exchanges": 2, "signed": True}}
    driver = await start_driver(
        strata_server.program,
        strata_server.tenant.id,
        emulated,
        ANTHROPIC,
        settings=signing,
        model="claude-sonnet-5-5",
    )
    for number in range(5):
        await driver.task(f"Task {number}.", tool_reply("Oslo"), text_reply("Done."))
    compactor = strata_server.program.compactor
    assert (
        await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    ).outcome is CompactionOutcome.SIGNED
    before = await rows_of(database, driver.conversation_id)
    lines = await export_lines(database, driver.tenant_id, driver.conversation_id)
    expected = await next_request(driver)
    await driver.program.store.erase_conversation(driver.tenant_id, driver.conversation_id)
    await forget_shared(database)

    await import_lines(database, driver.tenant_id, lines)

    assert await rows_of(database, driver.conversation_id) == before
    assert await next_request(driver) == expected
    await assert_rebuilds(driver)
    assert_all_accepted(emulated[ANTHROPIC].requests())


async def test_any_text_and_any_bytes_come_back(store: PostgresStore, database: Database, tenant: Tenant) -> None:
    assistant = await create_assistant(store, tenant.id, name=NASTY, variables={NASTY: [NASTY, 1e300, 5e-324, 2**70]})
    draft = ConversationDraft(
        assistant_id=assistant.id, identifier=NASTY, metadata={"$text": NASTY}, args={"$text": "x"}, context={NASTY: 1}
    )
    conversation = await store.create_conversation(tenant.id, draft)
    image = picture(bytes(range(256)))
    turn = user_input(conversation.id, NASTY, blobs=(image,), idempotency_key=NASTY, args={"n": [1.0, 1e-7, -0.0]})
    accepted = await accept(store, tenant.id, turn)
    await store.begin_epoch(tenant.id, conversation.id, epoch(text=NASTY), template_source=NASTY)
    end = call_end(raw_response=bytes(range(256)) * 300, headers={"x": NASTY}, usage_reported={"a": 0.0000001})
    await store.finish_turn(accepted.lease, answer(NASTY, start=call_start(dynamic=b"\xff\x00"), end=end))
    before = await rows_of(database, conversation.id)
    lines = await export_lines(database, tenant.id, conversation.id)
    await store.erase_conversation(tenant.id, conversation.id)
    await forget_shared(database)

    await import_lines(database, tenant.id, lines)

    assert await rows_of(database, conversation.id) == before
    [call] = await store.list_calls(tenant.id, conversation.id, 2)
    assert call.end == end


async def test_a_running_conversation_is_not_exported(store: PostgresStore, database: Database, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    with pytest.raises(ConversationBusy):
        await export_lines(database, tenant.id, conversation.id)
    await store.finish_turn(accepted.lease, answer())
    assert await export_lines(database, tenant.id, conversation.id)


async def test_a_conversation_of_another_tenant_is_not_found(
    store: PostgresStore, database: Database, tenant: Tenant, key_ring: KeyRing
) -> None:
    conversation = await create_conversation(store, tenant.id)
    other = await key_ring.create_tenant("other")
    for tenant_id, conversation_id in (
        (other.id, conversation.id),
        (tenant.id, new_id(CONVERSATION)),
        (tenant.id, "x"),
        ("x", conversation.id),
    ):
        with pytest.raises(ConversationNotFound):
            await export_lines(database, tenant_id, conversation_id)


async def exchange(store: PostgresStore, tenant: Tenant, count: int = 2) -> str:
    conversation = await create_conversation(store, tenant.id)
    for number in range(count):
        await take_exchange(store, tenant.id, conversation.id, f"Question {number}")
    return conversation.id


async def test_an_existing_conversation_is_refused_and_stays_unchanged(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    conversation_id = await exchange(store, tenant)
    lines = await export_lines(database, tenant.id, conversation_id)
    before = await rows_of(database, conversation_id)
    with pytest.raises(ConversationExists) as refused:
        await import_lines(database, tenant.id, lines)
    assert refused.value.details == {"conversation_id": conversation_id}
    importer = Importer(database, ImportOptions(tenant_id=tenant.id))
    with pytest.raises(ConversationExists):
        # Created by another process between the check and the import.
        await anext(importer.import_archive(lines))
    assert await rows_of(database, conversation_id) == before


async def test_an_assistant_of_another_tenant_is_not_reused(
    store: PostgresStore, database: Database, tenant: Tenant, key_ring: KeyRing
) -> None:
    conversation_id = await exchange(store, tenant)
    lines = await export_lines(database, tenant.id, conversation_id)
    await store.erase_conversation(tenant.id, conversation_id)
    other = await key_ring.create_tenant("other")
    with pytest.raises(AssistantExists):
        await import_lines(database, other.id, lines)
    assert await import_lines(database, other.id, lines, new_ids=True) != [conversation_id]


async def test_a_dry_run_reports_what_an_import_would_and_leaves_nothing(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    conversation_id = await exchange(store, tenant)
    lines = await export_lines(database, tenant.id, conversation_id)
    with pytest.raises(ConversationExists):
        await import_lines(database, tenant.id, lines, dry_run=True)
    await store.erase_conversation(tenant.id, conversation_id)
    assert await import_lines(database, tenant.id, lines, dry_run=True) == [conversation_id]
    with pytest.raises(ConversationNotFound):
        await store.load_conversation(tenant.id, conversation_id)


async def test_a_file_that_was_cut_or_altered_anywhere_leaves_nothing(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    turn = user_input(conversation.id, TEXT, blobs=(picture(b"a picture"),))
    await store.finish_turn((await accept(store, tenant.id, turn)).lease, answer())
    lines = await export_lines(database, tenant.id, conversation.id)
    await store.erase_conversation(tenant.id, conversation.id)
    damaged = [
        *(lines[:count] for count in range(len(lines))),
        *(lines[:at] + lines[at + 1 :] for at in range(len(lines))),
        *([*lines[:at], lines[at][: len(lines[at]) // 2]] for at in range(len(lines))),
        *([*lines[:at], lines[at], *lines[at:]] for at in range(len(lines))),
        *([*lines[:at], lines[at].replace(b"e", b"f", 1), *lines[at + 1 :]] for at in range(len(lines))),
    ]
    for number, file in enumerate(damaged):
        with pytest.raises(ArchiveInvalid):
            await import_lines(database, tenant.id, file)
        found = await rows_of(database, conversation.id)
        assert not any(found[name] for name in found), number
    assert await import_lines(database, tenant.id, lines) == [conversation.id]


async def test_a_file_without_its_last_conversation_imports_nothing(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    ids = [await exchange(store, tenant, count=1), await exchange(store, tenant, count=1)]
    lines = await export_several(database, ids)
    for conversation_id in ids:
        await store.erase_conversation(tenant.id, conversation_id)
    first_end = next(at for at, line in enumerate(lines) if b'"record":"end"' in line)
    for file in (lines[: first_end + 1], [*lines[: first_end + 1], lines[-1]]):
        with pytest.raises(ArchiveInvalid):
            await import_lines(database, tenant.id, file)
    assert (await store.list_conversations(tenant.id)).items == []
    assert await import_lines(database, tenant.id, lines) == ids


async def test_an_assistant_with_an_invalid_model_name_is_refused(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    """The name would become part of a URL of the provider."""
    conversation_id = await exchange(store, tenant, count=1)
    lines = await export_lines(database, tenant.id, conversation_id)
    await store.erase_conversation(tenant.id, conversation_id)
    at = next(at for at, line in enumerate(lines) if b'"record":"assistant"' in line)
    forged = json.loads(lines[at])
    forged["model"] = "x/%2e%2e/gemini-3.8-flash"
    lines[at] = json.dumps(forged, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    *records, end, close = lines
    renewed = json.loads(end) | {"sha256": hashlib.sha256(b"".join(records[1:])).hexdigest()}
    file = [*records, json.dumps(renewed, separators=(",", ":")).encode() + b"\n", close]
    importer = Importer(database, ImportOptions(tenant_id=tenant.id, new_ids=True))
    with pytest.raises(ArchiveInvalid, match=f"Line {at + 1}.*model"):
        await importer.check(file)
    with pytest.raises(ArchiveInvalid, match=f"Line {at + 1}.*model"):
        await import_lines(database, tenant.id, file)


async def test_a_row_that_fits_no_table_is_refused_with_the_whole_file(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    """The hash protects against accidents, not against forgery: anyone can compute one."""
    conversation_id = await exchange(store, tenant, count=1)
    lines = await export_lines(database, tenant.id, conversation_id)
    await store.erase_conversation(tenant.id, conversation_id)
    forged = [line.replace(b'"kind":"user_task"', b'"kind":"nonsense"') for line in lines]
    *records, _, close = forged
    end = json.loads(lines[-2]) | {"sha256": hashlib.sha256(b"".join(records[1:])).hexdigest()}
    with pytest.raises(ArchiveInvalid, match="violates a constraint"):
        await import_lines(database, tenant.id, [*records, json.dumps(end).encode() + b"\n", close])
    with pytest.raises(ConversationNotFound):
        await store.load_conversation(tenant.id, conversation_id)


async def test_forks_refer_to_the_new_ids_of_their_source(
    store: PostgresStore, database: Database, tenant: Tenant
) -> None:
    source = await exchange(store, tenant)
    fork = (await store.fork_conversation(tenant.id, source, 2)).id
    made = await import_lines(database, tenant.id, await export_several(database, [source, fork]), new_ids=True)
    origin = (await store.load_conversation(tenant.id, made[1])).forked_from
    assert origin is not None
    assert (origin.conversation_id, origin.seq) == (made[0], 2)
    alone_lines = await export_lines(database, tenant.id, fork)
    [alone] = await import_lines(database, tenant.id, alone_lines, new_ids=True)
    origin = (await store.load_conversation(tenant.id, alone)).forked_from
    assert origin is not None
    assert origin.conversation_id == source


async def test_a_large_conversation_is_never_in_memory_as_a_whole(
    store: PostgresStore, database: Database, tenant: Tenant, tmp_path: Path
) -> None:
    size, count = 1_000_000, 40
    conversation = await create_conversation(store, tenant.id)
    random = Random(1)  # noqa: S311  reason: bytes that do not compress
    for number in range(count):
        end = call_end(raw_response=random.randbytes(size))
        await take_exchange(store, tenant.id, conversation.id, f"Question {number}", end=end)
    path = tmp_path / "large.jsonl"
    importer = Importer(database, ImportOptions(tenant_id=tenant.id))
    tracemalloc.start()
    try:
        with writing(str(path)) as file:
            async for line in PostgresArchives(database).export_conversation(tenant.id, conversation.id):
                file.write(line)
        await store.erase_conversation(tenant.id, conversation.id)
        await importer.check(read_lines(path))
        [made] = [imported async for imported in importer.import_archive(read_lines(path))]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (made.conversation_id, made.turn_count) == (conversation.id, 2 * count)
    assert peak < size * count * 0.8


def test_every_table_of_a_conversation_is_in_the_archive_or_named_with_a_reason() -> None:
    owned = {table.name for table in metadata.sorted_tables if "conversation_id" in table.c}
    archived = {table.name for table in ARCHIVED.values()}
    assert owned <= archived | NOT_ARCHIVED.keys()
    assert not archived & NOT_ARCHIVED.keys()
    assert set(ARCHIVED) == set(RecordKind) - {RecordKind.ARCHIVE, RecordKind.END, RecordKind.CLOSE}
