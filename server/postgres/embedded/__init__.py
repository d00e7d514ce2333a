"""The embedded Postgres: a real server from a Python package, shared by all Strata processes of one data directory."""
