"""What the server tells about itself: logs (structlog), metrics (Prometheus), spans (OpenTelemetry).

One promise holds for all three: neither message content nor a secret ever leaves through them. Logs are scrubbed on
their last step (`redaction`) and tracebacks are rendered without the texts that might quote a value (`tracebacks`);
metric labels and span attributes come from closed sets, or are names and numbers with a limit (`limits`).
"""
