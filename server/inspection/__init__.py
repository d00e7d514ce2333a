"""Views for operators: timelines, calls, differences, the overview, usage, the audit log, and what operators do.

`port` is what lists and timelines are read through, `call_view` proves a past request and explains its answer,
`actions` are what clients and operators do to a conversation, audited for operators. Nothing here changes a turn.
"""
