"""`strata keys`: tenants and their API keys."""

import json
from datetime import UTC, datetime
from typing import Any

import click
from rich.markup import escape
from rich.table import Column, Table

from server.app.database import open_database
from server.app.settings import Settings
from server.cli.parameters import Expiry, Name
from server.cli.run import begin_quietly, run
from server.cli.tenants import find_or_create_tenant, load_tenant_id
from server.cli.terminal import open_console
from server.conversation.api_key import ApiKey, Scope
from server.postgres.access.key_ring import PostgresKeyRing


@click.group()
def keys() -> None:
    """Create, list and revoke API keys.

    A key belongs to a tenant and has scopes. The scope client permits /v1, admin permits /admin for its own tenant, and
    superadmin permits /admin and read access to the data of all tenants.
    """


@keys.command()
@click.option(
    "--tenant",
    type=Name(),
    default="default",
    show_default=True,
    help="Owner of the key, created if it does not exist.",
)
@click.option("--name", type=Name(), default="key", show_default=True, help="Name shown in lists.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    default=[Scope.CLIENT.value],
    show_default=True,
    help="Scope of the key. Repeatable.",
)
@click.option("--expires", type=Expiry(), help="Expiry: a span (12h, 90d, 4w, 1y) or a time (2027-01-31).  [never]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(tenant: str, name: str, scopes: tuple[str, ...], expires: datetime | None, *, as_json: bool) -> None:
    """Create a key and print it. It cannot be shown again, because only its hash is stored."""
    key, text = run(_create(begin_quietly(), tenant, name, frozenset(Scope(scope) for scope in scopes), expires))
    if as_json:
        click.echo(json.dumps(_as_json(key) | {"key": text}))
        return
    click.echo(text)
    click.echo(f"{key.id} of tenant {tenant}. Save the key: it cannot be shown again.", err=True)


@keys.command("list")
@click.option("--tenant", type=Name(), help="Only this tenant.  [all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per key.")
def list_(tenant: str | None, *, as_json: bool) -> None:
    """List keys, without their secrets."""
    found = run(_list(begin_quietly(), tenant))
    if as_json:
        for key in found:
            click.echo(json.dumps(_as_json(key)))
        return
    if not found:
        click.echo("There are no keys. `strata keys create` creates one.")
        return
    # A truncated id could not be used to revoke the key.
    table = Table("tenant", Column("id", no_wrap=True), "name", "scopes", "state", "created", "last used")
    for key in found:
        table.add_row(
            escape(key.tenant_name),
            key.id,
            escape(key.name),
            ", ".join(sorted(key.scopes)),
            _state(key),
            _time(key.created_at),
            _time(key.last_used_at),
        )
    open_console().print(table)


@keys.command()
@click.argument("key_id")
def revoke(key_id: str) -> None:
    """Revoke a key by its id (key_...). It stops working at once and cannot be restored."""
    key = run(_revoke(begin_quietly(), key_id))
    click.echo(f"{key.id} ({key.name}, tenant {key.tenant_name}) was revoked.")


async def _create(
    settings: Settings, tenant_name: str, name: str, scopes: frozenset[Scope], expires_at: datetime | None
) -> tuple[ApiKey, str]:
    async with open_database(settings) as database:
        ring = PostgresKeyRing(database)
        tenant = await find_or_create_tenant(ring, tenant_name)
        return await ring.create_key(tenant_id=tenant.id, name=name, scopes=scopes, expires_at=expires_at)


async def _list(settings: Settings, tenant_name: str | None) -> list[ApiKey]:
    async with open_database(settings) as database:
        tenant_id = await load_tenant_id(database, tenant_name)
        found = await PostgresKeyRing(database).list_keys(tenant_id)
        return sorted(found, key=lambda key: (key.tenant_name, key.created_at))


async def _revoke(settings: Settings, key_id: str) -> ApiKey:
    async with open_database(settings) as database:
        return await PostgresKeyRing(database).revoke_key(key_id)


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_time(key.revoked_at)}"
    if not key.is_live(datetime.now(UTC)):
        return f"expired {_time(key.expires_at)}"
    return f"until {_time(key.expires_at)}" if key.expires_at is not None else "live"


def _time(time: datetime | None) -> str:
    return "never" if time is None else time.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _as_json(key: ApiKey) -> dict[str, Any]:
    def iso(time: datetime | None) -> str | None:
        return None if time is None else time.astimezone(UTC).isoformat()

    return {
        "id": key.id,
        "tenant": key.tenant_name,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": iso(key.created_at),
        "expires_at": iso(key.expires_at),
        "revoked_at": iso(key.revoked_at),
        "last_used_at": iso(key.last_used_at),
    }
