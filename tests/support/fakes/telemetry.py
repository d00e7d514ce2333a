"""The telemetry of turns, and everything that it records."""

import json
from decimal import Decimal
from io import StringIO
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server.conversation.block import TextBlock
from server.conversation.conversation import Lease
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import Usage
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing
from server.telemetry.turns import TurnTelemetry
from server.turns.observer import TurnObserver, TurnTimes
from tests.support.builders import A_TIME, token

CONVERSATION = "conv_01"
ASSISTANT = "asst_01"
USAGE = Usage(fresh_input_tokens=7, cache_read_tokens=5, cache_write_tokens=3, output_tokens=2, reasoning_tokens=1)
TIMES = TurnTimes(accepted=0.003, built=0.006, first_event=0.8, ended=2.5)
SECRET = "what was said"


class Watched:
    """The telemetry of a server, and everything that it records."""

    def __init__(self, log: StringIO) -> None:
        self.metrics = Metrics(version="1", assistant_labels=True)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider=provider, exporter=self.exporter, version="1")
        self.observer: TurnObserver = TurnTelemetry(self.metrics, self.tracing)
        self._log = log

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.getvalue().splitlines()]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all series with these labels; an unknown name is a mistake of the test."""
        samples = [
            sample
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert samples or any(name.removesuffix("_total") == family.name for family in self.metrics.registry.collect())
        return sum(sample.value for sample in samples)

    def series(self, name: str) -> list[dict[str, str]]:
        return [
            sample.labels
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        ]


def lease(**changes: Any) -> Lease:
    values: dict[str, Any] = {"conversation_id": CONVERSATION, "token": token(), "owner": "host:1", "turn_seq": 2}
    return Lease(**values | changes)


def model_turn(**changes: Any) -> ModelResponseTurn:
    values: dict[str, Any] = {
        "seq": 2,
        "created_at": A_TIME,
        "blocks": (TextBlock(text=SECRET),),
        "state": TurnState.COMPLETE,
        "stop_reason": StopReason.END_TURN,
        "error_code": None,
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
        "usage": USAGE,
        "cost_usd": Decimal("0.25"),
        "attempt": 1,
        "revision": 2,
    }
    return ModelResponseTurn(**values | changes)
