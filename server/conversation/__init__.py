"""The vocabulary: conversations, turns, blocks, calls, epochs, usage, errors, ids, and the ports to what is durable.

Everything else imports this room; it imports nothing but the standard library and does no I/O. Values are frozen.
`store` is the port that every room reads and writes through, `errors` the one tree of everything that can go wrong.
"""
