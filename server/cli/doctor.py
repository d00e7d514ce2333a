"""`strata doctor`: check the installation and print how to fix problems."""

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.markup import escape

from server.app.database import open_database_options
from server.app.http_server import bind
from server.app.settings import Settings
from server.cli.run import begin_quietly, run
from server.conversation.api_key import Scope
from server.conversation.errors import AddressInUse, StrataError
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions, connect
from server.postgres.embedded.service import describe_embedded
from server.postgres.engine import Database
from server.postgres.migrations import read_schema_state
from server.providers.choice import KEY_VARIABLES, find_key

_LOW_SPACE_BYTES: Final = 1024**3


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check and its result."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per check.")
def doctor(*, as_json: bool) -> None:
    """Check settings, database, schema, keys, providers and disk. Exit with 1 if a check fails.

    An embedded Postgres that is not running is started for the checks and stopped afterwards.
    """
    findings = run(_examine(begin_quietly()))
    if as_json:
        for finding in findings:
            click.echo(json.dumps(asdict(finding)))
    else:
        _show(findings)
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        sys.exit(1)


async def _examine(settings: Settings) -> list[Finding]:
    findings = [Finding(check="settings", verdict=Verdict.OK, found="all settings are valid")]
    findings.append(_address(settings))
    if settings.embedded:
        findings.append(_disk(settings.data_dir))
        state = describe_embedded(settings.data_dir)
        running = "running" if state.running else "not running"
        findings.append(
            Finding(check="embedded", verdict=Verdict.OK, found=f"Postgres in {settings.data_dir}, {running}")
        )
    findings += [finding async for finding in _database(settings)]
    findings.append(_providers())
    return findings


async def _database(settings: Settings) -> AsyncIterator[Finding]:
    """Check the database, its schema and its keys. The first failure ends these checks."""
    try:
        async with open_database_options(settings) as options:
            connection = await connect(options)
            try:
                version = connection.get_server_version()
            finally:
                await connection.close()
            yield Finding(
                check="database", verdict=Verdict.OK, found=f"PostgreSQL {version.major}.{version.micro} answers"
            )
            schema = await _schema(options, embedded=settings.embedded)
            yield schema
            if schema.verdict is Verdict.OK:
                yield await _keys(options)
    except StrataError as error:
        yield Finding(check="database", verdict=Verdict.FAILED, found=error.message, fix=error.advice)


async def _schema(options: DatabaseOptions, *, embedded: bool) -> Finding:
    state = await read_schema_state(options)
    if not state.known:
        return Finding(
            check="schema",
            verdict=Verdict.FAILED,
            found=f"revision {state.current} is newer than this release",
            fix="Run the release that migrated it, or a newer one.",
        )
    if state.pending:
        return Finding(
            check="schema",
            verdict=Verdict.WARNING if embedded else Verdict.FAILED,
            found=f"at {state.current or 'no revision'}, {len(state.pending)} pending",
            fix="The next start migrates it." if embedded else "Run `strata migrate up`.",
        )
    return Finding(check="schema", verdict=Verdict.OK, found=f"at {state.current}, the revision of this release")


async def _keys(options: DatabaseOptions) -> Finding:
    database = Database(options)
    try:
        keys = await PostgresKeyRing(database).list_keys()
    finally:
        await database.close()
    live = [key for key in keys if key.revoked_at is None]
    missing = [scope.value for scope in Scope if not any(scope in key.scopes for key in live)]
    if missing:
        return Finding(
            check="keys",
            verdict=Verdict.WARNING,
            found=f"no key with the scope {' or '.join(missing)}",
            fix=" ".join(f"`strata keys create --scope {scope}`" for scope in missing),
        )
    return Finding(check="keys", verdict=Verdict.OK, found=f"{len(live)} live, {len(keys) - len(live)} revoked")


def _address(settings: Settings) -> Finding:
    try:
        bind(settings.host, settings.port).close()
    except AddressInUse as error:
        return Finding(
            check="address",
            verdict=Verdict.WARNING,
            found=error.message,
            fix="Ignore this if it is Strata itself. Otherwise choose another port with STRATA_PORT.",
        )
    return Finding(check="address", verdict=Verdict.OK, found=f"{settings.host}:{settings.port} is free")


def _disk(data_dir: Path) -> Finding:
    place = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1024**3:.1f} GiB free under {data_dir}"
    if free < _LOW_SPACE_BYTES:
        return Finding(
            check="disk",
            verdict=Verdict.WARNING,
            found=found,
            fix="Free some space, or choose another directory with STRATA_DATA_DIR.",
        )
    return Finding(check="disk", verdict=Verdict.OK, found=found)


def _providers() -> Finding:
    """Check whether keys of providers are set. The keys themselves are never printed."""
    present = [provider for provider in KEY_VARIABLES if find_key(provider, os.environ)]
    if not present:
        wanted = ", ".join(name for names in KEY_VARIABLES.values() for name in names)
        return Finding(
            check="providers",
            verdict=Verdict.WARNING,
            found="no provider key in the environment",
            fix=f"Set one of {wanted}.",
        )
    if len(present) > 1:
        return Finding(
            check="providers",
            verdict=Verdict.WARNING,
            found=f"keys for {' and '.join(present)} are set",
            fix="Choose the default with `strata serve --provider`.",
        )
    return Finding(check="providers", verdict=Verdict.OK, found=f"a key for {present[0]} is set")


def _show(findings: list[Finding]) -> None:
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for finding in findings:
        colour = colours[finding.verdict]
        console.print(f"[{colour}]{finding.verdict:8}[/] {finding.check:10} {escape(finding.found)}")
        if finding.fix:
            console.print(f"{'':20}{escape(finding.fix)}", style="dim")
