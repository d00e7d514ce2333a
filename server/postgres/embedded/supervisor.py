"""The supervisor: the parent of the embedded postmaster, and the only process that starts or stops it.

    strata serve ──shared──────┐
    strata keys  ──shared──────┤ users.lock, held by each user while it lives
                               │
    supervisor ────exclusive───┘ blocks until there are no users, then stops Postgres and ends
      └─ postmaster              restarted when it dies; stopped by the kernel when the supervisor dies (Linux)

It runs by file path as `python -I -S supervisor.py <config>` and imports the standard library only, because its users
may have different virtual environments, working directories and versions of Strata. The process that starts it takes
its lock and passes it on as an open file, so there are never two supervisors.

- It writes exactly one line to the report pipe about the first start: ready, or the reason of the failure. Afterwards
  it restarts a postmaster that dies, after growing pauses, as long as there are users.
- It does not rely on a bare process id: a process belongs to the cluster only if its command line names the cluster.
- It ignores SIGINT, SIGTERM and SIGHUP: it ends when its users do, which receive the same signals at shutdown.
"""

import contextlib
import ctypes
import enum
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

if sys.platform != "win32":
    import fcntl

POLL_SECONDS: Final = 0.02
STOP_STAGES: Final = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))
"""Fast shutdown first. An immediate shutdown or a kill requires recovery at the next start, but loses nothing."""
ORPHAN_STAGES: Final = ((signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
"""Backends whose postmaster died. A postmaster sends its children the same signal when one of them crashes."""
FIRST_PAUSE_SECONDS: Final = 0.05
MAX_PAUSE_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 30.0
"""How long the first start is retried while leftovers of a killed server prevent it."""
OUTPUT_SECONDS: Final = 5.0
LOG_LIMIT_BYTES: Final = 1024 * 1024
_LEFTOVER_MESSAGES: Final = ("pre-existing shared memory block", 'lock file "postmaster.pid" already exists')
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """The configuration of a supervisor, passed as JSON on its command line."""

    pgdata: str
    command: list[str]
    start_lock: str
    users_lock: str
    supervisor_lock: str
    uid: int | None
    gid: int | None
    supervisor_fd: int
    """The open supervisor lock, already held exclusively."""
    report_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostmasterFile:
    """The content of postmaster.pid. Postgres writes it in pieces, so later lines may be missing."""

    pid: int
    """Negative for a backend without a postmaster (`postgres --single`)."""
    socket_dir: str
    ready: bool


def read_postmaster_file(pgdata: str) -> PostmasterFile | None:
    """Read the file; None if it is missing or incomplete. Its content may be outdated."""
    try:
        lines = os.fsdecode(Path(pgdata, "postmaster.pid").read_bytes()).split("\n")
        pid = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    lines += [""] * 8
    return PostmasterFile(pid=pid, socket_dir=lines[4], ready=lines[7].strip() == "ready")


def cluster_name(pgdata: str) -> str:
    """Return the name in the title of every process of this cluster, which identifies them."""
    return "strata-" + hashlib.sha256(os.fsencode(os.path.realpath(pgdata))).hexdigest()[:16]


def processes_of(pgdata: str) -> set[int]:
    """Return the live processes of this cluster.

    They are found by their command lines, which every account may read: root in a container may not read the working
    directories of another account's processes.
    """
    title, option = f"postgres: {cluster_name(pgdata)}: ", f" -D {pgdata} "
    return {
        pid
        for pid, command in _command_lines()
        if command.startswith(title) or (option in command and command.split(option)[0].endswith("postgres"))
    }


def _command_lines() -> Iterator[tuple[int, str]]:
    if not Path("/proc/self/cmdline").exists():
        yield from _command_lines_of_ps()
        return
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield int(process.name), os.fsdecode((process / "cmdline").read_bytes()).replace("\0", " ")


def _command_lines_of_ps() -> Iterator[tuple[int, str]]:
    listing = subprocess.run(["/bin/ps", "-axww", "-o", "pid=,command="], stdout=subprocess.PIPE, check=False).stdout
    for line in os.fsdecode(listing).splitlines():
        pid, _, command = line.strip().partition(" ")
        yield int(pid), command.lstrip() + " "


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition, and return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def end_leftovers(pgdata: str) -> None:
    """End the processes that a killed supervisor or postmaster left running, but not a `postgres --single`.

    If nothing runs, an unreadable lock file is the remainder of an interrupted write, and is removed.
    """
    file = read_postmaster_file(pgdata)
    if file is not None and file.pid < 0:
        return
    if file is not None and file.pid in processes_of(pgdata):
        _end(lambda: processes_of(pgdata) & {file.pid}, STOP_STAGES)
    _end(lambda: processes_of(pgdata), ORPHAN_STAGES)
    if file is None and not processes_of(pgdata):
        Path(pgdata, "postmaster.pid").unlink(missing_ok=True)


def _end(alive: Callable[[], set[int]], stages: tuple[tuple[signal.Signals, float], ...]) -> None:
    for number, seconds in stages:
        for pid in alive():
            note(f"sending {number.name} to {pid}, which an earlier run left behind")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if wait_until(lambda: not alive(), seconds):
            return


def note(text: str) -> None:
    """Write a line to the supervisor's log, which is kept short. A full disk must not end the supervisor."""
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size > LOG_LIMIT_BYTES:
            os.ftruncate(2, 0)
        os.write(2, os.fsencode(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC {text}\n"))


class Postmaster:
    """A postmaster started by this process, from the main thread: see `_stop_with_supervisor`."""

    def __init__(self, config: SupervisorConfig, on_exit: Callable[[], None]) -> None:
        self.output: deque[str] = deque(maxlen=50)
        self._process = subprocess.Popen(  # noqa: S603  reason: the command comes from our own code
            config.command,
            cwd="/",
            env=_environment(config.pgdata),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            close_fds=True,  # above all the supervisor's lock, which the postmaster would keep after its death
            user=config.uid,
            group=config.gid,
            extra_groups=None if config.uid is None else [],
            preexec_fn=_stop_with_supervisor,  # noqa: PLW1509  reason: it takes no lock that another thread could hold
        )
        self.pid = self._process.pid
        note(f"started postmaster {self.pid}")
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._await_exit, args=(on_exit,), daemon=True)
        self._waiter.start()

    def is_ready(self, pgdata: str) -> bool:
        file = read_postmaster_file(pgdata)
        return file is not None and file.pid == self.pid and file.ready

    def stop(self) -> None:
        """Stop it, and wait until it and its children have ended. The log writer, the last of them, closes the pipe."""
        for number, seconds in STOP_STAGES:
            self._process.send_signal(number)
            self._waiter.join(seconds)
            if not self._waiter.is_alive():
                break
        self._reader.join(OUTPUT_SECONDS)

    def _read_output(self) -> None:
        """Read its output, which it writes before its log is open, or when that cannot be written."""
        output = self._process.stdout
        if output is not None:
            for line in output:
                self.output.append(line.decode(errors="replace").rstrip())
                note(self.output[-1])

    def _await_exit(self, on_exit: Callable[[], None]) -> None:
        code = self._process.wait()
        note(f"postmaster {self.pid} ended with {code}")
        if code > 0:  # it failed and wrote the reason; if it was killed, its orphans keep the pipe open
            self._reader.join(OUTPUT_SECONDS)
        on_exit()


def _environment(pgdata: str) -> dict[str, str]:
    """Return an environment without the user's variables: PGPORT and others change what a server does.

    The process id in a stale postmaster.pid may belong to another process by now, and Postgres would refuse to start.
    Postgres considers the id of its grandparent as stale, so the id is passed as that. Removing the file would also
    remove the check for orphaned backends that still write to the cluster.
    """
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
    file = read_postmaster_file(pgdata)
    if file is not None and file.pid not in processes_of(pgdata):
        environment["PG_GRANDPARENT_PID"] = str(file.pid)
    return environment


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_supervisor_pid = os.getpid()


def _stop_with_supervisor() -> None:
    """Request a fast shutdown when the supervisor dies (Linux). The kernel ties this to the thread that forks."""
    if _libc is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
        if os.getppid() != _supervisor_pid:
            os._exit(1)


class _Event(enum.Enum):
    NO_USERS = enum.auto()
    POSTMASTER_ENDED = enum.auto()


class Supervisor:
    """Keeps one postmaster running until it has no users."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._events: queue.Queue[_Event] = queue.Queue()
        self._reported = False
        # Opened here: an inherited file would share, and release, the lock of the process that passed it.
        self._start_fd = os.open(config.start_lock, os.O_RDWR)
        self._users_fd = os.open(config.users_lock, os.O_RDWR)

    def run(self) -> None:
        threading.Thread(target=self._watch_users, daemon=True).start()
        began_at, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while self._is_current():
            end_leftovers(self._config.pgdata)
            started_at = time.monotonic()
            postmaster = self._launch()
            if postmaster is None or self._watch(postmaster):
                return
            if not self._reported and not self._can_retry(postmaster, began_at):
                self._report("failed", "\n".join(postmaster.output))
                return
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - started_at > RETRY_SECONDS else pause * 2
            if self._wait_for_no_users(min(pause, MAX_PAUSE_SECONDS)):
                return

    def _launch(self) -> Postmaster | None:
        """Start the postmaster; None if the program cannot be run at all.

        A user then starts another supervisor with the current path, which an upgrade of the wheel changes.
        """
        try:
            return Postmaster(self._config, lambda: self._events.put(_Event.POSTMASTER_ENDED))
        except (OSError, subprocess.SubprocessError) as error:
            note(f"cannot run {self._config.command[0]}: {error}")
            self._report("failed", f"FATAL:  {error}")
            return None

    def _watch(self, postmaster: Postmaster) -> bool:
        """Watch it until it ends. Return True if there are no users and it was stopped; False if it ended by itself."""
        ready = False
        while True:
            try:
                event = self._events.get(timeout=None if ready else POLL_SECONDS)
            except queue.Empty:
                ready = postmaster.is_ready(self._config.pgdata)
                if ready:
                    self._report("ready", "")
                continue
            if event is _Event.NO_USERS:
                note("there are no users")
                postmaster.stop()
                return True
            return False

    def _wait_for_no_users(self, seconds: float) -> bool:
        try:
            return self._events.get(timeout=seconds) is _Event.NO_USERS
        except queue.Empty:
            return False

    def _can_retry(self, postmaster: Postmaster, began_at: float) -> bool:
        in_the_way = any(sign in line for line in postmaster.output for sign in _LEFTOVER_MESSAGES)
        return in_the_way and time.monotonic() - began_at < RETRY_SECONDS

    def _is_current(self) -> bool:
        """Return False if the data directory was removed or replaced: a new one has its own supervisor."""
        try:
            return os.path.samestat(os.fstat(self._config.supervisor_fd), Path(self._config.supervisor_lock).stat())
        except FileNotFoundError:
            return False

    def _report(self, outcome: str, reason: str) -> None:
        if not self._reported:
            self._reported = True
            with contextlib.suppress(OSError):  # the process that started us may have died
                os.write(self._config.report_fd, json.dumps([outcome, reason[-2000:]]).encode() + b"\n")
            os.close(self._config.report_fd)

    def _watch_users(self) -> None:
        """Report when there are no users, and block new ones from then on.

        New users take the start lock first and the users lock second. So the users lock is released before the start
        lock is taken, and only both in that order prove that no user came in between.
        """
        while True:
            fcntl.flock(self._users_fd, fcntl.LOCK_EX)
            fcntl.flock(self._users_fd, fcntl.LOCK_UN)
            fcntl.flock(self._start_fd, fcntl.LOCK_EX)
            try:
                fcntl.flock(self._users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(self._start_fd, fcntl.LOCK_UN)
            else:
                self._events.put(_Event.NO_USERS)
                return


def _daemonize() -> None:
    """Become a child of init, so that no user has to wait for this process or leaves it as a zombie."""
    global _supervisor_pid  # noqa: PLW0603  reason: set before any thread exists, and read after a fork
    if os.fork() != 0:
        os._exit(0)
    _supervisor_pid = os.getpid()


def main() -> None:
    config = SupervisorConfig(**json.loads(sys.argv[1]))
    _daemonize()
    os.umask(0o077)
    # Handlers, because the postmaster would inherit an ignored signal.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    Supervisor(config).run()
    note("supervisor ended")
    # The kernel releases the locks when the process has ended.
    os._exit(0)


if __name__ == "__main__":
    main()
