"""What the providers' caches give, what was expected of them, and why they gave less."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from server.compaction.background_call import BackgroundCalls
from server.conversation.assistant import Instructions
from server.conversation.block import TextBlock
from server.conversation.call import Call, CallEnd
from server.conversation.epoch import EpochReason, Segment
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.payload import PIECE_CHARACTERS
from server.conversation.turn import TurnState
from server.payload.builder import hash_prefix
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.contracts.provider_rig import build_payload
from tests.support.conversation_driver import (
    Walk,
    asks,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    begin_walk,
    tells,
)
from tests.support.emulators import EmulatedProviders, MovedClock, Stages
from tests.support.fakes.compaction_observer import Observed

LONG = Instructions(roles="You help. " * 2_500, procedure="Think, then answer.", constraints="Be kind.")
"""Some six thousand tokens: above every minimum."""
APPEND_ONLY = {"layer_order": "append_only"}
MINUTES = 60.0


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def emulated(stages: Stages, clock: MovedClock) -> EmulatedProviders:
    return stages.play(clock=clock)


async def begin(server: StrataServer, emulated: EmulatedProviders, provider: str, **changes: Any) -> Walk:
    values = {"instructions": LONG} | changes
    return await begin_walk(server.program, server.tenant.id, emulated, provider, **values)


async def let_pass(walk: Walk, clock: MovedClock, seconds: float) -> None:
    """Time goes by for both sides: the emulators' clock moves on, and our calls move back."""
    clock.ahead_seconds += seconds
    async with walk.program.database.connection() as connection:
        await connection.execute(
            "UPDATE calls SET started_at = started_at - $1::interval WHERE conversation_id = $2",
            timedelta(seconds=seconds),
            decode_id(CONVERSATION, walk.conversation_id),
        )


async def talk(walk: Walk, exchanges: int) -> None:
    for number in range(exchanges):
        await walk.task(f"Question {number}, if you please?", asks("Oslo", "Bergen"), tells(f"Answer {number}."))


def end_of(call: Call) -> CallEnd:
    assert call.end is not None
    return call.end


def reads(calls: Sequence[Call]) -> list[tuple[int | None, int]]:
    """What was expected of each call and what it read."""
    return [(call.start.cache_expected_tokens, end_of(call).usage.cache_read_tokens) for call in calls]


def reasons(calls: Sequence[Call]) -> list[str | None]:
    return [end_of(call).cache_miss_reason for call in calls]


def share(calls: Sequence[Call]) -> float:
    usages = [end_of(call).usage for call in calls]
    return sum(usage.cache_read_tokens for usage in usages) / sum(usage.input_tokens for usage in usages)


@pytest.mark.parametrize(
    ("provider", "settings"), [(ANTHROPIC, {}), (GEMINI, APPEND_ONLY)], ids=["claude", "gemini append-only"]
)
async def test_a_conversation_that_nothing_disturbs_reads_what_is_expected_to_the_token(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str, settings: dict[str, Any]
) -> None:
    walk = await begin(strata_server, emulated, provider, settings=settings)
    await talk(walk, 5)
    calls = await walk.calls()
    assert len(calls) == 10
    assert all(expected == read for expected, read in reads(calls))
    assert reasons(calls) == [None] * 10
    assert share(calls[1:]) > 0.95
    assert_no_break(calls)
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(walk)


async def test_gemini_in_the_layered_order_reads_its_static_text(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated, GEMINI)
    for number in range(4):
        await walk.change(context={"todos": [f"Thing {number}"]})
        await walk.task(f"Question {number}?", tells("Yes."))
    calls = await walk.calls()
    assert reasons(calls) == [None] * 4
    assert all(abs((expected or 0) - read) <= 0.05 * read for expected, read in reads(calls))
    assert share(calls[1:]) > 0.9


@pytest.mark.parametrize("provider", [ANTHROPIC, GEMINI])
async def test_time_that_passed_is_the_reason(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock, provider: str
) -> None:
    walk = await begin(strata_server, emulated, provider)
    await walk.task("First?", tells("Yes."))
    await let_pass(walk, clock, 120 * MINUTES)
    await walk.task("Second?", tells("Yes."))
    calls = await walk.calls()
    assert reads(calls)[1] == (0, 0)
    assert reasons(calls) == [None, "ttl_expired"]


async def test_after_some_minutes_claude_still_has_the_static_text(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC)
    await walk.task("First? " * 300, tells("Yes."))
    await let_pass(walk, clock, 6 * MINUTES)
    await walk.task("Second?", tells("Yes."))
    calls = await walk.calls()
    expected, read = reads(calls)[1]
    assert read > 5_000
    assert abs((expected or 0) - read) <= 0.05 * read
    assert reasons(calls)[1] == "ttl_expired"


async def test_what_somebody_changed_is_the_reason(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC)
    await walk.task("First?", tells("Yes."))
    await walk.switch(ANTHROPIC, instructions=Instructions(roles="Otherwise. " * 2_000))
    await walk.task("Second?", tells("Yes."))
    await walk.switch(ANTHROPIC, "claude-sonnet-5-5", instructions=LONG)
    await walk.task("Third?", tells("Yes."))
    await walk.switch(GEMINI, instructions=LONG)
    await walk.task("Fourth?", tells("Yes."))
    assert reasons(await walk.calls()) == [None, "epoch_began", "model_changed", "model_changed"]
    await assert_rebuilds(walk)


async def test_a_request_that_is_too_short_says_so(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC, instructions=Instructions(roles="You help."))
    await walk.task("First?", tells("Yes."))
    await walk.task("Second?", tells("Yes."))
    calls = await walk.calls()
    assert reads(calls) == [(0, 0), (0, 0)]
    assert reasons(calls) == [None, "below_minimum"]


async def test_claude_says_itself_why_its_cache_missed(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC)
    await walk.task("First?", tells("Yes."))
    # Another effort makes cached messages useless, which only the provider knows.
    await walk.switch(ANTHROPIC, instructions=LONG, settings={"thinking": "high"})
    await walk.task("Second? " * 300, tells("Yes."))
    await walk.switch(ANTHROPIC, instructions=LONG, settings={"thinking": "low"})
    await walk.task("Third?", tells("Yes."))
    calls = await walk.calls()
    bodies = [request["body"] for request in emulated.anthropic.requests()]
    asked = [body["diagnostics"]["previous_message_id"] for body in bodies]
    assert asked == [None, *(end_of(call).response_id for call in calls[:-1])]
    assert all(asked[1:])
    assert reasons(calls)[-1] == "unavailable"


async def test_markers_are_four_at_most_and_the_longer_lived_stand_first(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC)
    await walk.task("First?", asks(*(f"city {number}" for number in range(20))), tells("Cold."))
    await walk.task("Second?", tells("Yes."))
    for number in range(3):
        await let_pass(walk, clock, 10 * MINUTES)
        await walk.task(f"Later {number}?", tells("Yes."))
    bodies = [request["body"] for request in emulated.anthropic.requests()]
    markers = [_markers(body) for body in bodies]
    assert [len(found) for found in markers] == [4] * 6
    assert "cache_control" not in bodies[1]["tools"][-1]
    assert markers[2] == ["1h", "1h", "5m", "5m"]
    assert markers[-1] == ["1h"] * 4
    calls = await walk.calls()
    assert reasons(calls)[-1] is None
    assert reads(calls)[-1][0] == reads(calls)[-1][1] > 5_000
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(walk)


def _markers(body: dict[str, Any]) -> list[str]:
    """The lifetimes in their order."""
    blocks = [*body["tools"], *body["system"], *(block for one in body["messages"] for block in one["content"])]
    return [block["cache_control"].get("ttl", "5m") for block in blocks if "cache_control" in block]


@pytest.mark.parametrize("provider", [ANTHROPIC, GEMINI])
async def test_a_static_text_that_grew_keeps_what_was_cached_of_it(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    walk = await begin(strata_server, emulated, provider, instructions=Instructions(roles="You help.\n" * 5_000))
    await walk.task("First?", tells("Yes."))
    await grow(walk, "[1] First? Yes.\n" * 1_500)
    await walk.task("Second?", tells("Yes."))
    await grow(walk, "[2] Second? Yes.\n" * 3_000)
    await walk.task("Third?", tells("Yes."))
    calls = await walk.calls()
    assert reasons(calls)[-1] == "epoch_began"
    assert "unknown" not in reasons(calls)
    for call in calls[1:]:
        usage = end_of(call).usage
        assert usage.cache_read_tokens > 3 * PIECE_CHARACTERS / 4 * 0.9
        assert abs((call.start.cache_expected_tokens or 0) - usage.cache_read_tokens) < 0.05 * usage.cache_read_tokens
    assert_all_accepted(emulated[provider].requests())
    await assert_rebuilds(walk)


async def grow(walk: Walk, text: str) -> None:
    """All turns so far become a segment of the static text."""
    store = walk.program.store
    source = await store.load_payload_source(walk.tenant_id, walk.conversation_id)
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
    await store.begin_epoch(walk.tenant_id, walk.conversation_id, following, segment=segment)


async def test_a_fork_reads_what_its_source_has_left(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC)
    await talk(walk, 2)
    fork = await walk.fork(8)
    ended = await fork.task("Otherwise?", tells("Yes."))
    assert ended.turn.state is TurnState.COMPLETE
    expected, read = reads(await fork.calls())[-1]
    assert expected == read > 5_000


async def test_a_call_that_broke_off_has_cached_its_request_all_the_same(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated, ANTHROPIC)
    await walk.task("First?", tells("Yes."))
    await walk.fail("Second?", tells("One two three."), after_chunks=2)
    await walk.task("Third?", tells("Yes."))
    calls = await walk.calls()
    assert [end_of(call).error_code for call in calls] == [None, "provider_disconnected", None]
    assert all(expected == read for expected, read in reads(calls))
    assert reasons(calls) == [None] * 3


@pytest.mark.parametrize("provider", [ANTHROPIC, GEMINI])
async def test_a_call_beside_the_conversation_reads_the_prefix_and_says_why_where_it_does_not(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock, provider: str
) -> None:
    walk = await begin(strata_server, emulated, provider)
    await talk(walk, 2)
    observed = Observed()
    calls = BackgroundCalls(walk.program.store, walk.program.providers.by_name, observer=observed)
    await ask_aside(walk, calls, "Sum it up.")
    await let_pass(walk, clock, 120 * MINUTES)
    await ask_aside(walk, calls, "Sum it up again.")
    kept = await walk.program.store.list_calls(walk.tenant_id, walk.conversation_id, -1)
    assert [(assistant_id, end.usage, end.cost_usd) for assistant_id, _, end in observed.calls] == [
        (walk.assistant_id, end_of(call).usage, end_of(call).cost_usd) for call in kept
    ]
    (expected, read), late = reads(kept)
    assert read > 5_000
    # Of a part of the request before, only its share of the bytes is known.
    assert 0.85 * read <= (expected or 0) <= 1.05 * read
    assert late == (0, 0)
    assert reasons(kept) == [None, "ttl_expired"]


async def ask_aside(walk: Walk, calls: BackgroundCalls, text: str) -> None:
    """Something that belongs to no turn, behind the conversation's own prefix."""
    history = await walk.program.store.load_history(walk.tenant_id, walk.conversation_id)
    source = history.source
    asked = calls.provider_of(history).user_message((TextBlock(text=text),), {})
    payload = build_payload(
        source.assistant.definition.model,
        [asked],
        static_text=source.static_text,
        tools=source.assistant.definition.tools,
    )
    await calls.ask(walk.tenant_id, history, payload, note={"kind": "test"})
