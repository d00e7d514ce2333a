"""The commands that documents, error hints, the Makefile and the container files name exist."""

import re

import click
import pytest

from server.app.settings import ClientSettings, Settings
from server.cli import main
from tests.unit.house.repository import ROOT, Call, calls_in, fault_of, read, settings_in, words_of, written_files

READ_BY_THE_TESTS = {"STRATA_TEST_DATABASE_URL", "STRATA_TEST_CITUS_URL"}
DOCUMENTS = [path for path in written_files() if path.endswith(".md")]


@pytest.mark.parametrize("path", written_files())
def test_every_command_that_is_named_exists(path: str) -> None:
    faults = [fault for call in calls_in(words_of(path)) if (fault := fault_of(call, main))]

    assert faults == []


@pytest.mark.parametrize("path", written_files())
def test_every_setting_that_is_named_exists(path: str) -> None:
    fields = {f"STRATA_{name.upper()}" for kind in (Settings, ClientSettings) for name in kind.model_fields}

    assert settings_in(words_of(path)) <= fields | READ_BY_THE_TESTS


@pytest.mark.parametrize("path", DOCUMENTS)
def test_every_relative_link_has_a_target(path: str) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", read(path))

    assert [link for link in links if not ((ROOT / path).parent / link).exists()] == []


@click.group()
def example() -> None:
    pass


@example.command()
@click.option("--port", type=int)
def serve(port: int) -> None:
    pass


@example.group()
def keys() -> None:
    pass


@keys.command()
@click.argument("name")
def revoke(name: str) -> None:
    pass


def test_calls_are_found_in_shell_lines_and_between_backticks() -> None:
    text = """
Run `strata keys revoke NAME`; the `strata` command is in .venv.

    $ strata serve --port 9000
\t@exec $(BIN)/strata demo $(if $(PORT),--port $(PORT))
docker compose exec postgres psql -U strata strata
docker compose exec server strata doctor
docker compose run --rm server keys list
docker run --rm -e STRATA_DATABASE_URL \\
    strata migrate up
"""

    assert list(calls_in(text)) == [
        Call(words=("keys", "revoke")),
        Call(words=("serve",), options=("--port",)),
        Call(words=("demo",), options=("--port",)),
        Call(words=("doctor",)),
        Call(words=("keys", "list")),
        Call(words=("migrate", "up")),
    ]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (Call(words=("serve",), options=("--port", "--help")), None),
        (Call(words=("keys", "revoke", "mine")), None),
        (Call(words=("keys",)), None),
        (Call(words=("sevre",)), "`example` has no command `sevre`"),
        (Call(words=("keys", "rotate")), "`keys` has no command `rotate`"),
        (Call(words=("serve", "quickly")), "`serve` takes no argument, and it got `quickly`"),
        (Call(words=("serve",), options=("--prot",)), "`serve` has no option --prot"),
    ],
    ids=lambda value: " ".join((*value.words, *value.options)) if isinstance(value, Call) else "",
)
def test_a_wrong_call_is_reported(call: Call, fault: str | None) -> None:
    assert fault_of(call, example) == fault
