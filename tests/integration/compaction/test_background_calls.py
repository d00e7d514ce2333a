"""Calls of no turn: written down before they leave, paid for once, and made again to the byte by any process."""

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
from tests.support.compaction_driver import STORY, build_calls, build_compactor, walk_far
from tests.support.conversation_driver import Walk, assert_all_accepted, assert_rebuilds, begin_walk, eventually, tells
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.compaction_observer import Observed


@pytest.fixture(params=BOTH)
async def walk(
    strata_server: StrataServer, emulated: EmulatedProviders, request: pytest.FixtureRequest
) -> AsyncIterator[Walk]:
    walk = await walk_far(strata_server, emulated, request.param)
    yield walk
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())


async def ask(walk: Walk, *, attempts: int = 1) -> str:
    """A summary of the oldest segment, put to no use."""
    program = walk.program
    renderer = program.compactor._renderer  # noqa: SLF001  reason: there is no need for a second one
    summariser = Summariser(build_calls(program, attempts=attempts), renderer, limit_tokens=100)
    history = await program.store.load_history(walk.tenant_id, walk.conversation_id)
    request = SummaryRequest(history=history, static_text=history.source.static_text or "", count=1)
    return await summariser.summarise(walk.tenant_id, request)


def says(walk: Walk, *texts: str) -> None:
    for name in BOTH:
        walk.emulated[name].says(*(tells(text) for text in texts))


def fails(walk: Walk, kind: FaultKind, **options: Any) -> None:
    for name in BOTH:
        walk.emulated[name].fails(kind, **options)


def asked_count(walk: Walk) -> int:
    return sum("Write a summary" in str(request["body"]) for name in BOTH for request in walk.emulated[name].requests())


def codes_of(calls: list[Call]) -> list[tuple[int, str | None]]:
    return [(call.start.attempt, None if call.end is None else call.end.error_code) for call in calls]


async def test_a_call_is_written_down_before_it_leaves_and_when_it_is_given_up(walk: Walk) -> None:
    fails(walk, FaultKind.SILENCE, after_chunks=1)
    asking = asyncio.create_task(ask(walk))

    async def is_asked() -> bool:
        return asked_count(walk) > 0

    await eventually(is_asked)
    [call] = await walk.background_calls()
    assert call.end is None
    assert call.start.attempt == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    [ended] = await walk.background_calls()
    assert ended.start == call.start
    assert ended.end is not None
    assert ended.end.error_code == CANCELLED
    await assert_rebuilds(walk)
    # What is known of it is no answer: it is asked for again.
    says(walk, "Foxes.")
    assert await ask(walk) == "Foxes."
    assert codes_of(await walk.background_calls()) == [(1, CANCELLED), (2, None)]


async def test_every_attempt_is_kept_with_its_cost_also_one_that_broke_off(walk: Walk) -> None:
    fails(walk, FaultKind.OVERLOADED)
    fails(walk, FaultKind.CUT, after_chunks=3)
    says(walk, "Cut off.", "Foxes.")
    assert "." in await ask(walk, attempts=3)
    calls = await walk.background_calls()
    assert [code for _, code in codes_of(calls)] == ["provider_overloaded", "provider_disconnected", None]
    assert [call.start.attempt for call in calls] == [1, 2, 3]
    assert all(call.end is not None and call.end.cost_usd is not None for call in calls)
    assert await assert_rebuilds(walk) >= len(calls)


async def test_patience_ends(walk: Walk) -> None:
    fails(walk, FaultKind.OVERLOADED, times=2)
    with pytest.raises(ProviderFailed):
        await ask(walk, attempts=2)
    assert [code for _, code in codes_of(await walk.background_calls())] == ["provider_overloaded"] * 2


async def test_the_same_question_is_paid_for_once(walk: Walk) -> None:
    says(walk, "Foxes.")
    assert [await ask(walk) for _ in range(3)] == ["Foxes."] * 3
    assert asked_count(walk) == 1


async def test_of_many_that_ask_at_the_same_time_one_pays_and_the_others_come_back(walk: Walk) -> None:
    says(walk, "Foxes.")
    answers = await asyncio.gather(*(ask(walk) for _ in range(5)), return_exceptions=True)
    # Whoever was late enough has the answer already.
    assert {str(answer) for answer in answers if not isinstance(answer, SummaryUnavailable)} == {"Foxes."}
    assert len(await walk.background_calls()) == asked_count(walk) == 1
    assert await ask(walk) == "Foxes."


async def test_a_call_of_which_nothing_was_heard_for_long_is_made_again(walk: Walk) -> None:
    fails(walk, FaultKind.SILENCE)
    asking = asyncio.create_task(ask(walk))

    async def is_asked() -> bool:
        return asked_count(walk) > 0

    await eventually(is_asked)
    with pytest.raises(SummaryUnavailable):
        await ask(walk)
    async with walk.program.database.connection() as connection:
        await connection.execute("UPDATE calls SET started_at = started_at - interval '1 hour' WHERE turn_seq < 0")
    says(walk, "Foxes.")
    assert await ask(walk) == "Foxes."
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    # The first one has come to life too late to say how it ended, and has not hidden the second.
    assert [call.end is None for call in await walk.background_calls()] == [True, False]


async def test_an_answer_is_written_down_when_the_database_is_back(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = walk.program.store, 2
    record = type(store).record_call

    async def fail_sometimes(self: Any, tenant_id: str, conversation_id: str, call: Call, **more: Any) -> bool:
        nonlocal failures
        if call.end is not None and failures:
            failures -= 1
            raise DatabaseUnavailable
        return await record(self, tenant_id, conversation_id, call, **more)

    monkeypatch.setattr(type(store), "record_call", fail_sometimes)
    monkeypatch.setattr(outages, "_PAUSE_SECONDS", 0.001)
    says(walk, "Foxes.")
    assert await ask(walk) == "Foxes."
    assert failures == 0
    [call] = await walk.background_calls()
    assert call.end is not None


def other_templates(tmp_path: Path) -> JinjaRenderer:
    (tmp_path / "history_summary.j2").write_text("Write a summary of {{ first_seq }}-{{ last_seq }}, please.\n")
    (tmp_path / "history_segment.j2").write_text("{% for turn in turns %}[{{ turn.seq }}] told\n{% endfor %}")
    return JinjaRenderer(load_templates(tmp_path), RenderLimits())


async def test_a_question_is_made_again_by_another_process_with_other_templates(
    walk: Walk, strata_server: StrataServer, tmp_path: Path
) -> None:
    renderer = other_templates(tmp_path)
    says(walk, "Foxes.")
    compactor = build_compactor(strata_server.program, Observed(), renderer=renderer, limit_tokens=70)
    await compactor.compact(walk.tenant_id, walk.conversation_id)
    await renderer.close()
    (tmp_path / "history_summary.j2").write_text("Something else.")
    store = PostgresStore(strata_server.program.database)
    [call] = await walk.background_calls()
    source = await store.load_rebuild_source(walk.tenant_id, walk.conversation_id, call.turn_seq, call.start.attempt)
    async with walk.emulated.open(strata_server.program.settings, key="another") as providers:
        provider = providers.by_name[call.start.provider]
        body = await provider.encode_request(rebuild_call(source, provider=provider))
    assert hashlib.sha256(body).digest() == call.start.request_hash
    assert b", please." in body
    note = next(warning for warning in call.start.warnings if warning["kind"] == "summary")
    archived = await store.load_template(bytes.fromhex(note["template_hash"]))
    assert archived == "Write a summary of {{ first_seq }}-{{ last_seq }}, please.\n"


ROOMY = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1}}
"""All but the newest exchange is moved at once, into a window that never runs short."""
steps = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 3)),
    st.tuples(st.just("summarise"), st.sampled_from(["Foxes.", "", "né\u0000\ud800"]), st.integers(20, 90)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("switch"), st.sampled_from(BOTH)),
    st.tuples(st.just("args"), st.text(max_size=5)),
)


async def take(walk: Walk, step: tuple[Any, ...]) -> None:
    compactor = build_compactor(walk.program, Observed())
    match step:
        case ("grow", count):
            for _ in range(count):
                await walk.task(f"More. {STORY}", tells(f"So it is. {STORY}"))
                await compactor.compact(walk.tenant_id, walk.conversation_id, force=True)
        case ("summarise", text, limit_tokens):
            says(walk, text)
            compactor = build_compactor(walk.program, Observed(), limit_tokens=limit_tokens)
            try:
                await compactor._rewriter.summarise(  # noqa: SLF001  reason: no window is this small
                    walk.tenant_id, walk.conversation_id, 0
                )
            except SummaryUnavailable:
                assert text != "Foxes."
            for name in BOTH:
                walk.emulated[name].lines.turns.clear()
        case ("undo",):
            with suppress(CompactionNotFound):
                await compactor.undo(walk.tenant_id, walk.conversation_id)
        case ("switch", provider):
            await walk.switch(provider, settings=ROOMY)
            await walk.task("Who is this?", tells("Me."))
        case ("args", text):
            await walk.change(args={"tone": text})
            await walk.task("How is it?", tells("Fine."))
        case _:
            raise AssertionError(step)


@pytest.mark.parametrize("provider", BOTH)
@settings(max_examples=8)
@given(taken=st.lists(steps, min_size=2, max_size=7))
async def test_whatever_was_compacted_every_request_can_be_made_again(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, taken: list[tuple[Any, ...]]
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=ROOMY)
    for step in [("grow", 3), *taken, ("grow", 2), ("summarise", "Foxes.", 30)]:
        await take(walk, step)
    assert await walk.background_calls()
    await assert_rebuilds(walk)
    for name in BOTH:
        assert_all_accepted(emulated[name].requests())
        emulated[name].state.request_log.clear()
