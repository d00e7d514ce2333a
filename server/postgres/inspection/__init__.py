"""Operators' views on Postgres: lists, timelines, overviews, usage, the audit log, and the search index for them."""
