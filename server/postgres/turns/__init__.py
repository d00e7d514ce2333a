"""Turns on Postgres: accepted, recorded while they run, leased, queued, read, and notified to other processes."""
