"""Anthropic's Claude through anthropic: the Messages API, streamed.

Special here: thinking is a block with a signature that may be bound to everything before it, so what was sent once is
sent the same for ever; arguments of calls come in pieces; caching is asked for by markers, at most four; a stream ends
with `message_stop` and nothing else.
"""
