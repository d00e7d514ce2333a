"""An emulator of Anthropic's Messages API, as its documentation describes it.

Every request passes the same checks: key and version (`caller`), known fields (`schema`), roles and tool pairing
(`message_rules`), thinking and effort by model (`model_rules`), cache markers (`prompt_items`), compaction blocks
(`compaction`), and the signatures of thinking blocks, each bound to everything before it (`binding`). A valid request
gets a response (`composing`, `answer`), whole or as events (`sending`), with usage from a simulated prompt cache
(`cache`).
"""
