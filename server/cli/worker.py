"""`strata worker`: background jobs."""

import click

from server.cli.run import begin, run
from server.jobs.worker import WorkerOptions, run_worker
from server.settings import Settings
from server.worker_wiring import open_worker


@click.command()
def worker() -> None:
    """Run background jobs until stopped. Any number of workers may share one database.

    The one job of this release is retention: with STRATA_RAW_RETENTION_DAYS it removes raw provider bytes that are
    older, once a day; the turns themselves stay. Ctrl-C or SIGTERM lets a running job finish.
    """
    run(_work(begin()))


async def _work(settings: Settings) -> None:
    async with open_worker(settings) as parts:
        await run_worker(parts, WorkerOptions(shutdown_limit_seconds=settings.shutdown_limit_seconds))
