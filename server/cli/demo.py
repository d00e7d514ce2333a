"""`strata demo`: everything at once, on a machine that has nothing."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from server.api_key import Scope, parse_key_text
from server.asgi import bind, url_of
from server.asgi import serve as serve_http
from server.cli.run import begin, run
from server.errors import DataDirectoryForbidden, TenantNotFound
from server.postgres.key_ring import PostgresKeyRing
from server.settings import Settings
from server.wiring import Program, open_program

_TENANT: Final = "demo"
_KEY_FILE: Final = "demo-keys.json"


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 picks a free one.  [STRATA_PORT, 8400]")
def demo(port: int | None) -> None:
    """Serve with an embedded Postgres, a tenant and its keys, and print how to use them.

    A second start finds the data and the keys of the first. Ctrl-C ends all of it.
    """
    settings = begin(port=port).model_copy(update={"database_url": None})
    run(_demo(settings))


async def _demo(settings: Settings) -> None:
    listener = bind(settings.host, settings.port)
    click.echo("Starting Postgres ...", err=True)
    async with open_program(settings) as program:
        keys = await _find_or_make_keys(program)
        click.echo(_welcome(url_of(listener), keys, settings.data_dir))
        await serve_http(program, listener)
    click.echo("Stopped. The data stays.", err=True)


async def _find_or_make_keys(program: Program) -> dict[str, str]:
    """Keys of an earlier start as long as they still open the door, else new ones.

    Only hashes are in the database, so the demo keeps the texts of its own keys in a file for its owner alone.
    """
    path = program.settings.data_dir / _KEY_FILE
    kept = _read(path)
    for text in kept.values():
        presented = parse_key_text(text)
        if presented is None or await program.key_ring.find_live_key(presented) is None:
            kept = {}
            break
    if kept.keys() != {scope.value for scope in Scope}:
        kept = await _make_keys(program.key_ring)
        _write(path, kept)
    return kept


async def _make_keys(ring: PostgresKeyRing) -> dict[str, str]:
    try:
        tenant = await ring.load_tenant(_TENANT)
    except TenantNotFound:
        tenant = await ring.create_tenant(_TENANT)
    made = {}
    for scope in Scope:
        _, made[scope.value] = await ring.create_key(
            tenant_id=tenant.id, name=f"demo {scope}", scopes=frozenset({scope}), expires_at=None
        )
    return made


def _read(path: Path) -> dict[str, str]:
    with suppress(FileNotFoundError, ValueError):
        kept = json.loads(path.read_text())
        if isinstance(kept, dict) and all(isinstance(text, str) for text in kept.values()):
            return kept
    return {}


def _write(path: Path, keys: dict[str, str]) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(keys, file)
    except OSError as error:
        raise DataDirectoryForbidden(f"Cannot write {path}: {error.strerror}.") from error


def _welcome(url: str, keys: dict[str, str], data_dir: Path) -> str:
    return f"""
Strata is running.

  URL         {url}
  client key  {keys[Scope.CLIENT.value]}
  admin key   {keys[Scope.ADMIN.value]}
  data        {data_dir}

Try it:

  curl -H "Authorization: Bearer {keys[Scope.CLIENT.value]}" {url}/v1/key

Also there: {url}/healthz  /readyz  /metrics  /schema
Ctrl-C ends it.
"""
