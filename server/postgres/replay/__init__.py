"""Replays on Postgres.

Runs, items, results and reports, the conversations that a rerun writes, and the stored calls that a verification
reads.
"""
