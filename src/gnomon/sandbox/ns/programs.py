"""Programs inside a sandbox: started with what the host said, their output sent in frames, their end in bounded time.

Read by the agent's loop, one event at a time. A program's own processes may outlive it and hold its pipes: what it had written by its end
is sent, the pipe is then drained to nowhere so that a server that still writes to it lives on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time

from gnomon.sandbox.ns import calls, launch, wire

LINGER_SECONDS = 0.05
PIPE_BYTES = 1 << 20
MAX_ORPHAN_PIPES = 64
SMALL_FILE = 1 << 16
KILL_ROUNDS = 20
ENDLESS = 1 << 62
MAX_FILES = 0x7FFFFFFF


class Program:
    """One program: its pipes, what it may still send, how it ended."""

    __slots__ = ("call", "credit", "deadline", "input", "linger", "pending", "pid", "pipes", "remaining", "status", "timed_out",
                 "truncated")  # fmt: skip

    def __init__(self, call: int, pid: int, pipes: dict[int, int], stdin: int) -> None:
        self.call, self.pid, self.input = call, pid, stdin
        self.pipes = pipes  # descriptor → 1 or 2
        self.pending: list[tuple[int, bytes]] = []
        self.remaining = {1: ENDLESS, 2: ENDLESS}
        self.credit, self.deadline, self.linger = ENDLESS, 0.0, 0.0
        self.status: int | None = None
        self.timed_out = self.truncated = False


User = tuple[int, int, str, list[int]]
_users: dict[str, tuple[tuple[int, ...], User]] = {}


def find_user(name: str) -> User:
    """`look_up_user`, kept until the files that it reads change."""
    stamp: tuple[int, ...] = ()
    for path in ("/etc/passwd", "/etc/group"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        stamp += (status.st_ino, status.st_size, status.st_mtime_ns)
    if name not in _users or _users[name][0] != stamp:
        _users.clear()
        _users[name] = (stamp, look_up_user(name))
    return _users[name][1]


def look_up_user(name: str) -> User:
    """User, group, home and further groups by name or number, from the sandbox's own files; `KeyError` if there is none."""
    user = group = -1
    home = "/"
    for line in read_lines("/etc/passwd"):
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdigit() and fields[3].isdigit() and name in (fields[0], fields[2]):
            name, user, group, home = fields[0], int(fields[2]), int(fields[3]), fields[5]
            break
    if user < 0:
        if not name.isdigit():
            raise KeyError(f"no user {name} in /etc/passwd")
        user = group = int(name)
    others = [fields[2] for fields in (line.split(":") for line in read_lines("/etc/group")) if len(fields) >= 4
              and name in fields[3].split(",")]  # fmt: skip
    return user, group, home, [int(number) for number in others if number.isdigit()][:32]


def read_lines(path: str) -> list[str]:
    """The lines of a small text file; none if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        return os.read(fd, SMALL_FILE).decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    finally:
        os.close(fd)


def session_of(pid: int) -> int:
    """The session that a process belongs to; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def signal_session(session: int, number: int) -> None:
    """Send a signal to every process of a session; a killing one until none is left, as far as that ends.

    The first of them is meant even if it has not made its session yet.
    """
    for _ in range(KILL_ROUNDS if number == signal.SIGKILL else 1):
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"
                 and (int(name) == session or session_of(int(name)) == session)]  # fmt: skip
        alive = [pid for pid in found if not is_zombie(pid)]
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if not alive:
            return


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(512).rpartition(b")")[2].split()[:1] in ([b"Z"], [b"X"])
    except OSError:
        return True


class Start:
    """What the host asked to run."""

    __slots__ = ("argv", "cwd", "env", "found", "max_output", "open_input", "stdin", "timeout", "user", "window")

    def __init__(self, numbers: tuple[int, ...], strings: tuple[bytes, ...]) -> None:
        self.timeout, self.max_output, self.window, self.open_input, argc = numbers
        self.cwd, self.stdin = strings[0], strings[2]
        self.user = strings[1].decode()
        self.argv = strings[3 : 3 + argc]
        self.env = dict(item.partition(b"=")[::2] for item in strings[3 + argc :])
        self.found: User | None = None


def spawn(start: Start, step: int, joins: list[int], processes: int) -> tuple[int, int, int, int]:
    """Run, through the `step` where that goes, else by a fork; the process, and our ends of its input, output and error."""
    with contextlib.suppress(KeyError):
        start.found = find_user(start.user)
    ends: list[int] = []
    try:
        for _ in range(3):
            ends.extend(os.pipe())
        pid = launched(start, step, (ends[0], ends[3], ends[5]), joins, processes)
        fresh = 0 if pid else os.fork()
    except OSError:
        for fd in ends:
            os.close(fd)
        raise
    if pid == 0 and fresh == 0:
        try:
            become_program(start, (ends[0], ends[3], ends[5]), joins, processes)
        finally:
            os._exit(127)
    for fd in (ends[0], ends[3], ends[5]):
        os.close(fd)
    for fd in (ends[1], ends[2], ends[4]):
        os.set_blocking(fd, False)
    return pid or fresh, ends[1], ends[2], ends[4]


def launched(start: Start, step: int, pipes: tuple[int, int, int], joins: list[int], processes: int) -> int:
    """The process of a program of root's that the step becomes; 0 for what a fork must do, which also says what is wrong."""
    if start.found is None or start.found[:2] != (0, 0):
        return 0
    home = start.found[2].encode()
    env = {b"HOME": home, b"USER": start.user.encode(), **start.env}
    return launch.start(step, start.argv, env, start.cwd or home, pipes, joins, processes)


def become_program(start: Start, pipes: tuple[int, int, int], joins: list[int], processes: int) -> None:
    """In the child: everything between fork and exec. What goes wrong is said on standard error, as a shell does, with code 126 or 127."""
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for fd, pipe in enumerate(pipes):
            os.dup2(pipe, fd)
        os.setsid()
        for fd in joins:
            os.write(fd, b"0")
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        env = start.env
        user, group, home, others = start.found or find_user(start.user)
        if (user, group) != (0, 0):
            os.setgroups(others)
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
        env.setdefault(b"HOME", home.encode())
        env.setdefault(b"USER", start.user.encode())
        os.chdir(start.cwd or home.encode())
        calls.raw("close_range", 3, MAX_FILES, 0)  # nothing of the agent's is inherited in any case; this is the second lock
        code = run(start.argv, env)
    except KeyError as error:
        os.write(2, f"gnomon: {error.args[0]}\n".encode())
    except OSError as error:
        where = error.filename.decode("utf-8", "replace") if isinstance(error.filename, bytes) else error.filename or ""
        os.write(2, f"gnomon: {where}: {error.strerror}\n".encode())
    os._exit(code)


def run(argv: tuple[bytes, ...], env: dict[bytes, bytes]) -> int:
    """execve along PATH; returns the code to end with when nothing could be run."""
    name = argv[0]
    folders = [b""] if b"/" in name else env.get(b"PATH", b"/usr/bin:/bin").split(b":")
    refused = errno.ENOENT
    for folder in folders:
        try:
            os.execve(os.path.join(folder, name) if folder else name, list(argv), env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = error.errno or refused
    os.write(2, b"gnomon: %s: %s\n" % (name[:500], os.strerror(refused).encode()))
    return 127 if refused == errno.ENOENT else 126


def feed(program: Program) -> list[tuple[int, int]]:
    """Write what is waiting to the program's input; (call, error) of each write that is done."""
    done: list[tuple[int, int]] = []
    while program.pending:
        call, data = program.pending[0]
        try:
            written = os.write(program.input, data) if data else 0
        except BlockingIOError:
            return done
        except OSError as error:
            done.extend((waiting, error.errno or errno.EPIPE) for waiting, _ in program.pending)
            program.pending = []
            return done
        if written < len(data):
            program.pending[0] = (call, data[written:])
        else:
            program.pending.pop(0)
            done.append((call, 0))
    return done


def take(program: Program, fd: int) -> list[bytes] | None:
    """The frames for what a pipe has now; None at its end."""
    stream = program.pipes[fd]
    try:
        data = os.read(fd, max(1, min(wire.CHUNK, program.credit)))
    except BlockingIOError:
        return []
    except OSError:
        data = b""
    if not data:
        return None
    kept = data[: program.remaining[stream]]
    program.remaining[stream] -= len(kept)
    program.truncated |= len(kept) < len(data)
    program.credit -= len(kept)
    return [wire.pack(wire.OUTPUT, program.call, (stream,), (kept,))] if kept else []


def ended(program: Program) -> bytes:
    """The frame that tells of a program's end."""
    status = program.status if program.status is not None else -9
    return wire.pack(wire.EXIT, program.call, (status, int(program.timed_out), int(program.truncated)))


def due(program: Program) -> float:
    """When the program needs attention though nothing happens; infinity if never."""
    moments = [moment for moment in (program.deadline, program.linger) if moment]
    return min(moments) if moments else float("inf")


def now() -> float:
    """Seconds on a clock that only goes forward."""
    return time.monotonic()
