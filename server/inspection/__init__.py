"""Views for operators: conversations, timelines, calls, assistants, differences, the overview, usage and jobs.

The room owns what operators read and the actions that they take. It promises that a call, a timeline and an assistant
are each projected once, for JSON, pages and terminal; that every action of an operator is audited; and that nothing
here changes a turn.

Other rooms use these modules:

- `port`: `Inspector`, the port through which everything is read
- `conversation_list`, `timeline`, `calls`, `assistants`: the projections of these objects
- `overview`, `usage_report`, `jobs`: reports
- `call_explanation`, `signatures`, `manifest_difference`: parts of the projection of a call
- `differences`: comparison of JSON values, bytes and texts
- `excerpts`: readable excerpts of JSON, text and bytes
- `past_payload`, `judge_payload`: the requests of past calls, and of a judge
- `fact_counting`: facts about a conversation, counted turn by turn
- `actions`: the actions on a conversation, audited for operators
- `assistant_editor`: checking, previewing and saving instructions
- `admin_sessions`: sessions of operators, and the port that stores them
"""
