"""The supervisor: the parent of the embedded postmaster, and the only process that starts or stops it.

    strata serve ──shared──┐
    strata keys  ──shared──┤ users.lock            a user holds it as long as it lives, kill -9 included
                           │
    supervisor ────exclusive───┘ blocks until the last user is gone, then stops Postgres and ends
      └─ postmaster          restarted by the supervisor when it dies, told to stop by the kernel when the supervisor
      dies

It runs by file path as `python -I -S supervisor.py <orders>` and imports the standard library only: it must not care
which virtual environment, working directory or version of Strata its users have. Its lock is taken by whoever starts it
and handed over as an open file, so there is no moment in which two supervisors could believe in their appointment.

Promises:
- Exactly one line comes back over the report pipe for the first start: ready, or why not. Afterwards it never gives up
  while there are users: a postmaster that dies is started again, with a growing pause.
- Nothing is judged by a bare process number. A process counts as ours only if its command line names this cluster.
- SIGINT, SIGTERM and SIGHUP do nothing: its end is decided by its users, who get the same signals at a shutdown.
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
"""Fast shutdown first. Immediate shutdown and the kill leave recovery to the next start, but lose nothing."""
ORPHAN_STAGES: Final = ((signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
"""Backends whose postmaster died: what the postmaster itself tells its children when one of them crashes."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 30.0
"""How long a first start is retried while remains of a killed server are in the way."""
LAST_WORDS_SECONDS: Final = 5.0
LOG_LIMIT_BYTES: Final = 1024 * 1024
_IN_THE_WAY: Final = ("pre-existing shared memory block", 'lock file "postmaster.pid" already exists')
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """All that a supervisor is told, once, on its command line."""

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
    """What postmaster.pid says. Postgres writes it piece by piece, so later lines may be missing."""

    pid: int
    """Negative for a backend without a postmaster (`postgres --single`)."""
    socket_dir: str
    ready: bool


def read_postmaster_file(pgdata: str) -> PostmasterFile | None:
    """None if there is none, or none that can be made sense of yet. What it says may be long outdated."""
    try:
        lines = os.fsdecode(Path(pgdata, "postmaster.pid").read_bytes()).split("\n")
        pid = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    lines += [""] * 8
    return PostmasterFile(pid=pid, socket_dir=lines[4], ready=lines[7].strip() == "ready")


def cluster_name(pgdata: str) -> str:
    """Stands in the title of every process of this cluster, so that they can be told from those of others."""
    return "strata-" + hashlib.sha256(os.fsencode(os.path.realpath(pgdata))).hexdigest()[:16]


def processes_of(pgdata: str) -> set[int]:
    """The live processes of this cluster.

    Known by their command lines, which everybody may read: root in a container may not look at the working
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
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def end_leftovers(pgdata: str) -> None:
    """Ends what a killed supervisor or a killed postmaster left running. A lone `postgres --single` is somebody's work.

    With nothing running, a lock file that makes no sense is the rest of a write that was cut off, and only in the way.
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
    """A line in the supervisor's log. The log is kept short, and a full disk must not end the supervisor."""
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size > LOG_LIMIT_BYTES:
            os.ftruncate(2, 0)
        os.write(2, os.fsencode(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC {text}\n"))


class Postmaster:
    """A postmaster that was started here. It has to be made in the main thread, see `_die_with_the_supervisor`."""

    def __init__(self, orders: SupervisorConfig, on_exit: Callable[[], None]) -> None:
        self.said: deque[str] = deque(maxlen=50)
        self._process = subprocess.Popen(  # noqa: S603  reason: the command comes from our own code
            orders.command,
            cwd="/",
            env=_environment(orders.pgdata),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            close_fds=True,  # above all the supervisor's lock: in a postmaster it would outlive the supervisor
            user=orders.uid,
            group=orders.gid,
            extra_groups=None if orders.uid is None else [],
            preexec_fn=_die_with_the_supervisor,  # noqa: PLW1509  reason: it takes no lock that another thread could hold
        )
        self.pid = self._process.pid
        note(f"started postmaster {self.pid}")
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._await_exit, args=(on_exit,), daemon=True)
        self._waiter.start()

    def is_ready(self, pgdata: str) -> bool:
        file = read_postmaster_file(pgdata)
        return file is not None and file.pid == self.pid and file.ready

    def stop(self) -> None:
        """Returns when it and its children are gone, the log writer included, which is the last to leave."""
        for number, seconds in STOP_STAGES:
            self._process.send_signal(number)
            self._waiter.join(seconds)
            if not self._waiter.is_alive():
                break
        self._reader.join(LAST_WORDS_SECONDS)

    def _listen(self) -> None:
        """What it says before its own log is open, or when that cannot be written."""
        output = self._process.stdout
        if output is not None:
            for line in output:
                self.said.append(line.decode(errors="replace").rstrip())
                note(self.said[-1])

    def _await_exit(self, on_exit: Callable[[], None]) -> None:
        code = self._process.wait()
        note(f"postmaster {self.pid} ended with {code}")
        if code > 0:  # it gave up by itself and says why; killed, it says nothing, and its orphans keep the pipe open
            self._reader.join(LAST_WORDS_SECONDS)
        on_exit()


def _environment(pgdata: str) -> dict[str, str]:
    """Nothing of the user's environment: PGPORT and its kin change what a server does.

    A stale postmaster.pid may name a number that by now belongs to an innocent process; Postgres would refuse to start.
    It takes the number of its grandparent for stale, so that is what the number is said to be. Removing the file would
    do as well, but would also remove the check for orphaned backends that still write to the cluster.
    """
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
    file = read_postmaster_file(pgdata)
    if file is not None and file.pid not in processes_of(pgdata):
        environment["PG_GRANDPARENT_PID"] = str(file.pid)
    return environment


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_supervisor_pid = os.getpid()


def _die_with_the_supervisor() -> None:
    """Fast shutdown when the supervisor dies (Linux). The kernel ties this to the thread that started the process."""
    if _libc is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
        if os.getppid() != _supervisor_pid:
            os._exit(1)


class _Event(enum.Enum):
    USERS_GONE = enum.auto()
    POSTMASTER_ENDED = enum.auto()


class Supervisor:
    """Keeps one postmaster running until nobody uses it."""

    def __init__(self, orders: SupervisorConfig) -> None:
        self._orders = orders
        self._events: queue.Queue[_Event] = queue.Queue()
        self._reported = False
        # Opened here and not received: a received one would share, and release, the lock of whoever sent it.
        self._start_fd = os.open(orders.start_lock, os.O_RDWR)
        self._users_fd = os.open(orders.users_lock, os.O_RDWR)

    def run(self) -> None:
        threading.Thread(target=self._watch_users, daemon=True).start()
        began_at, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while self._is_appointed():
            end_leftovers(self._orders.pgdata)
            started_at = time.monotonic()
            postmaster = self._launch()
            if postmaster is None or self._attend(postmaster):
                return
            if not self._reported and not self._is_worth_another_try(postmaster, began_at):
                self._report("failed", "\n".join(postmaster.said))
                return
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - started_at > PATIENCE_SECONDS else pause * 2
            if self._users_leave_within(min(pause, LONGEST_PAUSE_SECONDS)):
                return

    def _launch(self) -> Postmaster | None:
        """None if the program cannot be run at all. A user then appoints another supervisor, who may know better:
        after an upgrade of the wheel the programs lie elsewhere.
        """
        try:
            return Postmaster(self._orders, lambda: self._events.put(_Event.POSTMASTER_ENDED))
        except (OSError, subprocess.SubprocessError) as error:
            note(f"cannot run {self._orders.command[0]}: {error}")
            self._report("failed", f"FATAL:  {error}")
            return None

    def _attend(self, postmaster: Postmaster) -> bool:
        """Whether the users left, and the postmaster was stopped for that; else it ended by itself."""
        ready = False
        while True:
            try:
                event = self._events.get(timeout=None if ready else POLL_SECONDS)
            except queue.Empty:
                ready = postmaster.is_ready(self._orders.pgdata)
                if ready:
                    self._report("ready", "")
                continue
            if event is _Event.USERS_GONE:
                note("nobody uses it any more")
                postmaster.stop()
                return True
            return False

    def _users_leave_within(self, seconds: float) -> bool:
        try:
            return self._events.get(timeout=seconds) is _Event.USERS_GONE
        except queue.Empty:
            return False

    def _is_worth_another_try(self, postmaster: Postmaster, began_at: float) -> bool:
        in_the_way = any(sign in line for line in postmaster.said for sign in _IN_THE_WAY)
        return in_the_way and time.monotonic() - began_at < PATIENCE_SECONDS

    def _is_appointed(self) -> bool:
        """No longer, if the data directory was removed and made anew under the same name: that one has its own."""
        try:
            return os.path.samestat(os.fstat(self._orders.supervisor_fd), Path(self._orders.supervisor_lock).stat())
        except FileNotFoundError:
            return False

    def _report(self, outcome: str, reason: str) -> None:
        if not self._reported:
            self._reported = True
            with contextlib.suppress(OSError):  # whoever started us may be dead; others may use the server
                os.write(self._orders.report_fd, json.dumps([outcome, reason[-2000:]]).encode() + b"\n")
            os.close(self._orders.report_fd)

    def _watch_users(self) -> None:
        """Says so when the last user is gone, and keeps newcomers waiting from then on.

        Newcomers take the start lock first and the users lock second. So the users lock, once had, is given back before
        the start lock is taken, and only having both in that order is proof that nobody came in between.
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
                self._events.put(_Event.USERS_GONE)
                return


def _leave_the_family() -> None:
    """Becomes a child of init, so that no user has to wait for it or leaves it behind as a zombie."""
    global _supervisor_pid  # noqa: PLW0603  reason: known before any thread exists, and read after a fork
    if os.fork() != 0:
        os._exit(0)
    _supervisor_pid = os.getpid()


def main() -> None:
    orders = SupervisorConfig(**json.loads(sys.argv[1]))
    _leave_the_family()
    os.umask(0o077)
    # Handlers, because an ignored signal would stay ignored in the postmaster.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    Supervisor(orders).run()
    note("supervisor ended")
    # The kernel drops the locks with the process: whoever sees them free finds nothing of us running.
    os._exit(0)


if __name__ == "__main__":
    main()
