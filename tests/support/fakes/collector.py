"""A small OpenTelemetry collector on this machine that records what it receives."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(slots=True)
class Collector:
    """`status` is its response; it does not respond while `gate` is closed."""

    url: str = ""
    status: int = 200
    gate: threading.Event = field(default_factory=threading.Event)
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """All received spans, in order."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self) -> dict[str, str]:
        """The attributes of the process that sent."""
        return {a.key: a.value.string_value for a in self.requests[0].resource_spans[0].resource.attributes}


def attributes_of(span: Span) -> dict[str, Any]:
    """The attributes of a span, as plain values."""
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


@contextmanager
def open_collector() -> Iterator[Collector]:
    """A collector in a separate thread, on a free port."""
    collector = Collector()
    collector.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.gate.wait(30)
            if collector.status == 200:
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # reason: the base class' signature
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
