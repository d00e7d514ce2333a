"""`strata demo`: everything at once, on a machine that has nothing."""

import json
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import click

from server.app.asgi import serve as serve_http
from server.app.http_server import bind, url_of
from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.cli.run import begin, raise_file_limit, run
from server.conversation.api_key import Scope, parse_key_text
from server.conversation.assistant import AssistantDefinition, Instructions, Tool
from server.conversation.errors import DataDirectoryForbidden, TenantNotFound
from server.conversation.page import PAGE_LIMIT
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.gemini.app import build_gemini_app
from server.emulator.latency import MODEL_LATENCY
from server.emulator.server import emulating
from server.emulator.state import build_state
from server.postgres.access.key_ring import PostgresKeyRing
from server.providers.choice import ANTHROPIC, DEFAULT_MODELS, GEMINI, KEY_VARIABLES, ProviderChoice

_TENANT: Final = "demo"
_KEY_FILE: Final = "demo-keys.json"
_DEMO_KEY: Final = "demo"
_SCOPES: Final = (Scope.CLIENT, Scope.ADMIN)
"""A key of each. There is one tenant, so nobody needs to see all of them."""


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 picks a free one.  [STRATA_PORT, 8400]")
def demo(port: int | None) -> None:
    """Serve with an embedded Postgres, a tenant and its keys, and print how to use them.

    The providers are emulators in this very process: no key, no bill. A second start finds the data and the keys of the
    first. Ctrl-C ends all of it.
    """
    settings = begin(port=port).model_copy(update={"database_url": None})
    raise_file_limit(settings, connections=settings.max_connections)
    run(_demo(settings))


async def _demo(settings: Settings) -> None:
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(settings.host, settings.port))
        click.echo("Starting Postgres ...", err=True)
        emulators = await _start_emulators(stack)
        pointed = settings.model_copy(update={f"{name}_base_url": url for name, url in emulators.items()})
        choice = ProviderChoice(provider=GEMINI, api_key=_DEMO_KEY)
        environment = {names[0]: _DEMO_KEY for names in KEY_VARIABLES.values()}
        providers = await stack.enter_async_context(open_providers(pointed, choice, environment))
        program = await stack.enter_async_context(open_program(pointed, providers=providers))
        keys = await _find_or_make_keys(program)
        assistants = await _find_or_make_assistants(program)
        click.echo(_welcome(url_of(listener), keys, settings.data_dir, assistants))
        await serve_http(program, listener)
    click.echo("Stopped. The data stays.", err=True)


async def _start_emulators(stack: AsyncExitStack) -> dict[str, str]:
    """Both providers as local servers, at the pace of a model; gives their URLs."""
    return {
        GEMINI: await stack.enter_async_context(emulating(build_gemini_app(build_state(latency=MODEL_LATENCY)))),
        ANTHROPIC: await stack.enter_async_context(emulating(build_anthropic_app(build_state(latency=MODEL_LATENCY)))),
    }


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
    if kept.keys() != {scope.value for scope in _SCOPES}:
        kept = await _make_keys(program.key_ring)
        _write(path, kept)
    return kept


async def _make_keys(ring: PostgresKeyRing) -> dict[str, str]:
    try:
        tenant = await ring.load_tenant(_TENANT)
    except TenantNotFound:
        tenant = await ring.create_tenant(_TENANT)
    made = {}
    for scope in _SCOPES:
        _, made[scope.value] = await ring.create_key(
            tenant_id=tenant.id, name=f"demo {scope}", scopes=frozenset({scope}), expires_at=None
        )
    return made


async def _find_or_make_assistants(program: Program) -> dict[str, str]:
    """The ids of one assistant per provider; those of an earlier start where they are still there."""
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
            found[name] = (await program.store.create_assistant(tenant.id, _assistant(name, provider))).id
        ids[provider] = found[name]
    return ids


def _assistant(name: str, provider: str) -> AssistantDefinition:
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
            procedure="Answer in a few sentences. Ask for the weather with get_weather when somebody wants to know it.",
            constraints="Do not invent facts.",
        ),
        variables={"tone": "friendly"},
        tools=(weather,),
    )


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

Both providers are emulators in this process: no key, no bill. Talk to one of them:

  strata chat --url {url} --key {key} --assistant {assistants[GEMINI]}

or with curl:

  KEY={key}
  JSON="Content-Type: application/json"
  CONVERSATION=$(curl -s {url}/v1/conversations -H "Authorization: Bearer $KEY" -H "$JSON" \\
    -d '{{"assistant_id": "{assistants[ANTHROPIC]}"}}' | grep -o 'conv_[a-z0-9]*' | head -1)
  curl -N {url}/v1/conversations/$CONVERSATION/turns -H "Authorization: Bearer $KEY" -H "$JSON" \\
    -H "Accept: text/event-stream" -d '{{"input": "What is the weather in Oslo?"}}'

The same with {assistants[GEMINI]} in its place talks to Gemini.
Also there: {url}/schema  /healthz  /readyz  /metrics
Ctrl-C ends it.
"""
