"""Names of ASGI extensions that the HTTP server (`app.http_server`) offers to the application."""

from typing import Final

ABORT_CONNECTION: Final = "strata.abort_connection"
"""The extension's `abort` closes the connection at once, even if the client has not read all that was sent."""
