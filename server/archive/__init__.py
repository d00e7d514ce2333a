"""Conversations as files, complete enough to become the same conversation elsewhere, and made-up ones for seeding."""
