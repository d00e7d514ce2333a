"""A strict local Claude: the Messages API of Anthropic as its documents describe it.

Every request runs the same gauntlet: key and version (`caller`), known fields (`schema`), roles and tool pairing
(`message_rules`), thinking and effort by model (`model_rules`), cache markers (`cache_markers`), compaction blocks
(`compaction`), and the signatures of thinking blocks, each bound to all that stands before it (`binding`). What passes
gets an answer (`answer`), rendered whole or as events (`stream`), with usage from a simulated prompt cache (`cache`).
"""
