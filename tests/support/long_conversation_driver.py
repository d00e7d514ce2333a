"""A conversation of any length with an emulated provider, and the prediction of the simulation for it.

The server is the whole program with the worker inside: turns end, the policy is evaluated, jobs are queued and
executed. The driver lets the worker finish before the next task, since a user thinks longer than a job runs.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median

from pydantic import SecretStr

from server.app.providers import Providers
from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.compaction.simulation.comparison import PricedModel, find_priced_model, simulate
from server.compaction.simulation.provider import TIME_TOKENS, CallCost, Layout, Timeline
from server.compaction.simulation.workload import Shape, SimulatedCall, SimulatedExchange
from server.conversation.assistant import Instructions
from server.conversation.compaction_policy import CompactionPolicy
from server.conversation.event import TurnEnded
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.payload import LayerOrder
from server.conversation.turn import TurnState
from server.conversation.usage import Usage
from server.emulator.tokens import count_tokens
from server.jobs.compaction import NAME
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from server.turns.request import TurnRequest
from tests.support.conversation_driver import eventually
from tests.support.old_conversations import add_resting
from tests.support.turn_service_driver import open_conversation, settle, tool_results, user_task
from tests.support.wire_proxy import WireProxy, open_proxy

MODELS = {GEMINI: "gemini-3.8-flash", ANTHROPIC: "claude-sonnet-5-5"}
"""In their default orders: layered, and append-only with prefix-bound thinking."""
TOOLS_EVERY = 5
INSTRUCTIONS = Instructions(
    roles="You help people who ask about all kinds of things, and you keep to what you know.\n" * 220
)
"""Some five thousand tokens: above every minimum."""
_FILLER = "I would like to hear about it in a few plain words, with an example that one can remember. "
_CALL_SECONDS = 5.0
_LAYOUTS = {LayerOrder.LAYERED: Layout.LAYERED, LayerOrder.APPEND_ONLY: Layout.APPEND_ONLY}
_DUE_SQL = "SELECT count(*) FROM pgqueuer WHERE entrypoint = $1 AND (status = 'picked' OR execute_after <= now())"
_CALLS_SQL = """
SELECT array_agg(turn_seq ORDER BY turn_seq) AS seqs, array_agg(epoch ORDER BY turn_seq) AS epochs,
    array_agg(turn_seq - buffer_start_seq ORDER BY turn_seq) AS buffered,
    array_agg(extract(epoch FROM ended_at - started_at)::float ORDER BY turn_seq) AS provider_seconds,
    count(*) FILTER (WHERE status <> 200 OR attempt > 1 OR error_code IS NOT NULL) AS refused,
    max(length(dynamic)) AS dynamic_bytes,
    (SELECT count(*) FROM epochs WHERE conversation_id = $1 AND reason = 'compacted') AS compactions,
    (SELECT count(*) FROM epochs WHERE conversation_id = $1 AND reason NOT IN ('compacted', 'started')) AS others
FROM calls JOIN epochs USING (conversation_id) WHERE conversation_id = $1 AND number = epoch
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of the model."""

    seq: int
    is_task: bool
    """Whether it answers a user and not the result of a tool."""
    usage: Usage
    seconds: float
    cpu_seconds: float
    """CPU time of this process."""
    bytes_read: int
    """Bytes from the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The stored facts of the conversation at its end."""

    seqs: Sequence[int]
    """The turns of the calls."""
    epochs: Sequence[int]
    """The epochs of the calls."""
    buffered: Sequence[int]
    """The number of buffered turns in each call."""
    provider_seconds: Sequence[float]
    """The time from sending each call to its last byte, which is not time of the server."""
    refused: int
    """Calls that were not answered with 200 at the first attempt."""
    dynamic_bytes: int
    compactions: int
    others: int
    """Epochs for other reasons than a compaction or the start."""


@dataclass(slots=True, kw_only=True)
class LongConversationDriver:
    """Drives one conversation."""

    program: Program
    proxy: WireProxy
    direct: Database
    """A connection that bypasses the proxy, for measurements."""
    tenant_id: str
    provider: str
    conversation_id: str
    samples: list[Sample] = field(default_factory=list)

    async def go_on(self, turns: int) -> None:
        """Continue until the conversation has this many turns, those of users and tools included."""
        number = sum(sample.is_task for sample in self.samples)
        while not self.samples or self.samples[-1].seq < turns:
            number += 1
            ended = await self._take(user_task(self.conversation_id, task_of(number)), is_task=True)
            while ended.conversation.pending_calls:
                ids = [call.id for call in ended.conversation.pending_calls]
                ended = await self._take(tool_results(self.conversation_id, ids), is_task=False)
            await self._let_jobs_end()

    async def account(self) -> Account:
        async with self.direct.connection() as connection:
            row = await connection.fetchrow(_CALLS_SQL, decode_id(CONVERSATION, self.conversation_id))
        assert row is not None
        return Account(**dict(row))

    async def _take(self, request: TurnRequest, *, is_task: bool) -> TurnEnded:
        weight, cpu, began = self.proxy.bytes_received, time.process_time(), time.perf_counter()
        ended = await (await self.program.turn_service.take_turn(self.tenant_id, request)).wait()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        assert ended.turn.state is TurnState.COMPLETE, ended.turn.error_code
        await settle(self.program)
        self.samples.append(
            Sample(
                seq=ended.turn.seq,
                is_task=is_task,
                usage=ended.turn.usage,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                bytes_read=self.proxy.bytes_received - weight,
            )
        )
        return ended

    async def _let_jobs_end(self) -> None:
        await self.program.compaction_watch.close()

        async def idle() -> bool:
            async with self.direct.connection() as connection:
                return not await connection.fetchval(_DUE_SQL, NAME)

        await eventually(idle)


def task_of(number: int) -> str:
    """The text of a task; some tasks need a tool."""
    question = "What is the weather in Oslo?" if number % TOOLS_EVERY == 0 else "How do birds find their way?"
    return f"Number {number:05d}. {question} {_FILLER * 2}"


@asynccontextmanager
async def open_long_conversation(
    settings: Settings, providers: Providers, direct: Database, provider: str, *, typical_exchange_count: int | None
) -> AsyncIterator[LongConversationDriver]:
    """Open a new conversation with an assistant whose earlier ones had this many exchanges; None: there were none."""
    async with open_proxy(direct.options.url) as proxy:
        proxied = settings.model_copy(update={"database_url": SecretStr(proxy.url()), "worker_inside": True})
        async with open_program(proxied, providers=providers) as program:
            tenant = await program.key_ring.create_tenant(f"talkers with {provider}")
            conversation = await open_conversation(
                program.store, tenant.id, provider, model=MODELS[provider], instructions=INSTRUCTIONS
            )
            if typical_exchange_count is not None:
                await add_resting(direct, tenant.id, conversation.assistant_id, [typical_exchange_count] * 12)
                await program.lengths.load(tenant.id, conversation.assistant_id)
            yield LongConversationDriver(
                program=program,
                proxy=proxy,
                direct=direct,
                tenant_id=tenant.id,
                provider=provider,
                conversation_id=conversation.id,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulation predicts for the conversation after its warm-up."""

    share: float
    cost_usd: float
    compactions: int
    """From the beginning."""


def predict(
    driver: LongConversationDriver, account: Account, *, typical_exchange_count: int | None, warm_up: int
) -> Prediction:
    """Simulate the same exchanges with their measured sizes, under the same policy and prices."""
    market = find_priced_model(driver.provider, MODELS[driver.provider], None, datetime.now(UTC))
    shape, exchanges = _measure(driver.samples, market, account)

    def play(count: int) -> tuple[CallCost, int]:
        layout = _LAYOUTS[market.order]
        timeline = Timeline(shape, exchanges[:count], layout, strips_thinking=market.profile.prefix_bound)
        run = simulate(timeline, market, CompactionPolicy(), typical_exchange_count=typical_exchange_count)
        return run.calls_cost, run.compaction_count

    before, _ = play(sum(sample.is_task for sample in driver.samples if sample.seq <= warm_up))
    whole, compactions = play(len(exchanges))
    return Prediction(
        share=(whole.read_tokens - before.read_tokens) / (whole.input_tokens - before.input_tokens),
        cost_usd=whole.cost_usd - before.cost_usd,
        compactions=compactions,
    )


def compare_at_same_buffer(
    early: Sequence[Sample], late: Sequence[Sample], account: Account, weigh: Callable[[Sample], float]
) -> float:
    """The late turns as a multiple of the early ones: the median over turns with equally long buffers.

    The buffer grows and shrinks with every compaction; only turns with the same buffer can be compared.
    """
    buffered = dict(zip(account.seqs, account.buffered, strict=True))
    ratios = []
    for count in {buffered[sample.seq] for sample in early} & {buffered[sample.seq] for sample in late}:
        before, after = ([weigh(one) for one in side if buffered[one.seq] == count] for side in (early, late))
        ratios.append(median(after) / median(before))
    return median(ratios)


def share_of(samples: Sequence[Sample]) -> float:
    """The share of all input that the provider reports as read from its cache."""
    return sum(one.usage.cache_read_tokens for one in samples) / sum(one.usage.input_tokens for one in samples)


def cost_of(samples: Sequence[Sample], provider: str) -> float:
    """The cost of the input, by the tariff of the simulation."""
    tariff = find_priced_model(provider, MODELS[provider], None, datetime.now(UTC)).tariff
    usages = [sample.usage for sample in samples]
    fresh = sum(usage.fresh_input_tokens for usage in usages)
    read = sum(usage.cache_read_tokens for usage in usages)
    written = sum(usage.cache_write_tokens for usage in usages)
    return (fresh * tariff.fresh + read * tariff.read + written * tariff.write) / 1_000_000


def _measure(
    samples: Sequence[Sample], market: PricedModel, account: Account
) -> tuple[Shape, tuple[SimulatedExchange, ...]]:
    """The new content of each call is the growth of its input over that of the previous call in the same epoch."""
    task = count_tokens(task_of(1))
    dynamic = account.dynamic_bytes // 4
    staying = dynamic if market.order is LayerOrder.APPEND_ONLY else TIME_TOKENS

    epochs = dict(zip(account.seqs, account.epochs, strict=True))

    def grown(*, is_task: bool) -> float:
        return median(
            after.usage.input_tokens - before.usage.input_tokens - before.usage.output_tokens
            for before, after in pairwise(samples)
            if epochs[before.seq] == epochs[after.seq] and after.is_task is is_task
        )

    result = count_tokens('{"celsius":4}')
    thinking = {True: round(grown(is_task=False) - result), False: round(grown(is_task=True) - task - staying)}
    """The thinking of a tool call, and of an answer."""
    shape = Shape(
        name="long talk",
        static_tokens=samples[0].usage.input_tokens - task - dynamic,
        dynamic_tokens=dynamic,
        task_tokens=task,
        answer_tokens=0,
    )
    calls: list[list[SimulatedCall]] = []
    for sample, following in zip(samples, [*samples[1:], None], strict=True):
        if sample.is_task:
            calls.append([])
        calls_tool = following is not None and not following.is_task
        calls[-1].append(
            SimulatedCall(
                input_tokens=task if sample.is_task else result,
                output_tokens=sample.usage.output_tokens,
                thinking_tokens=thinking[calls_tool],
            )
        )
    at = datetime.now(UTC)
    exchanges = []
    for taken in calls:
        ends_at = at + timedelta(seconds=_CALL_SECONDS * (len(taken) - 1))
        exchanges.append(SimulatedExchange(calls=tuple(taken), starts_at=at, ends_at=ends_at))
        at = ends_at + timedelta(seconds=_CALL_SECONDS)
    return shape, tuple(exchanges)
