"""The server decides as the simulation does: the same conversation is compacted after the same exchanges."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from server.compaction.plan import decide_compaction
from server.compaction.simulation.comparison import PricedModel, find_priced_model, replay, simulate
from server.compaction.simulation.grid import PRICED_AT
from server.compaction.simulation.provider import TIME_TOKENS, Layout, Timeline
from server.compaction.simulation.workload import Shape, SimulatedExchange, ThinkTime, draw_conversation
from server.compaction.state import read_state
from server.conversation.assistant import Assistant
from server.conversation.block import TextBlock
from server.conversation.compaction_policy import CompactionPolicy
from server.conversation.conversation import Conversation
from server.conversation.payload import Layer, LayerOrder, ManifestEntry
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import Native, TurnKind, TurnState
from server.providers.token_estimate import TokenEstimate
from tests.support.builders import A_TIME, build_conversation, definition, epoch

BYTES_PER_TOKEN = 4
SHAPE = Shape(
    name="talk",
    static_tokens=3_000,
    dynamic_tokens=400,
    task_tokens=80,
    answer_tokens=250,
    thinking_tokens=150,
    spread=0.5,
)
OFTEN = ThinkTime(name="often", mean_seconds=30, varies=False)
SELDOM = ThinkTime(name="seldom", mean_seconds=400, varies=False)
COUNT = 60
LAYOUTS = {LayerOrder.LAYERED: Layout.LAYERED, LayerOrder.APPEND_ONLY: Layout.APPEND_ONLY}
MODELS = (
    ("gemini", "gemini-3.8-flash"),
    ("anthropic", "claude-opus-4-8"),
    ("anthropic", "claude-sonnet-5-5"),
)


class Conversing:
    """A simulated conversation as the server has it: turns in a buffer after a static text."""

    def __init__(self, market: PricedModel, timeline: Timeline) -> None:
        self._market = market
        self._timeline = timeline
        self._estimate = TokenEstimate()
        self._estimate.learn(market.profile.model, 1_000 * BYTES_PER_TOKEN, 1_000)
        self._start = 0
        self._static_tokens = SHAPE.static_tokens
        self.moments: list[int] = []

    def ask(self, number: int, typical: float | None) -> None:
        """The number of exchanges after which the server compacted."""
        exchanges = self._timeline.exchanges
        source = self._source(number)
        length = self._static_tokens * BYTES_PER_TOKEN - len(b"[]")
        state = read_state(source, static_length=length, estimate=self._estimate, typical_exchange_count=typical)
        decision = decide_compaction(source, state, now=exchanges[number - 1].ends_at)
        again = decision.recheck_at
        if again is not None and again <= exchanges[number].starts_at:
            decision = decide_compaction(source, state, now=again)
        if decision.plan is not None:
            moved = exchanges[self._start : self._start + decision.plan.exchange_count]
            self._static_tokens += sum(exchange.spoken_tokens for exchange in moved)
            self._start += len(moved)
            self.moments.append(number)

    def _source(self, number: int) -> PayloadSource:
        profile = self._market.profile
        described = definition(provider=profile.provider, model=profile.model, settings={}, tools=())
        dynamic = ManifestEntry(
            layer=Layer.DYNAMIC, kind="dynamic", role="user", hash="", length=SHAPE.dynamic_tokens * BYTES_PER_TOKEN
        )
        return PayloadSource(
            conversation=_conversation(number),
            assistant=Assistant(id="asst_x", version=1, created_at=A_TIME, definition=described),
            epoch=epoch(prefix_hash=self._prefix_hash(number)),
            static_text=None,
            buffered=tuple(self._turns(number)),
            blobs={},
            previous_manifest=(dynamic,),
            previous_order=self._market.order,
            previous_prefix_hash=None,
            exchange_count=number,
        )

    def _turns(self, end: int) -> Iterator[BufferedTurn]:
        for number in range(self._start, end):
            exchange = self._timeline.exchanges[number]
            [call] = exchange.calls
            yield _turn(2 * number + 1, call.input_tokens, created_at=exchange.starts_at)
            yield _turn(
                2 * number + 2,
                call.output_tokens + call.thinking_tokens,
                created_at=exchange.ends_at,
                output_tokens=call.output_tokens,
                prefix_hash=self._prefix_hash(number),
                dynamic=bytes(SHAPE.dynamic_tokens * BYTES_PER_TOKEN),
                input_time="x" * TIME_TOKENS * BYTES_PER_TOKEN,
            )

    def _prefix_hash(self, number: int) -> bytes:
        """The prefix with which an exchange was recorded."""
        return bytes([sum(moment <= number for moment in self.moments)])


def _turn(seq: int, tokens: int, **changes: Any) -> BufferedTurn:
    values: dict[str, Any] = {
        "seq": seq,
        "kind": TurnKind.USER_TASK if seq % 2 else TurnKind.MODEL_RESPONSE,
        "state": TurnState.COMPLETE,
        "native": Native(dialect="strata", data=bytes(tokens * BYTES_PER_TOKEN)),
        "blocks": (TextBlock(text=""),),
        "provider": None,
        "model": None,
        "account": None,
        "prefix_hash": None,
        "dynamic": None,
        "language": None,
        "args": None,
    }
    return BufferedTurn(**values | changes)


def _conversation(number: int) -> Conversation:
    return build_conversation(next_seq=2 * number + 1)


def _lay_out(market: PricedModel, think_time: ThinkTime) -> Timeline:
    exchanges: Sequence[SimulatedExchange] = draw_conversation(SHAPE, think_time, COUNT, "any")
    return Timeline(SHAPE, exchanges, LAYOUTS[market.order], strips_thinking=market.profile.prefix_bound)


@pytest.mark.parametrize("typical", [None, 15, 60, 200])
@pytest.mark.parametrize("think_time", [OFTEN, SELDOM], ids=lambda think_time: think_time.name)
@pytest.mark.parametrize(("provider", "model"), MODELS)
def test_the_server_compacts_when_the_simulation_does(
    provider: str, model: str, think_time: ThinkTime, typical: float | None
) -> None:
    market = find_priced_model(provider, model, None, PRICED_AT)
    timeline = _lay_out(market, think_time)
    conversing = Conversing(market, timeline)
    for number in range(1, COUNT):
        conversing.ask(number, typical)
    policy = CompactionPolicy()
    expected = simulate(timeline, market, policy, typical_exchange_count=typical)
    assert len(conversing.moments) == expected.compaction_count
    # A conversation that should have ended may be too cheap to compact.
    assert expected.compaction_count or typical == 15
    assert replay(timeline, market, policy, tuple(conversing.moments)) == expected


def test_the_typical_length_of_conversations_changes_the_decision() -> None:
    market = find_priced_model("anthropic", "claude-sonnet-5-5", None, PRICED_AT)
    timeline = _lay_out(market, OFTEN)
    costs = {
        simulate(timeline, market, CompactionPolicy(), typical_exchange_count=one).cost_usd for one in (None, 15, 200)
    }
    assert len(costs) == 3
