"""`strata worker`: background jobs."""

import os

import click

from server.app.settings import Settings
from server.app.worker import open_worker
from server.cli.run import begin, raise_file_limit, run
from server.jobs.worker import WorkerOptions, run_worker


@click.command()
def worker() -> None:
    """Run background jobs until stopped. Any number of workers may share one database.

    The jobs: conversations that have grown are compacted; with STRATA_RAW_RETENTION_DAYS raw provider bytes that are
    older are removed, once a day, while the turns themselves stay; the queue's own records are pruned. A server does
    these jobs itself, unless STRATA_WORKER_INSIDE is false. Replays are run, up to four conversations at a time.

    Compacting takes no provider's key. Where a model's window runs short, old history is summarised, which does: a
    worker without a key leaves that to others. Replays take the keys of the providers that they ask. Ctrl-C or SIGTERM
    lets a running job finish, and a replay the call at hand.
    """
    settings = begin()
    raise_file_limit(settings)
    run(_work(settings))


async def _work(settings: Settings) -> None:
    async with open_worker(settings, os.environ) as parts:
        await run_worker(parts, WorkerOptions(shutdown_limit_seconds=settings.shutdown_limit_seconds))
