"""What operators see of a turn: its spans, its line in the log, its metrics; and that these contain no content."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope
from server.emulator.reply import FaultKind, Reply
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.collector import Collector, attributes_of, open_collector
from tests.support.fakes.log_capture import capture_log
from tests.support.turn_service_driver import open_conversation

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
QUESTION = "A question of the heart."
THOUGHT = "A thought of the machine."
ANSWER = "An answer for one alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A server with one conversation. After it has stopped, everything it reported is in the log and at the
    collector.
    """

    client: httpx2.AsyncClient
    conversation_id: str
    tenant_id: str
    log: StringIO

    async def ask(self) -> httpx2.Response:
        path = f"/v1/conversations/{self.conversation_id}/turns"
        return await self.client.post(
            path, json={"input": QUESTION}, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        )

    async def read_metrics(self) -> dict[str, float]:
        """Sums over all labels except those of interest here."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.client.get("/metrics")).text):
            for sample in family.samples:
                name = f"{sample.name} {sample.labels.get('status') or sample.labels.get('state') or ''}".strip()
                sums[name] = sums.get(name, 0) + sample.value
        return sums

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.log.getvalue().splitlines())
        return [line for line in lines if line["event"] == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with open_collector() as running:
        yield running


@asynccontextmanager
async def asking(
    settings: Settings, emulated: EmulatedProviders, collector: Collector, provider: str
) -> AsyncIterator[Asked]:
    settings = emulated.point(settings).model_copy(update={"otlp_endpoint": collector.url})
    with capture_log() as log:
        async with emulated.open(settings) as providers, open_program(settings, providers=providers) as program:
            tenant = await program.key_ring.create_tenant("acme")
            _, key = await program.key_ring.create_key(
                tenant_id=tenant.id, name="client", scopes=frozenset({Scope.CLIENT}), expires_at=None
            )
            conversation = await open_conversation(program.store, tenant.id, provider)
            headers = {"authorization": f"Bearer {key}"}
            async with (
                serving(program, bind("127.0.0.1", 0)) as url,
                httpx2.AsyncClient(base_url=url, headers=headers, timeout=30) as client,
            ):
                yield Asked(client=client, conversation_id=conversation.id, tenant_id=tenant.id, log=log)


def by_name(collector: Collector, beginning: str) -> list[Span]:
    found = [span for span in collector.spans if span.name.startswith(beginning)]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("provider", BOTH)
class TestATurn:
    async def test_is_one_trace_from_the_span_of_the_caller_to_each_attempt(
        self, server_settings: Settings, emulated: EmulatedProviders, collector: Collector, provider: str
    ) -> None:
        emulated[provider].queue_replies(Reply(thinking=THOUGHT, text=ANSWER))
        emulated[provider].inject_fault(FaultKind.OVERLOADED)
        async with asking(server_settings, emulated, collector, provider) as asked:
            assert (await asked.ask()).status_code == 200
        (request,) = by_name(collector, "POST")
        (turn,) = by_name(collector, "turn")
        failed, good = by_name(collector, f"chat {emulated[provider].model}")
        assert {span.trace_id.hex() for span in (request, turn, failed, good)} == {TRACE_ID}
        assert request.parent_span_id.hex() == PARENT_ID
        assert turn.parent_span_id == request.span_id
        assert {failed.parent_span_id, good.parent_span_id} == {turn.span_id}
        assert attributes_of(failed)["error.type"] == "provider_overloaded"
        attributes = attributes_of(good)
        assert attributes["gen_ai.conversation.id"] == asked.conversation_id
        assert (attributes["strata.turn.seq"], attributes["strata.call.attempt"]) == (2, 2)
        assert attributes["gen_ai.usage.output_tokens"] >= attributes["gen_ai.usage.reasoning.output_tokens"] > 0
        assert attributes["strata.call.cost_usd"] > 0
        assert attributes_of(turn)["strata.turn.state"] == "complete"

    async def test_leaves_one_line_that_belongs_to_its_request(
        self, server_settings: Settings, emulated: EmulatedProviders, collector: Collector, provider: str
    ) -> None:
        async with asking(server_settings, emulated, collector, provider) as asked:
            answer = (await asked.ask()).json()
        (line,) = asked.events("turn.ended")
        (request,) = asked.events("http.request_finished")
        assert (line["request_id"], line["trace_id"]) == (request["request_id"], TRACE_ID)
        assert (line["tenant_id"], line["conversation_id"]) == (asked.tenant_id, asked.conversation_id)
        assert {name: line[name] for name in answer["turn"]["usage"]} == answer["turn"]["usage"]
        assert line["cost_usd"] == pytest.approx(answer["turn"]["cost_usd"])
        steps = [line[name] for name in ("accepted_ms", "built_ms", "first_event_ms", "duration_ms")]
        assert steps == sorted(steps)
        assert steps[0] > 0

    async def test_is_counted_with_every_attempt(
        self, server_settings: Settings, emulated: EmulatedProviders, collector: Collector, provider: str
    ) -> None:
        emulated[provider].inject_fault(FaultKind.OVERLOADED)
        async with asking(server_settings, emulated, collector, provider) as asked:
            usage = (await asked.ask()).json()["turn"]["usage"]
            metrics = await asked.read_metrics()
        assert metrics["strata_turns_begun_total"] == metrics["strata_turns_total complete"] == 1
        assert metrics["strata_calls_total 5xx"] == metrics["strata_calls_total 2xx"] == 1
        assert metrics["strata_call_retries_total"] == 1
        assert metrics["strata_tokens_total"] == sum(usage.values())
        assert metrics["strata_cost_usd_total"] > 0
        assert metrics["strata_turn_time_to_first_event_seconds_count"] == 1
        assert metrics["strata_prefix_breaks_total"] == metrics["strata_template_failures_total"] == 0

    async def test_that_fails_is_a_warning_and_an_error(
        self, server_settings: Settings, emulated: EmulatedProviders, collector: Collector, provider: str
    ) -> None:
        emulated[provider].inject_fault(FaultKind.OVERLOADED_MID_STREAM, after_chunks=3)
        async with asking(server_settings, emulated, collector, provider) as asked:
            assert (await asked.ask()).status_code >= 400
            metrics = await asked.read_metrics()
        (line,) = asked.events("turn.failed")
        (turn,) = by_name(collector, "turn")
        assert (line["level"], line["error_code"]) == ("warning", "provider_overloaded")
        assert (turn.status.code, attributes_of(turn)["error.type"]) == (2, "provider_overloaded")
        assert metrics["strata_turns_total failed"] == 1

    async def test_is_reported_without_any_content(
        self, server_settings: Settings, emulated: EmulatedProviders, collector: Collector, provider: str
    ) -> None:
        emulated[provider].queue_replies(Reply(thinking=THOUGHT, text=ANSWER))
        async with asking(server_settings, emulated, collector, provider) as asked:
            answer = await asked.ask()
            metrics = (await asked.client.get("/metrics")).text
        assert ANSWER in answer.text
        sent = b"".join(request.SerializeToString() for request in collector.requests)
        exported = f"{sent!r} {asked.log.getvalue()} {metrics}"
        for secret in (QUESTION, THOUGHT, ANSWER, asked.client.headers["authorization"].removeprefix("Bearer ")):
            assert secret not in exported
