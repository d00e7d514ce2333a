"""Maintenance on Postgres: pgqueuer's log and the retention of raw bytes."""
