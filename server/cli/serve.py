"""`strata serve`: the server."""

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
@click.option("--provider", type=click.Choice(list(KEY_VARIABLES)), help="Whom to ask.  [the one whose key is set]")
@click.option("--api-key", help="Its key; rather set the environment variable, which other users cannot see.")
@click.option("--migrate", is_flag=True, help="Migrate an external database first; an embedded one always is.")
def serve(host: str | None, port: int | None, provider: str | None, api_key: str | None, *, migrate: bool) -> None:
    """Serve the HTTP API.

    The provider is the one whose key is in the environment: GEMINI_API_KEY (or GOOGLE_API_KEY), or ANTHROPIC_API_KEY.
    With both, name the one that is the default with --provider.

    Without STRATA_DATABASE_URL an embedded Postgres is started and migrated; its data lies under STRATA_DATA_DIR.
    Ctrl-C or SIGTERM lets running turns finish; a second Ctrl-C does not wait.
    """
    settings = begin(host=host, port=port)
    choice = choose_provider(provider, api_key, os.environ)
    raise_file_limit(settings, connections=settings.max_connections)
    run(_serve(settings, choice, migrate=migrate))


async def _serve(settings: Settings, choice: ProviderChoice, *, migrate: bool) -> None:
    # The port first: a taken one should be said before a database is started for nothing.
    with bind(settings.host, settings.port) as listener:
        async with (
            open_providers(settings, choice, os.environ) as providers,
            open_program(settings, providers=providers, migrate=migrate) as program,
        ):
            click.echo(f"Strata serves on {url_of(listener)}", err=True)
            await serve_http(program, listener)
