"""Logs (structlog), metrics (Prometheus) and spans (OpenTelemetry).

Neither message content nor a secret leaves through any of the three. `logs` redacts every line and renders tracebacks
without the texts of exceptions; metric labels and span attributes come from closed sets, or are names and numbers
within `limits`. The observers `turns.TurnTelemetry`, `compactions.CompactionTelemetry` and `replays.ReplayTelemetry`
implement the ports of their rooms; `metrics.Metrics` holds all metrics of a server, `spans.Tracing` its spans.
"""
