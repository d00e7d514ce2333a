"""What follows a turn: the policy is evaluated, jobs are queued, and a blocked compaction raises an alarm."""

import asyncio
import itertools
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from server.compaction.state import CompactionState, count_request, read_state
from server.compaction.typical_lengths import TypicalLengths
from server.compaction.watch import CompactionWatch
from server.conversation.assistant import Assistant
from server.conversation.block import Block, ImageBlock, TextBlock
from server.conversation.epoch import EpochReason
from server.conversation.errors import DatabaseUnavailable
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import ModelResponseTurn, Native, StopReason, TurnKind, TurnState
from server.conversation.usage import Usage
from server.providers.token_estimate import TokenEstimate
from tests.support.builders import A_TIME, build_conversation, definition, epoch, tool_call
from tests.support.fakes.compaction_observer import Observed

EAGER = {"compaction": {"policy": "threshold", "max_turns": 4, "keep_exchanges": 1}}


@dataclass(slots=True)
class Queue:
    """Records what was queued."""

    broken: bool = False
    queued: list[tuple[str, str, datetime | None]] = field(default_factory=list)

    async def queue_compaction(self, tenant_id: str, conversation_id: str, *, at: datetime | None = None) -> None:
        if self.broken:
            raise DatabaseUnavailable
        self.queued.append((tenant_id, conversation_id, at))


@dataclass(slots=True)
class SlowLengths:
    """Never answers."""

    asked: list[tuple[str, str]] = field(default_factory=list)

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        self.asked.append((tenant_id, assistant_id))
        await asyncio.Event().wait()
        return None


def turn(seq: int, text: str = "Hello", **changes: Any) -> BufferedTurn:
    kind = TurnKind.USER_TASK if seq % 2 else TurnKind.MODEL_RESPONSE
    blocks: tuple[Block, ...] = (TextBlock(text=text),)
    values: dict[str, Any] = {
        "seq": seq,
        "kind": kind,
        "state": TurnState.COMPLETE,
        "native": Native(dialect="strata", data=text.encode()),
        "blocks": blocks,
        "provider": None,
        "model": None,
        "account": None,
        "prefix_hash": None if seq % 2 else epoch().prefix_hash,
        "dynamic": None,
        "language": None,
        "args": None,
        "output_tokens": None if seq % 2 else 3,
        "created_at": A_TIME + timedelta(seconds=10 * seq),
    }
    return BufferedTurn(**values | changes)


def source(*turns: BufferedTurn, settings: dict[str, Any] | None = None, **changes: Any) -> PayloadSource:
    conversation = build_conversation(next_seq=len(turns) + 1)
    model = changes.pop("model", ("gemini", "gemini-3.1-pro-preview"))
    described = definition(provider=model[0], model=model[1], settings=settings or {}, tools=())
    values: dict[str, Any] = {
        "conversation": conversation,
        "assistant": Assistant(id="asst_x", version=1, created_at=A_TIME, definition=described),
        "epoch": epoch(),
        "static_text": None,
        "buffered": turns,
        "blobs": {},
        "previous_manifest": (),
        "previous_order": None,
        "previous_prefix_hash": None,
    }
    return PayloadSource(**values | changes)


def answered(seq: int, *blocks: Block) -> ModelResponseTurn:
    return ModelResponseTurn(
        seq=seq,
        created_at=A_TIME + timedelta(seconds=10 * seq),
        blocks=blocks or (TextBlock(text="Fine."),),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.END_TURN,
        error_code=None,
        provider="gemini",
        model="gemini-3.1-pro-preview",
        usage=Usage(output_tokens=3),
        cost_usd=Decimal(0),
        attempt=1,
        revision=1,
    )


async def follow(
    given: PayloadSource, *blocks: Block, queue: Queue | None = None, observer: Observed | None = None, **options: Any
) -> tuple[Queue, Observed]:
    queue, observer = queue or Queue(), observer or Observed()
    watch = CompactionWatch(queue, observer, TokenEstimate(), **options)
    watch.turn_followed("tenant_x", given, 500, answered(len(given.buffered) + 1, *blocks), 100)
    await watch.close()
    return queue, observer


async def test_a_conversation_that_has_grown_is_queued() -> None:
    small = source(turn(1), turn(2), turn(3), settings=EAGER)
    assert (await follow(small))[0].queued == []
    grown = source(*(turn(seq) for seq in range(1, 6)), settings=EAGER)
    queue, observer = await follow(grown)
    assert queue.queued == [("tenant_x", "conv_x", None)]
    assert observer.queued == [("conv_x", "threshold_turns")]


async def test_one_that_pays_only_with_a_cold_cache_is_queued_once_for_later() -> None:
    queue = Queue()
    watch = CompactionWatch(queue, Observed(), TokenEstimate())
    settings = {"compaction": {"keep_exchanges": 1}}
    first = answered(16).created_at + timedelta(minutes=5)
    # The next turn comes long before that time, the last one after it.
    for count, minutes in ((15, 0), (17, 0), (19, 6)):
        turns = [turn(seq, "word " * 200) for seq in range(1, count + 1)]
        given = source(*turns, model=("anthropic", "claude-opus-5-5"), settings=settings)
        ended = answered(count + 1)
        ended = replace(ended, created_at=ended.created_at + timedelta(minutes=minutes))
        watch.turn_followed("tenant_x", given, 500, ended, 100)
    await watch.close()
    assert [at for _, _, at in queue.queued] == [first, first + timedelta(minutes=6, seconds=40)]


async def test_a_long_buffer_is_measured_after_it_has_grown_by_a_sixteenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def count_and_read(given: PayloadSource, **options: Any) -> CompactionState:
        measured.append(len(given.buffered))
        return read_state(given, **options)

    monkeypatch.setattr("server.compaction.watch.read_state", count_and_read)
    watch = CompactionWatch(Queue(), Observed(), TokenEstimate())
    turns = [turn(seq) for seq in range(1, 400)]
    for count in range(1, 400, 2):
        settings = {"compaction": {"keep_exchanges": 200}}
        watch.turn_followed("tenant_x", source(*turns[:count], settings=settings), 500, answered(count + 1), 100)
    await watch.close()
    assert measured[:8] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert len(measured) < 60
    assert all(later - earlier <= max(2, later / 8) for earlier, later in itertools.pairwise(measured))


async def test_how_long_conversations_get_is_asked_for_without_waiting() -> None:
    lengths = SlowLengths()
    typical = TypicalLengths(lengths)
    await follow(source(turn(1)), lengths=typical)
    assert lengths.asked == []
    await asyncio.sleep(0)
    assert lengths.asked == [("tenant_x", "asst_x")]
    await typical.close()


async def test_an_undone_compaction_is_not_repeated() -> None:
    given = source(*(turn(seq) for seq in range(1, 6)), settings=EAGER)
    undone = replace(given, epoch=replace(epoch(), reason=EpochReason.COMPACTION_UNDONE))
    assert (await follow(undone))[0].queued == []


async def test_an_undone_compaction_is_queued_again_if_the_window_is_nearly_full() -> None:
    settings = {"compaction": {"policy": "cost", "keep_exchanges": 1, "window_share": 0.0001}}
    given = source(*(turn(seq, "word " * 40) for seq in range(1, 6)), settings=settings)
    undone = replace(given, epoch=replace(epoch(), reason=EpochReason.COMPACTION_UNDONE))
    assert len((await follow(undone))[0].queued) == 1


async def test_an_unavailable_database_is_no_failure() -> None:
    grown = source(*(turn(seq) for seq in range(1, 6)), settings=EAGER)
    _, observer = await follow(grown, queue=Queue(broken=True))
    assert observer.queued == []


async def test_invalid_settings_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    queue, _ = await follow(source(turn(1), settings={"compaction": {"policy": "sometimes"}}))
    assert queue.queued == []
    assert [record.message for record in caplog.records] == ["compaction.not_decided"]


async def test_an_open_call_in_a_large_request_raises_an_alarm() -> None:
    large = source(*(turn(seq, "word " * 400) for seq in range(1, 6)), settings=EAGER)
    observer = Observed()
    await follow(large, tool_call("open"), observer=observer, alarm_tokens=1000)
    assert observer.blocked == {"conv_x"}
    # The end of the call ends the alarm.
    await follow(large, observer=observer, alarm_tokens=1000)
    assert observer.blocked == set()


@dataclass(slots=True)
class Alarms:
    """Records the alarms."""

    broken: bool = False
    noted: list[dict[str, Any]] = field(default_factory=list)

    async def record_blocked(self, tenant_id: str, conversation_id: str, **details: Any) -> None:
        if self.broken:
            raise DatabaseUnavailable
        self.noted.append({"tenant_id": tenant_id, "conversation_id": conversation_id, **details})


async def test_an_alarm_is_recorded_for_operators(caplog: pytest.LogCaptureFixture) -> None:
    large = source(*(turn(seq, "word " * 400) for seq in range(1, 6)), settings=EAGER)
    alarms = Alarms()
    await follow(large, tool_call("open"), alarm_tokens=1000, alarms=alarms)
    [noted] = alarms.noted
    assert noted.pop("request_tokens") > 1000
    assert noted == {
        "tenant_id": "tenant_x",
        "conversation_id": "conv_x",
        "reason": "blocked_by_open_call",
        "seq": 6,
        "epoch": 1,
    }
    await follow(large, alarm_tokens=1000, alarms=alarms)
    assert len(alarms.noted) == 1
    await follow(large, tool_call("open"), alarm_tokens=1000, alarms=Alarms(broken=True))
    assert [record.message for record in caplog.records] == ["compaction.alarm_not_recorded"]


async def test_an_open_call_in_a_small_request_raises_no_alarm() -> None:
    small = source(*(turn(seq) for seq in range(1, 6)), settings=EAGER)
    _, observer = await follow(small, tool_call("open"), alarm_tokens=1000)
    assert observer.blocked == set()


class TestReading:
    def test_the_size_of_an_answer_is_measured_as_sent_and_as_rendered(self) -> None:
        state = read_state(
            source(turn(1, "x" * 100), turn(2, "y" * 1000, output_tokens=20)), static_length=0, estimate=TokenEstimate()
        )
        [exchange] = state.exchanges
        assert (exchange.sent_tokens, exchange.segment_tokens, exchange.thinking_tokens) == (28 + 280, 28 + 20, 260)

    def test_a_signature_does_not_count_as_thinking(self) -> None:
        answer = turn(2, "y" * 1000, output_tokens=20, reasoning_tokens=30)
        state = read_state(source(turn(1), answer), static_length=0, estimate=TokenEstimate())
        assert state.exchanges[0].thinking_tokens == 30
        assert state.exchanges[0].unsent_tokens == 50

    @pytest.mark.parametrize(("model", "thinking"), [("claude-opus-5-5", 0), ("claude-opus-5", 30)])
    def test_thinking_with_another_prefix_is_not_counted_if_it_is_prefix_bound(self, model: str, thinking: int) -> None:
        answer = turn(2, "y" * 1000, output_tokens=20, reasoning_tokens=30, prefix_hash=b"another")
        given = source(turn(1), answer, model=("anthropic", model))
        [exchange] = read_state(given, static_length=0, estimate=TokenEstimate()).exchanges
        assert (exchange.thinking_tokens, exchange.unsent_tokens) == (thinking, 20 + thinking)

    def test_the_length_so_far_and_the_typical_one_are_passed_on(self) -> None:
        given = source(turn(1), exchange_count=30)
        state = read_state(given, static_length=0, estimate=TokenEstimate(), typical_exchange_count=12.5)
        assert (state.exchange_count, state.typical_exchange_count) == (30, 12.5)

    def test_images_have_a_size_until_they_are_rendered_as_text(self) -> None:
        image = ImageBlock(media_type="image/png", sha256="ab", size_bytes=3)
        plain, shown = (
            read_state(source(turn(1, blocks=blocks)), static_length=0, estimate=TokenEstimate()).exchanges[0]
            for blocks in ((TextBlock(text="Hello"),), (TextBlock(text="Hello"), image))
        )
        assert shown.sent_tokens - plain.sent_tokens == 1000
        assert shown.segment_tokens == plain.segment_tokens

    def test_a_dynamic_block_counts_with_the_input_that_carries_it(self) -> None:
        turns = (turn(1), turn(2, dynamic=b"z" * 1000))
        model = ("anthropic", "claude-opus-5-5")
        inside = read_state(source(*turns, model=model), static_length=0, estimate=TokenEstimate())
        without = read_state(source(turn(1), turn(2), model=model), static_length=0, estimate=TokenEstimate())
        assert count_request(inside) - count_request(without) == 280
        assert inside.dynamic_tokens == 0

    def test_the_pause_of_a_user_is_between_an_answer_and_the_next_task(self) -> None:
        turns = (turn(1), turn(2), turn(3, created_at=A_TIME + timedelta(seconds=120)), turn(4))
        state = read_state(source(*turns), static_length=0, estimate=TokenEstimate())
        assert state.typical_gap_seconds == 100
        assert state.last_call_at == turns[3].created_at
        assert read_state(source(turn(1)), static_length=0, estimate=TokenEstimate()).typical_gap_seconds is None
