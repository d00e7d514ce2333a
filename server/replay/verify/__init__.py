"""Offline verification: raw bytes are parsed again, requests are rebuilt, and both are compared with the store."""
