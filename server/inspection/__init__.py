"""Views for operators: timelines, calls, differences, the overview, usage, the audit log, and what operators do.

`port` is what lists and timelines are read through, `call_view` proves a past request and explains its answer,
`operator_actions` are the actions of the client API with a row in the audit log. Nothing here changes a turn.
"""
