"""The embedded Postgres under kill -9 of its users, its supervisor, Postgres itself, and all at once, at any moment.

Every user here is a separate process, and every death a real SIGKILL.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from server.postgres.embedded.service import describe_embedded
from tests.support.fakes.embedded_user import (
    LIMIT_SECONDS,
    NOBODY,
    EmbeddedUser,
    copy_seed,
    eventually,
    open_base_dir,
    open_seed_dir,
    processes_below,
    python_for_nobody,
    supervisors_below,
)

ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def seed() -> Iterator[Path]:
    with open_seed_dir() as directory:
        yield directory


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Not created yet."""
    with open_base_dir() as base:
        yield base / "data"


@pytest.fixture
def made_dir(data_dir: Path, seed: Path) -> Path:
    """With a cluster in it. `start` uses the same directory."""
    copy_seed(seed, data_dir)
    return data_dir


@pytest.fixture
def start(data_dir: Path) -> Iterator[Callable[[], EmbeddedUser]]:
    users: list[EmbeddedUser] = []

    def start() -> EmbeddedUser:
        users.append(EmbeddedUser(data_dir))
        return users[-1]

    yield start
    for user in users:
        user.end()


def run(url: str, statement: str) -> list[object]:
    async def fetch() -> list[object]:
        connection = await asyncpg.connect(url, timeout=30)
        try:
            return [row[0] for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    return asyncio.run(fetch())


def answers(url: str) -> bool:
    try:
        return run(url, "SELECT 1") == [1]
    except (OSError, asyncpg.PostgresError):
        return False


def store_numbers(url: str) -> None:
    run(url, "CREATE TABLE numbers (n int)")
    run(url, "INSERT INTO numbers SELECT generate_series(1, 1000)")


def has_numbers(url: str) -> bool:
    return run(url, "SELECT count(*) FROM numbers") == [1000]


def postmaster_of(data_dir: Path) -> int:
    pid = describe_embedded(data_dir).pid
    assert pid is not None
    return pid


def kill_all_of(user: EmbeddedUser) -> int:
    """Kill Postgres first: without its supervisor it would stop properly. Returns its pid."""
    postmaster = postmaster_of(user.data_dir)
    for pid in (postmaster, *(process.pid for process in supervisors_below(user.data_dir)), user.process.pid):
        os.kill(pid, signal.SIGKILL)
    return postmaster


def test_postgres_runs_until_the_last_user_leaves(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    first = start()
    url = first.url()
    second = start()
    assert second.url() == url
    pid = postmaster_of(made_dir)
    assert first.ask("close") == {"closed": True}
    assert run(url, "SELECT 1") == [1]
    assert postmaster_of(made_dir) == pid
    assert second.ask("close") == {"closed": True}
    assert not psutil.pid_exists(pid)
    assert supervisors_below(made_dir) == []


def test_postgres_stops_when_its_last_user_is_killed(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    first, second = start(), start()
    url = first.url()
    second.url()
    first.kill()
    assert run(url, "SELECT 1") == [1]
    second.kill()
    eventually(lambda: processes_below(made_dir) == [])


def test_a_user_that_exits_without_closing_stops_postgres(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    user.url()
    assert "Traceback" not in user.leave()
    assert processes_below(made_dir) == []


def test_ctrl_c_in_the_terminal_ends_only_the_user(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    url = user.url()
    (supervisor,) = supervisors_below(made_dir)
    assert os.getsid(supervisor.pid) != os.getsid(user.process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        supervisor.send_signal(number)
    assert run(url, "SELECT 1") == [1]
    assert supervisors_below(made_dir) == [supervisor]


def test_postgres_restarts_after_kill_9_with_everything_that_was_committed(
    made_dir: Path, start: Callable[[], EmbeddedUser]
) -> None:
    url = start().url()
    store_numbers(url)
    killed = postmaster_of(made_dir)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: answers(url))
    assert postmaster_of(made_dir) != killed
    assert has_numbers(url)


def test_a_busy_backend_does_not_prevent_a_killed_postgres_from_restarting(
    made_dir: Path, start: Callable[[], EmbeddedUser]
) -> None:
    """An orphaned backend that computes does not notice the death of Postgres, and Postgres does not start next to
    it.
    """
    url = start().url()

    async def kill_under_load() -> None:
        connection = await asyncpg.connect(url)
        computing = asyncio.create_task(connection.execute("SELECT count(*) FROM generate_series(1, 1000000000000)"))
        await asyncio.sleep(0.2)
        os.kill(postmaster_of(made_dir), signal.SIGKILL)
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await asyncio.wait_for(computing, LIMIT_SECONDS)

    asyncio.run(kill_under_load())
    eventually(lambda: answers(url))


def test_postgres_restarts_each_time(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    url = start().url()
    store_numbers(url)
    for _ in range(3):
        os.kill(postmaster_of(made_dir), signal.SIGKILL)
        eventually(lambda: answers(url))
    assert has_numbers(url)


def test_a_killed_supervisor_is_replaced_by_a_user(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    first, second = start(), start()
    url = first.url()
    second.url()
    store_numbers(url)
    (killed,) = supervisors_below(made_dir)
    killed.kill()
    eventually(lambda: bool(supervisors_below(made_dir)) and killed not in supervisors_below(made_dir) and answers(url))
    assert has_numbers(url)
    assert len(supervisors_below(made_dir)) == 1
    for user in (first, second):
        assert user.ask("close") == {"closed": True}
    assert supervisors_below(made_dir) == []


def test_a_supervisor_killed_with_its_last_user_stops_postgres(
    made_dir: Path, start: Callable[[], EmbeddedUser]
) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux: elsewhere the next start ends the Postgres that was left behind")
    user = start()
    user.url()
    user.kill()
    for process in supervisors_below(made_dir):
        process.kill()
    eventually(lambda: processes_below(made_dir) == [])


@pytest.mark.usefixtures("made_dir")
def test_everything_killed_at_once_is_recovered_by_the_next_start(start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    store_numbers(user.url())
    kill_all_of(user)
    assert has_numbers(start().url())


def test_a_reused_pid_is_not_signalled(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    store_numbers(user.url())
    killed = kill_all_of(user)
    eventually(lambda: not psutil.pid_exists(killed))
    owner = NOBODY if ROOT else None
    with subprocess.Popen(["/bin/sleep", "100"], user=owner) as innocent:
        file = made_dir / "postgres" / "postmaster.pid"
        file.write_text(file.read_text().replace(str(killed), str(innocent.pid), 1))
        assert has_numbers(start().url())
        assert innocent.poll() is None
        innocent.kill()


@pytest.mark.parametrize("content", ["", "12", "nonsense\n", "99999999\n/somewhere\n"])
def test_a_half_written_postmaster_file_does_not_prevent_a_start(
    made_dir: Path, start: Callable[[], EmbeddedUser], content: str
) -> None:
    user = start()
    store_numbers(user.url())
    user.ask("close")
    file = made_dir / "postgres" / "postmaster.pid"
    file.write_text(content)
    shutil.chown(file, (made_dir / "postgres").stat().st_uid)
    assert has_numbers(start().url())


def test_six_concurrent_starts_on_a_new_directory_create_one_cluster(
    data_dir: Path, start: Callable[[], EmbeddedUser]
) -> None:
    users = [start() for _ in range(6)]
    (url,) = {user.url() for user in users}
    assert run(url, "SELECT 1") == [1]
    assert len(supervisors_below(data_dir)) == 1
    logs = [user.leave() for user in users]
    assert sum(log.count("postgres.initialized") for log in logs) == 1
    assert processes_below(data_dir) == []


def test_arriving_and_leaving_users_always_find_postgres(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    """Each arrives while the one before is leaving and the supervisor decides to stop."""
    user = start()
    store_numbers(user.url())
    for _ in range(6):
        successor = start()
        user.kill()
        user = successor
        assert has_numbers(user.url())
    user.leave()
    assert processes_below(made_dir) == []


def test_a_start_killed_in_the_middle_of_initdb_is_repeated(data_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    eventually(lambda: any(data_dir.glob("postgres.unfinished-*/PG_VERSION")))
    user.kill()
    assert not (data_dir / "postgres").exists()
    assert run(start().url(), "SELECT 1") == [1]
    assert list(data_dir.glob("postgres.unfinished-*")) == []


def test_a_start_killed_before_postgres_is_ready_is_repeated(data_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    eventually((data_dir / "postgres").exists)
    user.kill()
    assert run(start().url(), "SELECT 1") == [1]


def test_a_forked_child_does_not_keep_postgres_running(made_dir: Path, start: Callable[[], EmbeddedUser]) -> None:
    user = start()
    user.url()
    child = int(user.ask("fork")["child"])
    try:
        assert user.ask("close") == {"closed": True}
        assert supervisors_below(made_dir) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_removed_data_directory_is_not_replaced_by_an_empty_one(
    made_dir: Path, start: Callable[[], EmbeddedUser]
) -> None:
    user = start()
    user.url()
    shutil.rmtree(made_dir)
    for process in supervisors_below(made_dir):
        process.kill()
    assert "Traceback" not in user.leave()
    assert not made_dir.exists()


@pytest.fixture
def ordinary_user() -> Iterator[Callable[[Path], EmbeddedUser]]:
    """Start a process without privileges: under another account if the tests run as root."""
    python = python_for_nobody() if ROOT else sys.executable
    users: list[EmbeddedUser] = []

    def start(where: Path) -> EmbeddedUser:
        users.append(EmbeddedUser(where, uid=NOBODY if ROOT else None, python=python))
        return users[-1]

    yield start
    for user in users:
        user.end()


def test_a_cluster_of_an_ordinary_user_is_private(
    data_dir: Path, ordinary_user: Callable[[Path], EmbeddedUser]
) -> None:
    home = data_dir.parent / "home"
    home.mkdir()
    if ROOT:
        shutil.chown(home, NOBODY, NOBODY)
    user = ordinary_user(home / "data")
    store_numbers(user.url())
    assert (home / "data").stat().st_mode & 0o777 == 0o700
    assert psutil.Process(postmaster_of(home / "data")).uids().real == (home / "data").stat().st_uid
    user.kill()
    eventually(lambda: processes_below(home / "data") == [])
    user = ordinary_user(home / "data")
    assert has_numbers(user.url())
    user.leave()
    assert processes_below(home / "data") == []


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_directory_without_permission_gives_one_sentence(
    data_dir: Path, ordinary_user: Callable[[Path], EmbeddedUser], mode: int
) -> None:
    data_dir.mkdir()
    data_dir.chmod(mode)
    for place in (data_dir, data_dir / "below"):
        user = ordinary_user(place)
        answer = user.answer()
        assert answer["error"] == "DataDirectoryForbidden"
        assert str(data_dir) in str(answer["sentence"])
        assert user.leave() == ""
        assert user.process.returncode == 3
    data_dir.chmod(0o755)


def test_a_cluster_of_another_user_gives_one_sentence(
    made_dir: Path, start: Callable[[], EmbeddedUser], ordinary_user: Callable[[Path], EmbeddedUser]
) -> None:
    if not ROOT:
        pytest.skip("needs root: makes a cluster that belongs to somebody else")
    start().url()
    answer = ordinary_user(made_dir).answer()
    assert answer["error"] == "DataDirectoryForbidden"
    assert str(made_dir) in str(answer["sentence"])


def test_root_can_join_and_leave_the_cluster_of_a_user(
    data_dir: Path, start: Callable[[], EmbeddedUser], ordinary_user: Callable[[Path], EmbeddedUser]
) -> None:
    """`sudo strata keys list` must not leave files that the server of the user cannot open afterwards."""
    if not ROOT:
        pytest.skip("needs root: joins the Postgres of another user")
    data_dir.mkdir(mode=0o700)
    shutil.chown(data_dir, NOBODY, NOBODY)
    guest = start()
    url = guest.url()
    host = ordinary_user(data_dir)
    assert host.url() == url
    guest.leave()
    assert run(url, "SELECT 1") == [1]
    host.leave()
    assert processes_below(data_dir) == []
