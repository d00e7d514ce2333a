"""compose.yaml, Dockerfile and .dockerignore, as far as they can be checked without a container engine."""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml

from server.app.settings import Settings
from server.cli import main
from server.providers.choice import KEY_VARIABLES
from tests.unit.house.repository import ROOT, Call, fault_of, pyproject, read

COMPOSE: dict[str, Any] = yaml.safe_load(read("compose.yaml"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if service["image"] == "strata"]


def instructions() -> Iterator[tuple[str, str]]:
    """The instructions of the Dockerfile, one line each."""
    text = re.sub(r"^#.*\n", "", read("Dockerfile"), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name, rest.strip()


def last(instruction: str) -> str:
    return [rest for name, rest in instructions() if name == instruction][-1]


def as_call(words: list[str]) -> Call:
    """The call that a container makes: plain words first, then options with their values."""
    plain = [word for word in words if not word.startswith("-")]
    options = [word for word in words if word.startswith("-")]
    return Call(words=tuple(plain[: len(plain) - len(options)]), options=tuple(options))


def is_ignored(path: str) -> bool:
    """Whether .dockerignore excludes a path from the build: the last pattern that matches it or a parent decides."""
    parts = path.split("/")
    parents = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    ignored = False
    for line in read(".dockerignore").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            names = parts if pattern.startswith("**/") else parents
            if any("/" not in name and fnmatchcase(name, pattern.removeprefix("**/")) for name in names):
                ignored = not line.startswith("!")
    return ignored


def test_compose_file_follows_the_specification() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", OURS)
def test_every_service_runs_a_command_that_exists(name: str) -> None:
    assert fault_of(as_call(SERVICES[name]["command"]), main) is None


@pytest.mark.parametrize("name", OURS)
def test_every_service_is_configured_with_existing_settings(name: str) -> None:
    fields = {f"STRATA_{field.upper()}" for field in Settings.model_fields}
    fields |= {variable for variables in KEY_VARIABLES.values() for variable in variables}

    assert set(SERVICES[name]["environment"]) <= fields


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_only_for_conditions_that_can_occur(name: str) -> None:
    for other, wait in SERVICES[name].get("depends_on", {}).items():
        if wait["condition"] == "service_healthy":
            assert "test" in SERVICES[other]["healthcheck"]
        else:
            assert wait["condition"] == "service_completed_successfully"
            assert SERVICES[other]["restart"] == "no"


def test_server_and_worker_wait_for_the_migration() -> None:
    for name in ("server", "worker"):
        assert SERVICES[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
        assert SERVICES[name]["restart"] == "unless-stopped"


def test_every_volume_is_declared_and_used() -> None:
    used = {mount.partition(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())}

    assert used == set(COMPOSE["volumes"])


def test_no_file_contains_a_secret() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|KEY", name):
                # From the environment: required, or absent.
                assert re.fullmatch(r"\$\{\w+:(\?[^}]+|-)\}", value), name
            if password := re.search(r"://[^:/@]+:(.+)@", str(value)):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", password[1]), name


def test_ports_are_open_to_this_machine_only_unless_configured_otherwise() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]

    assert ports
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in ports)


@pytest.mark.parametrize("name", ["server", "worker"])
def test_the_stop_grace_period_covers_the_shutdown_limit(name: str) -> None:
    limit = Settings.model_fields["shutdown_limit_seconds"].default

    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > limit


def test_every_file_that_the_image_copies_is_there_and_reaches_the_build() -> None:
    copied = [
        source
        for name, rest in instructions()
        if name == "COPY" and "--from=" not in rest
        for source in rest.split()[:-1]
    ]

    assert copied
    assert [path for path in copied if not (ROOT / path).exists() or is_ignored(path)] == []


@pytest.mark.parametrize("path", [".git", ".venv", ".env", "tests", "docs", "server/__pycache__/turn.pyc"])
def test_no_other_file_reaches_the_build(path: str) -> None:
    assert is_ignored(path)


def test_the_image_contains_what_the_wheel_includes() -> None:
    wheel = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {word for name, rest in instructions() if name == "COPY" for word in rest.split()}

    assert {*wheel["only-include"], *wheel["force-include"]} <= copied


def test_every_stage_has_the_oldest_python_that_is_supported() -> None:
    images = {rest.split()[0] for name, rest in instructions() if name == "FROM"}

    assert images == {f"python:{pyproject()['project']['requires-python'].removeprefix('>=')}-slim-bookworm"}


def test_the_image_runs_a_command_that_exists_as_an_unprivileged_user_on_the_default_port() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["strata"]
    assert fault_of(as_call(json.loads(last("CMD"))), main) is None
    assert last("USER") == "strata"
    assert last("EXPOSE") == str(Settings.model_fields["port"].default)


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_of_the_image_requests_the_readiness_route(status: int, *, healthy: bool) -> None:
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    program, flag, code = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    ast.parse(code)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        environment = {**os.environ, "STRATA_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, flag, code], env=environment, check=False, timeout=30)

    assert program == "python"
    assert asked == ["/readyz"]
    assert (done.returncode == 0) is healthy
