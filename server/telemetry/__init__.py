"""Logs (structlog), metrics (Prometheus) and spans (OpenTelemetry).

The room promises that neither message content nor a secret leaves through any of the three. `logs` redacts every line
and renders tracebacks without the texts of exceptions; metric labels and span attributes come from closed sets, or are
names and numbers within `limits`.

Other rooms use these modules:

- `logs`: the configuration of logs, and the fields of the current request
- `metrics`: `Metrics`, all metrics of a server
- `spans`: `Tracing`, the spans of a server
- `turns`, `compactions`, `replays`: the observers of these rooms, which record all three
"""
