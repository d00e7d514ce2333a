"""`strata worker`: run background jobs."""

import os

import click

from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import open_worker
from server.cli.run import begin, raise_file_limit, run


@click.command()
def worker() -> None:
    """Run background jobs until stopped. Any number of workers may share one database.

    The jobs compact conversations, index them for operators, run replays (up to four conversations at a time), remove
    raw provider bytes after STRATA_RAW_RETENTION_DAYS, and prune the queue's own records. A server runs these jobs
    itself unless STRATA_WORKER_INSIDE is false.

    Compaction needs a provider key only for summaries, which are written when a conversation approaches the model's
    context window. A worker without a key leaves them to other workers. Replays need the keys of the providers that
    they call.

    On Ctrl-C or SIGTERM the worker waits for running jobs; a replay finishes its current call.
    """
    settings = begin()
    raise_file_limit(settings)
    run(_work(settings))


async def _work(settings: Settings) -> None:
    async with (
        open_providers(settings, None, os.environ) as providers,
        open_worker(settings, providers=providers) as opened,
    ):
        await opened.run_until_signal()
