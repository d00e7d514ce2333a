"""The embedded Postgres: a server from a Python package, shared by all Strata processes of one data directory.

`service.open_embedded` starts it and returns its URL; `service.describe_embedded` reads its state. The server runs
while a process uses it, and is restarted when it is killed. `binaries` finds and runs the programs, `cluster` creates
the data directory, and `supervisor` is the program that keeps the server running.
"""
