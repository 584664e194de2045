"""Programs started without a copy of the agent, which costs more than all the rest: by a step of a few hundred bytes in between.

The agent starts the step with `posix_spawn`, which copies no memory. The step has memory of its own, so that whatever happens once it is
in the sandbox's control groups (they are full, frozen, or out of processor time) happens to it and not to the agent: it joins the groups,
sets the limit on processes, closes every descriptor but three, goes to its folder and becomes the program. Nobody may read its file, so
nobody in the sandbox may trace it before it is in its groups. What it does not cover (other processors, other users, what is not found)
is started by a fork, see `programs.py`.
"""

from __future__ import annotations

import os
import signal
import stat
import struct

from gnomon.sandbox.ns import calls

CODE = bytes.fromhex(
    "4989e5 498b5d08 440fb633 4c8d25fa000000"  # r13: the arguments; r14: how many groups, one too many; r12: where the "0" is
    "41ffce 7423 48ffc3 0fb63b ffcf"  # for each: the byte that follows, less one, is a descriptor
    "4c89e6 ba01000000 b801000000 0f05 4883f801 0f85cc000000 ebd8"  # write(it, "0", 1), which must write one byte
    "498b5d10 31c0 0fb60b 85c9 740e 486bc00a 488d4408d0 48ffc3 ebeb"  # argument 1 as a decimal number
    "50 50 31ff be06000000 4889e2 4531d2 b82e010000 0f05 4885c0 0f8890000000"  # prlimit64(0, RLIMIT_NPROC, {it, it}, 0)
    "bf03000000 beffffffff 31d2 b8b4010000 0f05 4885c0 7878"  # close_range(3, all, 0)
    "498b7d18 b850000000 0f05 4885c0 7868"  # chdir(argument 2)
    "498b7d20 498d7548 498b4500 498d54c510 b83b000000 0f05"  # execve(argument 3, the arguments from 8 on, the environment)
    "f7d8 41be7f000000 498b7528 83f802 7419"  # it failed: ENOENT is code 127 and argument 4,
    "41ffce 498b7530 83f80d 740d 498b7538 83f808 7404 498b7540"  # else code 126: EACCES argument 5, ENOEXEC argument 6, others 7
    "48c7c2ffffffff 48ffc2 803c1600 75f7 bf02000000 b801000000 0f05"  # write(2, it, its length)
    "4489f7 b8e7000000 0f05 41be7e000000 ebee 30"  # exit_group(code); where all failures before end: code 126; the "0"
)
"""For x86-64. Arguments: descriptors of groups, number of processes, folder, path, four messages, then those of the program."""

BASE, HEADERS = 0x400000, 64 + 56
MESSAGES = (2, 13, 8, 7)
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def image() -> bytes:
    """The step as a program file (ELF, one readable and executable segment)."""
    size = HEADERS + len(CODE)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, BASE + HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 1, 5, 0, BASE, BASE, size, size, 0x1000) + CODE


def prepare() -> int:
    """A descriptor of the step, for all sandboxes of this zygote; -1 where programs are started by a fork."""
    if calls.MACHINE != "x86_64":
        return -1
    try:
        written = os.memfd_create("gnomon-step")
        try:
            os.write(written, image())
            os.fchmod(written, 0o111)
            return os.open(f"/proc/self/fd/{written}", os.O_PATH | os.O_CLOEXEC)  # what is open for writing cannot be run
        finally:
            os.close(written)
    except OSError:
        return -1


def find(name: bytes, env: dict[bytes, bytes]) -> bytes | None:
    """The first file of this name along PATH that root may run, if there is one without looking closer."""
    for folder in [b""] if b"/" in name else env.get(b"PATH", b"/usr/bin:/bin").split(b":"):
        path = os.path.join(folder, name) if folder else name
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(mode) and mode & 0o111:
            return path
    return None


def start(step: int, argv: tuple[bytes, ...], env: dict[bytes, bytes], cwd: bytes, pipes: tuple[int, int, int], joins: list[int],
          processes: int) -> int:  # fmt: skip
    """Start a program as the sandbox's root; its process, or 0 where that wants a fork."""
    path = find(argv[0], env) if step >= 0 else None
    if path is None or not os.path.isdir(cwd) or not path.startswith(b"/") or max(joins, default=0) > 253:
        return 0
    messages = [b"gnomon: %s: %s\n" % (argv[0][:500], os.strerror(number).encode()) for number in MESSAGES]
    words = [bytes([len(joins) + 1, *(fd + 1 for fd in joins)]), b"%d" % processes, cwd, path, *messages, *argv]
    try:
        return os.posix_spawn(f"/proc/self/fd/{step}", words, env, setsid=True, setsigdef=IGNORED,
                              file_actions=[(os.POSIX_SPAWN_DUP2, pipe, fd) for fd, pipe in enumerate(pipes)])  # fmt: skip
    except OSError:
        return 0
