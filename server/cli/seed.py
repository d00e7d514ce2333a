"""`strata seed`: a database full of conversations that nobody has held."""

from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from time import perf_counter
from typing import Final

import click
from rich.progress import Progress, TaskID

from server.app.settings import Settings
from server.archive.seed_plan import plan_seed
from server.cli.run import begin_quietly, run
from server.cli.seed_talk import hold_conversations, open_talk
from server.cli.terminal import open_bar
from server.conversation.errors import TenantNotEmpty, TenantNotFound
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.archive.seeder import Copies, count_tenant_conversations, load_originals, renew_statistics
from server.postgres.engine import Database

_BATCH_TURNS: Final = 2_000
_LARGEST: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What was asked for."""

    turn_count: int
    seed: int
    tenant: str
    days: int
    until: datetime
    force: bool


@click.command()
@click.option(
    "--turns", "turn_count", type=click.IntRange(1, _LARGEST), default=10_000, show_default=True, help="At least."
)
@click.option("--seed", "seed_", type=int, default=1, show_default=True, help="The same one gives the same data.")
@click.option("--tenant", default="seed", show_default=True, help="Whose the conversations are; made if it is new.")
@click.option("--days", type=click.IntRange(1, 3650), default=180, show_default=True, help="Over how many days.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="The day after the last one, in UTC.  [today]")
@click.option("--force", is_flag=True, help="Also where the tenant has conversations already.")
def seed(turn_count: int, seed_: int, tenant: str, days: int, until: datetime | None, *, force: bool) -> None:
    """Fill the database with made-up conversations, for trying things out at size.

    Up to 240 distinct conversations are held with emulators, through the same program that serves: with tools, images,
    errors, cancelled turns and compactions, on several models. The others are copies of these under ids and times of
    their own. So every request of them can be rebuilt to the byte; but texts, tokens and costs repeat themselves.
    """
    day = (until or datetime.now(UTC)).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
    order = _Order(turn_count=turn_count, seed=seed_, tenant=tenant, days=days, until=day, force=force)
    began = perf_counter()
    # What goes wrong between the program and the emulators is in the plan.
    made = run(_seed(begin_quietly("error"), order))
    seconds = perf_counter() - began
    click.echo(f"{made:,} turns for tenant {tenant} in {seconds:.1f} s: {made / seconds:,.0f} turns a second.")


async def _seed(settings: Settings, order: _Order) -> int:
    """How many turns were made."""
    async with open_talk(settings) as talk:
        database = talk.program.database
        tenant_id = await _find_or_make_tenant(talk.program.key_ring, order.tenant)
        there = await count_tenant_conversations(database, tenant_id)
        if there and not order.force:
            raise TenantNotEmpty(f"The tenant {order.tenant} has {there} conversations already.")
        # Not the same ids again for another tenant, or for the same one.
        random = Random(f"{order.seed}:{order.tenant}:{there}")  # noqa: S311  reason: it is to be predictable
        with open_bar() as progress:
            task = progress.add_task("talking", total=order.turn_count)
            made = await hold_conversations(
                talk,
                tenant_id,
                plan_seed(random, order.turn_count),
                turn_limit=order.turn_count,
                on_turns=lambda count: progress.advance(task, count),
            )
            originals = await load_originals(database, made)
            held = sum(original.turn_count for original in originals)
            progress.update(task, description="copying")
            copies = Copies(originals, random, until=order.until, days=order.days)
            await _copy(database, copies, order.turn_count - held, progress, task)
        await renew_statistics(database)
    return held + copies.turn_count


async def _copy(database: Database, copies: Copies, wanted: int, progress: Progress, task: TaskID) -> None:
    written = 0
    while copies.turn_count < wanted:
        while copies.turn_count < min(wanted, written + _BATCH_TURNS):
            copies.add()
        await copies.write(database)
        progress.advance(task, copies.turn_count - written)
        written = copies.turn_count


async def _find_or_make_tenant(ring: PostgresKeyRing, name: str) -> str:
    try:
        return (await ring.load_tenant(name)).id
    except TenantNotFound:
        return (await ring.create_tenant(name)).id
