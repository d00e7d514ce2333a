"""Batch replay of stored conversations.

`verify` proves offline that every stored answer and request is what its bytes say; `rerun` sends stored conversations
through a candidate and compares. What a replay writes never mixes with live conversations.
"""
