"""`strata keys`: tenants and their API keys."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from rich.markup import escape
from rich.table import Column, Table

from server.app.database import open_database
from server.app.settings import Settings
from server.cli.run import begin_quietly, run
from server.cli.terminal import open_console
from server.conversation.api_key import ApiKey, Scope
from server.conversation.errors import TenantExists, TenantNotFound
from server.postgres.access.key_ring import PostgresKeyRing

_SPAN: Final = re.compile(r"(\d{1,5})([hdwy])")
_UNITS: Final = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1), "y": timedelta(days=365)}
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,100}")


class Expiry(click.ParamType[datetime]):
    """A span such as 90d, or a time such as 2027-01-31."""

    name = "expiry"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        span = _SPAN.fullmatch(value)
        if span is not None:
            moment = datetime.now(UTC) + int(span[1]) * _UNITS[span[2]]
        else:
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                self.fail(
                    f"{value!r} is neither a span such as 12h, 90d, 4w, 1y nor a date such as 2027-01-31", param, ctx
                )
            moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        if moment <= datetime.now(UTC):
            self.fail(f"{value!r} is in the past", param, ctx)
        return moment


class Name(click.ParamType[str]):
    """Something that can be shown on one line."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if _NAME.fullmatch(text) is None:
            self.fail("a name has 1 to 100 characters and no control characters", param, ctx)
        return text


@click.group()
def keys() -> None:
    """Create, list and revoke API keys.

    A key belongs to a tenant and has scopes: client opens /v1, admin opens /admin, superadmin opens /admin and
    reads, without changing them, the data of all tenants.
    """


@keys.command()
@click.option("--tenant", type=Name(), default="default", show_default=True, help="Whose key it is; made if it is new.")
@click.option("--name", type=Name(), default="key", show_default=True, help="For telling keys apart.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    default=[Scope.CLIENT.value],
    show_default=True,
    help="May be given more than once.",
)
@click.option("--expires", type=Expiry(), help="A span (12h, 90d, 4w, 1y) or a time (2027-01-31).  [never]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(tenant: str, name: str, scopes: tuple[str, ...], expires: datetime | None, *, as_json: bool) -> None:
    """Create a key. It is printed now and never again: only its hash is stored."""
    key, text = run(_create(begin_quietly(), tenant, name, frozenset(Scope(scope) for scope in scopes), expires))
    if as_json:
        click.echo(json.dumps(_as_json(key) | {"key": text}))
        return
    click.echo(text)
    click.echo(f"{key.id} of tenant {tenant}; keep the key, it cannot be shown again.", err=True)


@keys.command("list")
@click.option("--tenant", type=Name(), help="Only this tenant's.  [all]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a key a line.")
def list_(tenant: str | None, *, as_json: bool) -> None:
    """List keys, without their secrets."""
    found = run(_list(begin_quietly(), tenant))
    if as_json:
        for key in found:
            click.echo(json.dumps(_as_json(key)))
        return
    if not found:
        click.echo("There are no keys yet; make one with `strata keys create`.")
        return
    # An id that is cut is of no use for revoking it.
    table = Table("tenant", Column("id", no_wrap=True), "name", "scopes", "state", "created", "last used")
    for key in found:
        table.add_row(
            escape(key.tenant_name),
            key.id,
            escape(key.name),
            ", ".join(sorted(key.scopes)),
            _state(key),
            _day(key.created_at),
            _day(key.last_used_at),
        )
    open_console().print(table)


@keys.command()
@click.argument("key_id")
def revoke(key_id: str) -> None:
    """Revoke a key by its id (key_...), at once and for good."""
    key = run(_revoke(begin_quietly(), key_id))
    click.echo(f"{key.id} ({key.name}, tenant {key.tenant_name}) is revoked.")


async def _create(
    settings: Settings, tenant_name: str, name: str, scopes: frozenset[Scope], expires_at: datetime | None
) -> tuple[ApiKey, str]:
    async with open_database(settings) as database:
        ring = PostgresKeyRing(database)
        try:
            tenant = await ring.load_tenant(tenant_name)
        except TenantNotFound:
            try:
                tenant = await ring.create_tenant(tenant_name)
            except TenantExists:
                # Somebody else made it between the two looks.
                tenant = await ring.load_tenant(tenant_name)
        return await ring.create_key(tenant_id=tenant.id, name=name, scopes=scopes, expires_at=expires_at)


async def _list(settings: Settings, tenant_name: str | None) -> list[ApiKey]:
    async with open_database(settings) as database:
        ring = PostgresKeyRing(database)
        tenant_id = None if tenant_name is None else (await ring.load_tenant(tenant_name)).id
        return sorted(await ring.list_keys(tenant_id), key=lambda key: (key.tenant_name, key.created_at))


async def _revoke(settings: Settings, key_id: str) -> ApiKey:
    async with open_database(settings) as database:
        return await PostgresKeyRing(database).revoke_key(key_id)


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if not key.is_live(datetime.now(UTC)):
        return f"expired {_day(key.expires_at)}"
    return f"until {_day(key.expires_at)}" if key.expires_at is not None else "live"


def _day(moment: datetime | None) -> str:
    return "never" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _as_json(key: ApiKey) -> dict[str, Any]:
    def moment(value: datetime | None) -> str | None:
        return None if value is None else value.astimezone(UTC).isoformat()

    return {
        "id": key.id,
        "tenant": key.tenant_name,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": moment(key.created_at),
        "expires_at": moment(key.expires_at),
        "revoked_at": moment(key.revoked_at),
        "last_used_at": moment(key.last_used_at),
    }
