"""What is read from the caches of the providers, what was expected, and the reasons for less."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from server.compaction.background_call import BackgroundCalls
from server.compaction.simulation.comparison import find_priced_model
from server.conversation.assistant import Instructions
from server.conversation.block import TextBlock
from server.conversation.call import Call, CallEnd
from server.conversation.epoch import EpochReason, Segment
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.payload import PIECE_CHARACTERS, LayerOrder
from server.conversation.turn import TurnState
from server.payload.builder import hash_prefix
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.contracts.provider_harness import build_payload
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    messages_of,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders, MovedClock, Stages
from tests.support.fakes.compaction_observer import Observed

LONG = Instructions(roles="You help. " * 2_500, procedure="Think, then answer.", constraints="Be kind.")
"""Some six thousand tokens: above every minimum."""
APPEND_ONLY = {"layer_order": "append_only"}
LAYERED = {"layer_order": "layered"}
EITHER_ORDER = {GEMINI: "gemini-3.8-flash", ANTHROPIC: "claude-opus-4-8"}
"""Models that allow both orders."""
MINUTES = 60.0


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def emulated(stages: Stages, clock: MovedClock) -> EmulatedProviders:
    return stages.play(clock=clock)


async def begin(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> ConversationDriver:
    values = {"instructions": LONG} | changes
    return await start_driver(server.program, server.tenant.id, emulated, provider, **values)


async def let_pass(driver: ConversationDriver, clock: MovedClock, seconds: float) -> None:
    """Let time pass for both sides: the clock of the emulators moves forward, and the stored calls move back."""
    clock.ahead_seconds += seconds
    async with driver.program.database.connection() as connection:
        await connection.execute(
            "UPDATE calls SET started_at = started_at - $1::interval WHERE conversation_id = $2",
            timedelta(seconds=seconds),
            decode_id(CONVERSATION, driver.conversation_id),
        )


async def take_exchanges(driver: ConversationDriver, exchanges: int) -> None:
    for number in range(exchanges):
        await driver.task(
            f"Question {number}, if you please?", tool_reply("Oslo", "Bergen"), text_reply(f"Answer {number}.")
        )


def end_of(call: Call) -> CallEnd:
    assert call.end is not None
    return call.end


def reads(calls: Sequence[Call]) -> list[tuple[int | None, int]]:
    """The expected and the reported cache reads of each call."""
    return [(call.start.cache_expected_tokens, end_of(call).usage.cache_read_tokens) for call in calls]


def reasons(calls: Sequence[Call]) -> list[str | None]:
    return [end_of(call).cache_miss_reason for call in calls]


def share(calls: Sequence[Call]) -> float:
    usages = [end_of(call).usage for call in calls]
    return sum(usage.cache_read_tokens for usage in usages) / sum(usage.input_tokens for usage in usages)


@pytest.mark.parametrize(
    ("provider", "changes"),
    [
        (ANTHROPIC, {}),
        (ANTHROPIC, {"model": EITHER_ORDER[ANTHROPIC], "settings": LAYERED}),
        (GEMINI, {"settings": APPEND_ONLY}),
        (GEMINI, {}),
    ],
    ids=["claude", "claude layered", "gemini append-only", "gemini"],
)
async def test_an_undisturbed_conversation_reads_exactly_what_is_expected(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, changes: dict[str, Any]
) -> None:
    driver = await begin(strata_server, emulated, provider, **changes)
    await take_exchanges(driver, 5)
    calls = await driver.calls()
    assert len(calls) == 10
    assert all(expected == read for expected, read in reads(calls))
    assert reasons(calls) == [None] * 10
    assert share(calls[1:]) > 0.95
    assert_no_break(calls)
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(driver)


@pytest.mark.parametrize("provider", BOTH)
async def test_the_layered_order_costs_no_more_than_the_append_only_one(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    costs = {}
    for order in LayerOrder:
        settings = {"layer_order": str(order)}
        driver = await begin(strata_server, emulated, provider, model=EITHER_ORDER[provider], settings=settings)
        await driver.change(
            context={"todos": [f"Remember the thing with the number {number}." for number in range(50)]}
        )
        await take_exchanges(driver, 30)
        calls = await driver.calls()
        tariff = find_priced_model(provider, EITHER_ORDER[provider], order, calls[0].start.started_at).tariff
        usages = [end_of(call).usage for call in calls]
        costs[order] = sum(
            usage.fresh_input_tokens * tariff.fresh
            + usage.cache_read_tokens * tariff.read
            + usage.cache_write_tokens * tariff.write
            for usage in usages
        )
        await assert_rebuilds(driver)
    assert_all_accepted(emulated[provider].requests())
    assert costs[LayerOrder.LAYERED] <= 1.05 * costs[LayerOrder.APPEND_ONLY]


@pytest.mark.parametrize("provider", BOTH)
async def test_the_layered_order_repeats_all_until_the_context_changes(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await begin(strata_server, emulated, provider, model=EITHER_ORDER[provider], settings=LAYERED)
    await take_exchanges(driver, 2)
    await driver.change(context={"todos": ["pack"]})
    await take_exchanges(driver, 1)
    bodies = [messages_of(provider, request["body"]) for request in emulated[provider].requests()]
    assert all(after[: len(before)] == before for before, after in pairwise(bodies[:4]))
    # The changed block is sent at once, and the messages after it are the same.
    assert "pack" in json.dumps(bodies[4][0])
    assert bodies[4][1 : len(bodies[3])] == bodies[3][1:]
    assert bodies[5][: len(bodies[4])] == bodies[4]
    changed = (await driver.calls())[4]
    assert end_of(changed).cache_miss_reason is None
    for call, body in zip((await driver.calls())[::2], bodies[::2], strict=True):
        task = body[-1].get("parts") or body[-1]["content"]
        sent = datetime.fromisoformat(json.loads(task[0]["text"])["current_datetime"])
        assert abs(call.start.started_at - sent) < timedelta(seconds=30)
    await assert_rebuilds(driver)


async def test_gemini_in_the_layered_order_reads_its_static_text(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated, GEMINI)
    for number in range(4):
        await driver.change(context={"todos": [f"Thing {number}"]})
        await driver.task(f"Question {number}?", text_reply("Yes."))
    calls = await driver.calls()
    assert reasons(calls) == [None] * 4
    assert all(abs((expected or 0) - read) <= 0.05 * read for expected, read in reads(calls))
    assert share(calls[1:]) > 0.9


@pytest.mark.parametrize("provider", [ANTHROPIC, GEMINI])
async def test_an_expired_cache_is_the_reason(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock, provider: str
) -> None:
    driver = await begin(strata_server, emulated, provider)
    await driver.task("First?", text_reply("Yes."))
    await let_pass(driver, clock, 120 * MINUTES)
    await driver.task("Second?", text_reply("Yes."))
    calls = await driver.calls()
    assert reads(calls)[1] == (0, 0)
    assert reasons(calls) == [None, "ttl_expired"]


async def test_after_some_minutes_claude_still_has_the_static_text(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC)
    await driver.task("First? " * 300, text_reply("Yes."))
    await let_pass(driver, clock, 6 * MINUTES)
    await driver.task("Second?", text_reply("Yes."))
    calls = await driver.calls()
    expected, read = reads(calls)[1]
    assert read > 5_000
    assert abs((expected or 0) - read) <= 0.05 * read
    assert reasons(calls)[1] == "ttl_expired"


async def test_a_changed_prefix_is_the_reason(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC)
    await driver.task("First?", text_reply("Yes."))
    await driver.switch(ANTHROPIC, instructions=Instructions(roles="Otherwise. " * 2_000))
    await driver.task("Second?", text_reply("Yes."))
    await driver.switch(ANTHROPIC, "claude-sonnet-5-5", instructions=LONG)
    await driver.task("Third?", text_reply("Yes."))
    await driver.switch(GEMINI, instructions=LONG)
    await driver.task("Fourth?", text_reply("Yes."))
    assert reasons(await driver.calls()) == [None, "epoch_began", "model_changed", "model_changed"]
    await assert_rebuilds(driver)


async def test_a_too_short_request_is_the_reason(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC, instructions=Instructions(roles="You help."))
    await driver.task("First?", text_reply("Yes."))
    await driver.task("Second?", text_reply("Yes."))
    calls = await driver.calls()
    assert reads(calls) == [(0, 0), (0, 0)]
    assert reasons(calls) == [None, "below_minimum"]


async def test_claude_reports_why_its_cache_missed(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC)
    await driver.task("First?", text_reply("Yes."))
    # Another effort invalidates cached messages, which only the provider knows.
    await driver.switch(ANTHROPIC, instructions=LONG, settings={"thinking": "high"})
    await driver.task("Second? " * 300, text_reply("Yes."))
    await driver.switch(ANTHROPIC, instructions=LONG, settings={"thinking": "low"})
    await driver.task("Third?", text_reply("Yes."))
    calls = await driver.calls()
    bodies = [request["body"] for request in emulated.anthropic.requests()]
    asked = [body["diagnostics"]["previous_message_id"] for body in bodies]
    assert asked == [None, *(end_of(call).response_id for call in calls[:-1])]
    assert all(asked[1:])
    assert reasons(calls)[-1] == "unavailable"


async def test_there_are_at_most_four_markers_and_longer_lifetimes_come_first(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC)
    await driver.task("First?", tool_reply(*(f"city {number}" for number in range(20))), text_reply("Cold."))
    await driver.task("Second?", text_reply("Yes."))
    for number in range(3):
        await let_pass(driver, clock, 10 * MINUTES)
        await driver.task(f"Later {number}?", text_reply("Yes."))
    bodies = [request["body"] for request in emulated.anthropic.requests()]
    markers = [_markers(body) for body in bodies]
    assert [len(found) for found in markers] == [4] * 6
    assert "cache_control" not in bodies[1]["tools"][-1]
    assert markers[2] == ["1h", "1h", "5m", "5m"]
    assert markers[-1] == ["1h"] * 4
    calls = await driver.calls()
    assert reasons(calls)[-1] is None
    assert reads(calls)[-1][0] == reads(calls)[-1][1] > 5_000
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(driver)


def _markers(body: dict[str, Any]) -> list[str]:
    """The lifetimes in order."""
    blocks = [*body["tools"], *body["system"], *(block for one in body["messages"] for block in one["content"])]
    return [block["cache_control"].get("ttl", "5m") for block in blocks if "cache_control" in block]


@pytest.mark.parametrize("provider", [ANTHROPIC, GEMINI])
async def test_a_static_text_that_grew_keeps_its_cached_part(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await begin(strata_server, emulated, provider, instructions=Instructions(roles="You help.\n" * 5_000))
    await driver.task("First?", text_reply("Yes."))
    await grow(driver, "[1] First? Yes.\n" * 1_500)
    await driver.task("Second?", text_reply("Yes."))
    await grow(driver, "[2] Second? Yes.\n" * 3_000)
    await driver.task("Third?", text_reply("Yes."))
    calls = await driver.calls()
    assert reasons(calls)[-1] == "epoch_began"
    assert "unknown" not in reasons(calls)
    for call in calls[1:]:
        usage = end_of(call).usage
        assert usage.cache_read_tokens > 3 * PIECE_CHARACTERS / 4 * 0.9
        assert abs((call.start.cache_expected_tokens or 0) - usage.cache_read_tokens) < 0.05 * usage.cache_read_tokens
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(driver)


async def grow(driver: ConversationDriver, text: str) -> None:
    """All turns so far become a segment of the static text."""
    store = driver.program.store
    source = await store.load_payload_source(driver.tenant_id, driver.conversation_id)
    epoch, static = source.epoch, source.static_text
    assert epoch is not None
    assert static is not None
    whole = static + text
    segment = Segment(
        generation=0,
        position=epoch.segment_count,
        first_seq=epoch.buffer_start_seq,
        last_seq=source.conversation.next_seq - 1,
        text=text,
        token_count=1,
    )
    following = replace(
        epoch,
        number=epoch.number + 1,
        reason=EpochReason.COMPACTED,
        segment_count=epoch.segment_count + 1,
        static_hash=hashlib.sha256(whole.encode()).digest(),
        prefix_hash=hash_prefix(whole, source.assistant.definition.tools),
        buffer_start_seq=source.conversation.next_seq,
    )
    await store.begin_epoch(driver.tenant_id, driver.conversation_id, following, segment=segment)


async def test_a_fork_reads_the_cache_of_its_source(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC)
    await take_exchanges(driver, 2)
    fork = await driver.fork(8)
    ended = await fork.task("Otherwise?", text_reply("Yes."))
    assert ended.turn.state is TurnState.COMPLETE
    expected, read = reads(await fork.calls())[-1]
    assert expected == read > 5_000


async def test_a_call_that_was_cut_off_has_cached_its_request(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated, ANTHROPIC)
    await driver.task("First?", text_reply("Yes."))
    await driver.fail("Second?", text_reply("One two three."), after_chunks=2)
    await driver.task("Third?", text_reply("Yes."))
    calls = await driver.calls()
    assert [end_of(call).error_code for call in calls] == [None, "provider_disconnected", None]
    assert all(expected == read for expected, read in reads(calls))
    assert reasons(calls) == [None] * 3


@pytest.mark.parametrize("provider", [ANTHROPIC, GEMINI])
async def test_a_background_call_reads_the_prefix_or_has_a_reason(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock, provider: str
) -> None:
    driver = await begin(strata_server, emulated, provider)
    await take_exchanges(driver, 2)
    observed = Observed()
    calls = BackgroundCalls(driver.program.store, driver.program.providers.by_name, observer=observed)
    await ask_aside(driver, calls, "Sum it up.")
    await let_pass(driver, clock, 120 * MINUTES)
    await ask_aside(driver, calls, "Sum it up again.")
    kept = await driver.program.store.list_calls(driver.tenant_id, driver.conversation_id, -1)
    assert [(assistant_id, end.usage, end.cost_usd) for assistant_id, _, end in observed.calls] == [
        (driver.assistant_id, end_of(call).usage, end_of(call).cost_usd) for call in kept
    ]
    (expected, read), late = reads(kept)
    assert read > 5_000
    # For a part of the previous request, only its share of the bytes is known.
    assert 0.85 * read <= (expected or 0) <= 1.05 * read
    assert late == (0, 0)
    assert reasons(kept) == [None, "ttl_expired"]


async def ask_aside(driver: ConversationDriver, calls: BackgroundCalls, text: str) -> None:
    """A background call with the prefix of the conversation."""
    history = await driver.program.store.load_history(driver.tenant_id, driver.conversation_id)
    source = history.source
    asked = calls.provider_of(history).user_message((TextBlock(text=text),), {})
    payload = build_payload(
        source.assistant.definition.model,
        [asked],
        static_text=source.static_text,
        tools=source.assistant.definition.tools,
    )
    await calls.ask(driver.tenant_id, history, payload, note={"kind": "test"})
