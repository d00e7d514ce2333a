"""Views for operators: conversations, timelines, calls, assistants, differences, the overview, usage and jobs.

`port.Inspector` is the port through which everything is read. `timeline` and `calls` project a conversation and a call
once, for JSON, pages and terminal. `actions` are the actions on a conversation, audited for operators. Nothing here
changes a turn.
"""
