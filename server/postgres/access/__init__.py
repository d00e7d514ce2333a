"""Authentication on Postgres: tenants, API keys and their cache, admin sessions, rate limits."""
