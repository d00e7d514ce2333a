"""Anthropic's Claude: the streamed Messages API, through the SDK anthropic.

Special: thinking is a block with a signature, which may be bound to everything before it, so a message is always sent
as it was first sent. Arguments of calls arrive in pieces. Caching is requested by at most four markers on blocks. The
stream ends with `message_stop`. A paused answer is continued by another call. Claude signs summaries that replace
history.
"""
