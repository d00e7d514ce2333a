"""Offline verification: raw bytes are parsed again, requests are rebuilt, and both are compared with the store.

In reading order: `verification` (counts and mismatches), `recorded_calls` (the port that stored calls are read
through), `answer_check`, `epoch_check`, and `verifier`, which checks conversations call by call.
"""
