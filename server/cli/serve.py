"""`strata serve`: serve the HTTP API."""

import os

import click

from server.app.asgi import serve as serve_http
from server.app.http_server import bind, url_of
from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import open_program
from server.cli.run import begin, raise_file_limit, run
from server.providers.choice import KEY_VARIABLES, ProviderChoice, choose_provider


@click.command()
@click.option("--host", help="Address to listen on.  [STRATA_HOST, 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 picks a free one.  [STRATA_PORT, 8400]")
@click.option("--provider", type=click.Choice(list(KEY_VARIABLES)), help="Default provider.  [the one with a key]")
@click.option("--api-key", help="Its API key. Prefer the variable: other users can see options.")
@click.option("--migrate", is_flag=True, help="Migrate an external database first. An embedded one is always migrated.")
def serve(host: str | None, port: int | None, provider: str | None, api_key: str | None, *, migrate: bool) -> None:
    """Serve the HTTP API.

    Provider keys are read from the environment: GEMINI_API_KEY (or GOOGLE_API_KEY) and ANTHROPIC_API_KEY. If both
    providers have a key, choose the default with --provider.

    Without STRATA_DATABASE_URL, an embedded Postgres is started and migrated. Its data is in STRATA_DATA_DIR. On Ctrl-C
    or SIGTERM the server waits for running turns; a second Ctrl-C ends it at once.
    """
    settings = begin(host=host, port=port)
    choice = choose_provider(provider, api_key, os.environ)
    raise_file_limit(settings, connections=settings.max_connections)
    run(_serve(settings, choice, migrate=migrate))


async def _serve(settings: Settings, choice: ProviderChoice, *, migrate: bool) -> None:
    # The port is bound first, so that a port in use is reported before a database is started.
    with bind(settings.host, settings.port) as listener:
        async with (
            open_providers(settings, choice, os.environ) as providers,
            open_program(settings, providers=providers, migrate=migrate) as program,
        ):
            click.echo(f"Strata is listening on {url_of(listener)}", err=True)
            await serve_http(program, listener)
