"""The source of a payload on Postgres: one statement per turn, and what a process caches of its rows."""
