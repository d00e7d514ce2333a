"""In the layered order requests begin alike while only the clock moves, and the newest task has the exact time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.call import CallTrace
from server.conversation.payload import Layer, LayerOrder
from server.conversation.turn import Native, StopReason, TurnKind
from server.conversation.usage import Usage
from server.payload.builder import BuiltPayload
from server.payload.dynamic_clock import (
    DEFAULT_CLOCK_SECONDS,
    EXACT,
    DynamicClock,
    decode_clock,
    encode_clock,
    floor_clock,
    insert_time,
    render_with_clock,
)
from server.payload.renderer import RenderedDynamic
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from tests.support.fakes.conversation import InMemoryConversation, ModelTarget

NOON = datetime(2026, 11, 16, 12, 0, 5, tzinfo=UTC)
GEMINI = ModelTarget(provider=GeminiProvider("key"), model="gemini-3.8-flash")
CLAUDE = ModelTarget(provider=AnthropicProvider("key"), model="claude-opus-5", order=LayerOrder.LAYERED)
BOTH = pytest.mark.parametrize("target", [GEMINI, CLAUDE], ids=["gemini", "claude"])
CALL = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})


@dataclass(kw_only=True)
class Conversing:
    """A conversation in the layered order, request by request, as the server builds it."""

    target: ModelTarget
    clock_seconds: int = DEFAULT_CLOCK_SECONDS
    context: dict[str, Any] = field(default_factory=dict)
    conversation: InMemoryConversation = field(default_factory=InMemoryConversation)
    now: datetime = NOON
    sent: list[BuiltPayload] = field(default_factory=list)
    previous_call: CallTrace | None = None

    async def ask(self, text: str | None = None, *, later_seconds: float = 0, calls_tool: bool = False) -> BuiltPayload:
        """Send a task, or with None the results of the pending call, and answer it."""
        self.now += timedelta(seconds=later_seconds)
        if text is None:
            self.conversation.put(
                TurnKind.TOOL_RESPONSE, (ToolResultBlock(tool_call_id=CALL.id, output={"celsius": 4}),)
            )
        else:
            self.conversation.say(text)
        source = replace(self.conversation.source(self.target), previous_call=self.previous_call)
        if self.sent:
            source = replace(
                source,
                previous_manifest=self.sent[-1].manifest,
                previous_order=LayerOrder.LAYERED,
                previous_prefix_hash=self.target.prefix_hash,
            )

        async def render(at: datetime) -> RenderedDynamic:
            return RenderedDynamic(text=json.dumps(self.context | {"current_datetime": at.isoformat()}), failures=())

        rendered, clock = await render_with_clock(render, source, self.target.provider, self.now, self.clock_seconds)
        built = self.conversation.build(self.target, rendered.text, clock=clock, source=source)
        self.sent.append(built)
        self._answer(clock, calls_tool=calls_tool)
        return built

    def _answer(self, clock: DynamicClock, *, calls_tool: bool) -> None:
        provider = self.target.provider
        # As it was stored.
        caching = json.loads(json.dumps(encode_clock(clock)))
        self.previous_call = CallTrace(
            provider=provider.name,
            model=self.target.model,
            account=provider.account,
            started_at=self.now,
            usage=Usage(),
            response_id=None,
            caching=caching,
        )
        blocks = (CALL,) if calls_tool else (TextBlock(text="Yes."),)
        turn = self.conversation.put(
            TurnKind.MODEL_RESPONSE,
            blocks,
            native=Native(dialect=provider.name, data=provider.foreign_message(blocks) or b""),
            provider=provider.name,
            model=self.target.model,
            account=provider.account,
            prefix_hash=self.target.prefix_hash,
            input_time=decode_clock(caching).input_time,
        )
        self.conversation.stop_reasons[turn.seq] = StopReason.TOOL_USE if calls_tool else StopReason.END_TURN


def contents(built: BuiltPayload) -> list[bytes]:
    return [message.data for message in built.payload.messages]


def texts(data: bytes) -> list[str]:
    message = json.loads(data)
    return [part["text"] for part in message.get("parts", message.get("content")) if "text" in part]


def block_of(built: BuiltPayload) -> Mapping[str, Any]:
    assert built.payload.messages[0].layer is Layer.DYNAMIC
    block: dict[str, Any] = json.loads(texts(built.payload.messages[0].data)[0])
    return block


@BOTH
async def test_a_request_repeats_the_whole_previous_one_while_only_the_clock_moves(target: ModelTarget) -> None:
    conversing = Conversing(target=target)
    first = await conversing.ask("First.")
    second = await conversing.ask("Second.", later_seconds=200, calls_tool=True)
    third = await conversing.ask(later_seconds=7)
    fourth = await conversing.ask("Third.", later_seconds=299)
    for before, after in ((first, second), (second, third), (third, fourth)):
        assert contents(after)[: len(contents(before))] == contents(before)
        assert after.warnings == ()
    assert block_of(fourth)["current_datetime"] == "2026-11-16T12:00:00+00:00"
    assert [texts(data)[0] for data in contents(fourth)[1::2] if texts(data)] == [
        '{"current_datetime":"2026-11-16T12:00:05Z"}',
        '{"current_datetime":"2026-11-16T12:03:25Z"}',
        '{"current_datetime":"2026-11-16T12:08:31Z"}',
    ]


@BOTH
async def test_a_changed_context_is_sent_at_once_with_the_current_time(target: ModelTarget) -> None:
    conversing = Conversing(target=target, clock_seconds=60)
    await conversing.ask("First.", calls_tool=True)
    conversing.context = {"todos": ["pack"]}
    changed = await conversing.ask(later_seconds=70)
    assert block_of(changed) == {"todos": ["pack"], "current_datetime": "2026-11-16T12:01:00+00:00"}
    assert changed.clock.changes == 1
    kept = await conversing.ask("Second.", later_seconds=40)
    assert contents(kept)[: len(contents(changed))] == contents(changed)
    assert kept.clock.changes == 0


async def test_after_the_lifetime_of_the_cache_the_block_has_a_new_time() -> None:
    conversing = Conversing(target=GEMINI, clock_seconds=60)
    first = await conversing.ask("First.")
    warm = await conversing.ask("Second.", later_seconds=100)
    cold = await conversing.ask("Third.", later_seconds=300)
    times = [block_of(built)["current_datetime"][11:16] for built in (first, warm, cold)]
    assert times == ["12:00", "12:00", "12:06"]
    assert cold.clock.changes == 0


async def test_within_its_period_the_time_stays_the_same_after_a_pause() -> None:
    conversing = Conversing(target=GEMINI)
    first = await conversing.ask("First.")
    later = await conversing.ask("Second.", later_seconds=3_000)
    assert contents(later)[: len(contents(first))] == contents(first)


async def test_the_time_in_the_block_is_less_than_two_periods_old() -> None:
    conversing = Conversing(target=GEMINI, clock_seconds=600)
    for _ in range(30):
        built = await conversing.ask("More.", later_seconds=100)
        age = conversing.now - datetime.fromisoformat(block_of(built)["current_datetime"])
        assert timedelta() <= age < timedelta(seconds=1_200)


async def test_claude_caches_messages_unless_the_block_changes_with_every_request() -> None:
    conversing = Conversing(target=CLAUDE)
    markers = []
    for number, context in enumerate(({}, {}, {"a": 1}, {"a": 2}, {"a": 3}, {"a": 3})):
        conversing.context = dict(context)
        built = await conversing.ask(f"Task {number}.", later_seconds=10)
        markers.append(bool(built.payload.breakpoints))
    assert markers == [True, True, True, False, False, True]


async def test_without_a_period_the_block_has_the_exact_time_and_tasks_have_none() -> None:
    conversing = Conversing(target=GEMINI, clock_seconds=0)
    built = [await conversing.ask("More.", later_seconds=1) for _ in range(3)]
    assert [block_of(one)["current_datetime"][17:19] for one in built] == ["06", "07", "08"]
    assert texts(contents(built[-1])[-1]) == ["More."]
    assert [one.clock.is_volatile for one in built] == [False, False, True]


async def test_an_empty_block_is_not_sent_and_tasks_have_no_time() -> None:
    async def render(_at: datetime) -> RenderedDynamic:
        return RenderedDynamic(text=" ", failures=())

    conversation = InMemoryConversation()
    conversation.say("First.")
    _, clock = await render_with_clock(render, conversation.source(GEMINI), GEMINI.provider, NOON, 3_600)
    assert clock.input_time is None


steps = st.lists(st.tuples(st.sampled_from(["task", "tool", "context"]), st.floats(0, 900)), min_size=1, max_size=12)


@given(steps=steps, clock_seconds=st.sampled_from([60, 600, 3_600]), target=st.sampled_from([GEMINI, CLAUDE]))
async def test_requests_of_an_epoch_begin_alike_and_the_newest_task_has_the_exact_time(
    steps: list[tuple[str, float]], clock_seconds: int, target: ModelTarget
) -> None:
    conversing = Conversing(target=target, clock_seconds=clock_seconds)
    for step, seconds in steps:
        if step == "context":
            conversing.context = {"todos": [str(conversing.now)]}
        tool = step == "tool"
        before = conversing.sent[-1] if conversing.sent else None
        task = await conversing.ask("Go.", later_seconds=seconds, calls_tool=tool)
        exact = conversing.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        requests = [task, await conversing.ask()] if tool else [task]
        for built in requests:
            # A changed context is sent at once.
            assert {**block_of(built), **conversing.context} == block_of(built)
            # The messages after the block are only ever appended to.
            if before is not None:
                assert contents(built)[1 : len(contents(before))] == contents(before)[1:]
                if step != "context" and seconds < 300 and built.clock.block_at == before.clock.block_at:
                    assert contents(built)[0] == contents(before)[0]
            before = built
        newest = [data for data in contents(requests[-1]) if texts(data)[1:] == ["Go."]][-1]
        assert json.loads(texts(newest)[0]) == {"current_datetime": exact}


@given(
    st.builds(
        DynamicClock,
        block_at=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001  reason: hypothesis adds the zone
        input_time=st.none() | st.just('{"current_datetime":"2026-11-16T12:00:05Z"}'),
        changes=st.integers(0, 9),
    )
)
def test_a_stored_clock_is_read_as_it_was_written(clock: DynamicClock) -> None:
    assert decode_clock(json.loads(json.dumps(encode_clock(clock)))) == clock


def test_a_call_that_stored_no_clock_had_its_own_time() -> None:
    assert encode_clock(EXACT) == {}
    assert decode_clock({"cache_seconds": 300}) == EXACT
    assert EXACT.is_volatile


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ('{"todos":["é"],"current_datetime":"12:00"}', '{"todos":["é"],"current_datetime":"12:34"}'),
        ('{"todos":[]}', '{"todos":[]}'),
        ('["current_datetime"]', '["current_datetime"]'),
        ("not JSON", "not JSON"),
    ],
)
def test_a_block_can_have_the_exact_time(block: str, expected: str) -> None:
    assert insert_time(block, '{"current_datetime":"12:34"}') == expected


def test_a_period_begins_at_its_whole_multiples() -> None:
    assert floor_clock(NOON, 3_600) == NOON.replace(second=0)
    assert floor_clock(NOON, 86_400) == datetime(2026, 11, 16, tzinfo=UTC)
