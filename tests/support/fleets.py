"""Servers in separate processes, for tests that kill them or need several."""

from collections.abc import AsyncIterator

import pytest

from server.conversation.api_key import Tenant
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from tests.faults.server_fleet import Fleet, Launcher, open_fleet, open_launcher
from tests.support.emulators import EmulatedProviders


@pytest.fixture(scope="session")
async def launcher() -> AsyncIterator[Launcher]:
    async with open_launcher() as opened:
        yield opened


@pytest.fixture
async def fleet(
    launcher: Launcher,
    database: Database,
    database_options: DatabaseOptions,
    emulated: EmulatedProviders,
    tenant: Tenant,
) -> AsyncIterator[Fleet]:
    """A fleet on the database of the worker."""
    async with open_fleet(launcher, database, database_options, emulated, tenant) as opened:
        yield opened
