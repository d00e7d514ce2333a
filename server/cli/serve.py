"""`strata serve`: the server."""

import click

from server.asgi import bind, url_of
from server.asgi import serve as serve_http
from server.cli.run import begin, run
from server.settings import Settings
from server.wiring import open_program


@click.command()
@click.option("--host", help="Address to listen on.  [STRATA_HOST, 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 picks a free one.  [STRATA_PORT, 8400]")
@click.option("--migrate", is_flag=True, help="Migrate an external database first; an embedded one always is.")
def serve(host: str | None, port: int | None, *, migrate: bool) -> None:
    """Serve the HTTP API.

    Without STRATA_DATABASE_URL an embedded Postgres is started and migrated; its data lies under STRATA_DATA_DIR.
    Ctrl-C or SIGTERM lets running turns finish; a second Ctrl-C does not wait.
    """
    run(_serve(begin(host=host, port=port), migrate=migrate))


async def _serve(settings: Settings, *, migrate: bool) -> None:
    # The port first: a taken one should be said before a database is started for nothing.
    listener = bind(settings.host, settings.port)
    async with open_program(settings, migrate=migrate) as program:
        click.echo(f"Strata serves on {url_of(listener)}", err=True)
        await serve_http(program, listener)
