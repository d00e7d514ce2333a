"""The Postgres server of the tests."""

import os
import socket
from urllib.parse import urlsplit, urlunsplit

from testcontainers.community.postgres import PostgresContainer


def find_server_url(run_id: str) -> str | None:
    """An existing or startable server; None if the embedded one has to be used."""
    given = os.environ.get("STRATA_TEST_DATABASE_URL")
    if given:
        return given
    return _container_url(run_id) if docker_answers() else None


def docker_answers() -> bool:
    """Whether a Docker engine runs here. A client without an engine does not count."""
    address = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    family, target = (
        (socket.AF_UNIX, address.path)
        if address.scheme == "unix"
        else (socket.AF_INET, (address.hostname or "127.0.0.1", address.port or 2375))
    )
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(target)
        except OSError:
            return False
        return True


def _container_url(run_id: str) -> str:
    """A container for this worker; testcontainers removes it when the process ends."""
    container = PostgresContainer(
        "postgres:18-alpine", username="strata", password=run_id, dbname="strata", driver=None
    )
    container.start()
    return str(container.get_connection_url())


def with_database(url: str, name: str) -> str:
    """The same server, another database."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
