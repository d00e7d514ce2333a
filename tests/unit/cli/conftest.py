"""The chat uses the scripted server of the client's tests."""

from tests.unit.web.client.conftest import client, strata

__all__ = ["client", "strata"]
