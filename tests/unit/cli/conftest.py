"""The scripted server of the client's tests serves the chat's too."""

from tests.unit.web.client.conftest import client, strata

__all__ = ["client", "strata"]
