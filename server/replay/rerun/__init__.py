"""Reruns: stored conversations are sent to a candidate, and its answers are compared with the recorded ones.

In reading order:

1. Values and port: `replay`, `result`, `port`.
2. Creating a replay: `service`, with `validation`, `candidate` and `estimate`.
3. Running it: `items` claims items and keeps their leases, and `runner` runs one item. Its parts are `walk` with
   `recorded_tool_results` (the next input), `source` (the recording), `payload` (what is sent), `conversation` and
   `answers` (what is stored), `admission` and `budget` (when a call may be sent), `judge` and `observer`.
4. Comparing answers: `result_builder`, `comparison`, `similarity`; `assertions`, `assertion_evaluation`, `expression`.
5. Reporting: `report`, `figures`, `full_results`, `json_codec`, `export`, and `calls` for operators.
"""
