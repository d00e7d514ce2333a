"""Batch replay of stored conversations.

`verify` checks offline that every stored answer matches its raw bytes and every request can be rebuilt. `rerun` sends
stored conversations to a candidate and compares the answers. A rerun never writes to live conversations.
"""
