"""`strata demo`: a complete server on a machine that has only Python."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from server.app.asgi import serve as serve_http
from server.app.http_server import bind, url_of
from server.app.settings import Settings
from server.app.wiring import Program
from server.cli.emulated import open_emulated_program
from server.cli.run import begin, raise_file_limit, run
from server.cli.tenants import find_or_create_tenant
from server.conversation.api_key import Scope, parse_key_text
from server.conversation.assistant import AssistantDefinition, Instructions, Tool
from server.conversation.errors import DataDirectoryForbidden
from server.conversation.page import PAGE_LIMIT
from server.emulator.latency import MODEL_LATENCY
from server.emulator.state import build_state
from server.postgres.access.key_ring import PostgresKeyRing
from server.providers.choice import ANTHROPIC, DEFAULT_MODELS, GEMINI, KEY_VARIABLES

_TENANT: Final = "demo"
_KEY_FILE: Final = "demo-keys.json"
_SCOPES: Final = (Scope.CLIENT, Scope.ADMIN)
"""The scopes of the demo's keys, one key each. The demo has one tenant, so it needs no superadmin key."""


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 picks a free one.  [STRATA_PORT, 8400]")
def demo(port: int | None) -> None:
    """Serve with an embedded Postgres, a tenant and its keys, and print how to use them.

    The providers are emulated in the same process, so no provider key is needed and nothing is billed. Data and keys
    are kept for the next start. Ctrl-C ends everything.
    """
    settings = begin(port=port).model_copy(update={"database_url": None})
    raise_file_limit(settings, connections=settings.max_connections)
    run(_demo(settings))


async def _demo(settings: Settings) -> None:
    gemini, anthropic = build_state(latency=MODEL_LATENCY), build_state(latency=MODEL_LATENCY)
    with bind(settings.host, settings.port) as listener:
        click.echo("Starting Postgres ...", err=True)
        async with open_emulated_program(settings, gemini=gemini, anthropic=anthropic) as program:
            keys = await _find_or_create_keys(program)
            assistants = await _find_or_create_assistants(program)
            click.echo(_welcome(url_of(listener), keys, settings.data_dir, assistants))
            await serve_http(program, listener)
    click.echo("Stopped. The data is kept.", err=True)


async def _find_or_create_keys(program: Program) -> dict[str, str]:
    """Return the keys of an earlier start if all of them are still valid, and new keys otherwise.

    The database has only hashes of keys, so the demo stores its keys in a file that only its owner can read.
    """
    path = program.settings.data_dir / _KEY_FILE
    stored = _read(path)
    for text in stored.values():
        presented = parse_key_text(text)
        if presented is None or await program.key_ring.find_live_key(presented) is None:
            stored = {}
            break
    if stored.keys() != {scope.value for scope in _SCOPES}:
        stored = await _create_keys(program.key_ring)
        _write(path, stored)
    return stored


async def _create_keys(ring: PostgresKeyRing) -> dict[str, str]:
    tenant = await find_or_create_tenant(ring, _TENANT)
    created = {}
    for scope in _SCOPES:
        _, created[scope.value] = await ring.create_key(
            tenant_id=tenant.id, name=f"demo {scope}", scopes=frozenset({scope}), expires_at=None
        )
    return created


async def _find_or_create_assistants(program: Program) -> dict[str, str]:
    """Return the id of one assistant per provider. Those of an earlier start are used again."""
    tenant = await program.key_ring.load_tenant(_TENANT)
    found: dict[str, str] = {}
    cursor = None
    while True:
        page = await program.store.list_assistants(tenant.id, cursor=cursor, limit=PAGE_LIMIT)
        found |= {assistant.definition.name: assistant.id for assistant in page.items}
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    ids = {}
    for provider in KEY_VARIABLES:
        name = f"demo {provider}"
        if name not in found:
            found[name] = (await program.store.create_assistant(tenant.id, _define_assistant(name, provider))).id
        ids[provider] = found[name]
    return ids


def _define_assistant(name: str, provider: str) -> AssistantDefinition:
    weather = Tool(
        name="get_weather",
        description="The weather in a city, now.",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
    return AssistantDefinition(
        name=name,
        provider=provider,
        model=DEFAULT_MODELS[provider],
        language="en",
        description="A friendly helper for trying Strata out.",
        instructions=Instructions(
            roles="You are {{ assistant.name }}, a {{ tone }} helper.",
            procedure="Answer in a few sentences. Call get_weather when the user asks about the weather.",
            constraints="Do not invent facts.",
        ),
        variables={"tone": "friendly"},
        tools=(weather,),
    )


def _read(path: Path) -> dict[str, str]:
    with suppress(FileNotFoundError, ValueError):
        stored = json.loads(path.read_text())
        if isinstance(stored, dict) and all(isinstance(text, str) for text in stored.values()):
            return stored
    return {}


def _write(path: Path, keys: dict[str, str]) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(keys, file)
    except OSError as error:
        raise DataDirectoryForbidden(f"Cannot write {path}: {error.strerror}.") from error


def _welcome(url: str, keys: dict[str, str], data_dir: Path, assistants: dict[str, str]) -> str:
    key = keys[Scope.CLIENT.value]
    return f"""
Strata is running.

  URL         {url}
  client key  {key}
  admin pages {url}/admin
  admin key   {keys[Scope.ADMIN.value]}
  assistants  {assistants[GEMINI]}  Gemini
              {assistants[ANTHROPIC]}  Claude
  data        {data_dir}

Both providers are emulated in this process, so nothing is billed. To chat with one of the assistants:

  strata chat --url {url} --key {key} --assistant {assistants[GEMINI]}

The same with curl, for the Claude assistant:

  KEY={key}
  JSON="Content-Type: application/json"
  CONVERSATION=$(curl -s {url}/v1/conversations -H "Authorization: Bearer $KEY" -H "$JSON" \\
    -d '{{"assistant_id": "{assistants[ANTHROPIC]}"}}' | grep -o 'conv_[a-z0-9]*' | head -1)
  curl -N {url}/v1/conversations/$CONVERSATION/turns -H "Authorization: Bearer $KEY" -H "$JSON" \\
    -H "Accept: text/event-stream" -d '{{"input": "What is the weather in Oslo?"}}'

Other URLs: {url}/schema  /healthz  /readyz  /metrics
Press Ctrl-C to stop.
"""
