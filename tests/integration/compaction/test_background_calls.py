"""Background calls are recorded before they are sent, are billed once, and can be rebuilt byte for byte by any
process.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.compaction.background_call import CANCELLED
from server.compaction.summary import Summariser, SummaryRequest
from server.conversation import outages
from server.conversation.call import Call
from server.conversation.errors import CompactionNotFound, DatabaseUnavailable, ProviderFailed, SummaryUnavailable
from server.emulator.reply import FaultKind
from server.inspection.past_payload import rebuild_call
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from tests.conftest import StrataServer
from tests.support.compaction_driver import STORY, build_calls, build_compactor, drive_to_full_window
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    eventually,
    start_driver,
    text_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed


@pytest.fixture(params=BOTH)
async def driver(
    strata_server: StrataServer, emulated: EmulatedProviders, request: pytest.FixtureRequest
) -> AsyncIterator[ConversationDriver]:
    driver = await drive_to_full_window(strata_server, emulated, request.param)
    yield driver
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())


async def ask(driver: ConversationDriver, *, attempts: int = 1) -> str:
    """Request a summary of the oldest segment without using it."""
    program = driver.program
    renderer = program.compactor._renderer  # noqa: SLF001  reason: a second renderer is not needed
    summariser = Summariser(build_calls(program, attempts=attempts), renderer, limit_tokens=100)
    history = await program.store.load_history(driver.tenant_id, driver.conversation_id)
    request = SummaryRequest(history=history, static_text=history.source.static_text or "", count=1)
    return await summariser.summarise(driver.tenant_id, request)


def queue_texts(driver: ConversationDriver, *texts: str) -> None:
    for name in BOTH:
        driver.emulated[name].queue_replies(*(text_reply(text) for text in texts))


def inject_fault(driver: ConversationDriver, kind: FaultKind, **options: Any) -> None:
    for name in BOTH:
        driver.emulated[name].inject_fault(kind, **options)


def asked_count(driver: ConversationDriver) -> int:
    return sum(
        "Write a summary" in str(request["body"]) for name in BOTH for request in driver.emulated[name].requests()
    )


def codes_of(calls: list[Call]) -> list[tuple[int, str | None]]:
    return [(call.start.attempt, None if call.end is None else call.end.error_code) for call in calls]


async def test_a_call_is_recorded_before_it_is_sent_and_when_it_is_abandoned(driver: ConversationDriver) -> None:
    inject_fault(driver, FaultKind.SILENCE, after_chunks=1)
    asking = asyncio.create_task(ask(driver))

    async def is_asked() -> bool:
        return asked_count(driver) > 0

    await eventually(is_asked)
    [call] = await driver.background_calls()
    assert call.end is None
    assert call.start.attempt == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    [ended] = await driver.background_calls()
    assert ended.start == call.start
    assert ended.end is not None
    assert ended.end.error_code == CANCELLED
    await assert_rebuilds(driver)
    # Its outcome is no answer: the call is repeated.
    queue_texts(driver, "Foxes.")
    assert await ask(driver) == "Foxes."
    assert codes_of(await driver.background_calls()) == [(1, CANCELLED), (2, None)]


async def test_every_attempt_is_stored_with_its_cost_even_if_it_was_cut_off(driver: ConversationDriver) -> None:
    inject_fault(driver, FaultKind.OVERLOADED)
    inject_fault(driver, FaultKind.CUT, after_chunks=3)
    queue_texts(driver, "Cut off.", "Foxes.")
    assert "." in await ask(driver, attempts=3)
    calls = await driver.background_calls()
    assert [code for _, code in codes_of(calls)] == ["provider_overloaded", "provider_disconnected", None]
    assert [call.start.attempt for call in calls] == [1, 2, 3]
    assert all(call.end is not None and call.end.cost_usd is not None for call in calls)
    assert await assert_rebuilds(driver) >= len(calls)


async def test_the_retry_budget_ends(driver: ConversationDriver) -> None:
    inject_fault(driver, FaultKind.OVERLOADED, times=2)
    with pytest.raises(ProviderFailed):
        await ask(driver, attempts=2)
    assert [code for _, code in codes_of(await driver.background_calls())] == ["provider_overloaded"] * 2


async def test_the_same_request_is_billed_once(driver: ConversationDriver) -> None:
    queue_texts(driver, "Foxes.")
    assert [await ask(driver) for _ in range(3)] == ["Foxes."] * 3
    assert asked_count(driver) == 1


async def test_one_of_concurrent_requests_is_sent_and_the_others_reuse_it(driver: ConversationDriver) -> None:
    queue_texts(driver, "Foxes.")
    answers = await asyncio.gather(*(ask(driver) for _ in range(5)), return_exceptions=True)
    # A request that was late enough has the answer already.
    assert {str(answer) for answer in answers if not isinstance(answer, SummaryUnavailable)} == {"Foxes."}
    assert len(await driver.background_calls()) == asked_count(driver) == 1
    assert await ask(driver) == "Foxes."


async def test_a_call_without_any_sign_for_long_is_repeated(driver: ConversationDriver) -> None:
    inject_fault(driver, FaultKind.SILENCE)
    asking = asyncio.create_task(ask(driver))

    async def is_asked() -> bool:
        return asked_count(driver) > 0

    await eventually(is_asked)
    with pytest.raises(SummaryUnavailable):
        await ask(driver)
    async with driver.program.database.connection() as connection:
        await connection.execute("UPDATE calls SET started_at = started_at - interval '1 hour' WHERE turn_seq < 0")
    queue_texts(driver, "Foxes.")
    assert await ask(driver) == "Foxes."
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    # The first process resumed too late to store its outcome, and has not hidden the second call.
    assert [call.end is None for call in await driver.background_calls()] == [True, False]


async def test_an_answer_is_stored_when_the_database_is_available_again(
    driver: ConversationDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, failures = driver.program.store, 2
    record = type(store).record_call

    async def fail_sometimes(self: Any, tenant_id: str, conversation_id: str, call: Call, **more: Any) -> bool:
        nonlocal failures
        if call.end is not None and failures:
            failures -= 1
            raise DatabaseUnavailable
        return await record(self, tenant_id, conversation_id, call, **more)

    monkeypatch.setattr(type(store), "record_call", fail_sometimes)
    monkeypatch.setattr(outages, "_PAUSE_SECONDS", 0.001)
    queue_texts(driver, "Foxes.")
    assert await ask(driver) == "Foxes."
    assert failures == 0
    [call] = await driver.background_calls()
    assert call.end is not None


def other_templates(tmp_path: Path) -> JinjaRenderer:
    (tmp_path / "history_summary.j2").write_text("Write a summary of {{ first_seq }}-{{ last_seq }}, please.\n")
    (tmp_path / "history_segment.j2").write_text("{% for turn in turns %}[{{ turn.seq }}] told\n{% endfor %}")
    return JinjaRenderer(load_templates(tmp_path), RenderLimits())


async def test_a_request_is_rebuilt_by_another_process_with_other_templates(
    driver: ConversationDriver, strata_server: StrataServer, tmp_path: Path
) -> None:
    renderer = other_templates(tmp_path)
    queue_texts(driver, "Foxes.")
    compactor = build_compactor(strata_server.program, Observed(), renderer=renderer, limit_tokens=70)
    await compactor.compact(driver.tenant_id, driver.conversation_id)
    await renderer.close()
    (tmp_path / "history_summary.j2").write_text("Something else.")
    store = PostgresStore(strata_server.program.database)
    [call] = await driver.background_calls()
    source = await store.load_rebuild_source(
        driver.tenant_id, driver.conversation_id, call.turn_seq, call.start.attempt
    )
    async with driver.emulated.open(strata_server.program.settings, key="another") as providers:
        provider = providers.by_name[call.start.provider]
        body = await provider.encode_request(rebuild_call(source, provider=provider))
    assert hashlib.sha256(body).digest() == call.start.request_hash
    assert b", please." in body
    note = next(warning for warning in call.start.warnings if warning["kind"] == "summary")
    archived = await store.load_template(bytes.fromhex(note["template_hash"]))
    assert archived == "Write a summary of {{ first_seq }}-{{ last_seq }}, please.\n"


ROOMY = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1}}
"""Moves all but the newest exchange at once, into a window that is never full."""
steps = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 3)),
    st.tuples(st.just("summarise"), st.sampled_from(["Foxes.", "", "né\u0000\ud800"]), st.integers(20, 90)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("switch"), st.sampled_from(BOTH)),
    st.tuples(st.just("args"), st.text(max_size=5)),
)


async def take(driver: ConversationDriver, step: tuple[Any, ...]) -> None:
    compactor = build_compactor(driver.program, Observed())
    match step:
        case ("grow", count):
            for _ in range(count):
                await driver.task(f"More. {STORY}", text_reply(f"So it is. {STORY}"))
                await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
        case ("summarise", text, limit_tokens):
            queue_texts(driver, text)
            compactor = build_compactor(driver.program, Observed(), limit_tokens=limit_tokens)
            try:
                await compactor._rewriter.summarise(  # noqa: SLF001  reason: no window is this small
                    driver.tenant_id, driver.conversation_id, 0
                )
            except SummaryUnavailable:
                assert text != "Foxes."
            for name in BOTH:
                driver.emulated[name].lines.turns.clear()
        case ("undo",):
            with suppress(CompactionNotFound):
                await compactor.undo(driver.tenant_id, driver.conversation_id)
        case ("switch", provider):
            await driver.switch(provider, settings=ROOMY)
            await driver.task("Who is this?", text_reply("Me."))
        case ("args", text):
            await driver.change(args={"tone": text})
            await driver.task("How is it?", text_reply("Fine."))
        case _:
            raise AssertionError(step)


@pytest.mark.parametrize("provider", BOTH)
@settings(max_examples=8)
@given(taken=st.lists(steps, min_size=2, max_size=7))
async def test_after_any_compaction_every_request_can_be_rebuilt(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, taken: list[tuple[Any, ...]]
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=ROOMY)
    for step in [("grow", 3), *taken, ("grow", 2), ("summarise", "Foxes.", 30)]:
        await take(driver, step)
    assert await driver.background_calls()
    await assert_rebuilds(driver)
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())
        emulated[name].state.request_log.clear()
