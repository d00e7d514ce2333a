"""Replays on Postgres.

Reruns: `replays` implements the port with one module per part (`planning`, `runs`, `items`, `spending`, `results`,
`reports`, `erasure`), on the shared `statements` and `rows`. `conversations` and `conversation_tables` hold the replay
conversations. Verification: `conversation_choice` selects conversations, and `recorded_calls` reads their calls with
`call_rows`, `turn_window`, `turn_audit` and `shared_parts`.
"""
