"""Conversations and assistants on Postgres: created, listed, edited, forked and erased."""
