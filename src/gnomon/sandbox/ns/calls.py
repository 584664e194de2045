"""System calls that Python has no names for, by ctypes. Each raises `OSError` with the call's name; numbers are in `syscalls.py`."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterable, Iterator
from fcntl import ioctl
from socket import AF_INET, SOCK_DGRAM, socket

from gnomon.sandbox.ns import syscalls

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
MACHINE = os.uname().machine
NUMBERS = syscalls.numbers(MACHINE)

NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
CLONE_VM = 0x100
ANY_CHILD = 0x40000000
"""For `waitpid`: also a child whose end sends no signal."""

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
OPEN_TREE_CLONE, EMPTY_PATH, RECURSIVE, CLOEXEC = 1, 0x1000, 0x8000, os.O_CLOEXEC
MOVE_FROM_EMPTY, MOVE_TO_EMPTY = 0x4, 0x40
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 1, 2, 4, 0x00100000
NO_MAGIC_LINKS = 2
PR_PDEATHSIG, PR_DUMPABLE, PR_NAME, PR_SECCOMP, PR_CAPBSET_DROP, PR_SECUREBITS, PR_SUBREAPER, PR_NO_NEW_PRIVS = 1, 4, 15, 22, 24, 28, 36, 38
NO_SETUID_FIXUP = 1 << 2


def check(result: int, name: str, subject: object = "") -> int:
    """The result, or the error that the C library kept."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}", str(subject))
    return result


def raw(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """A system call by name; whole numbers are passed as the kernel's long."""
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check(LIBC.syscall(ctypes.c_long(NUMBERS[name]), *values), name)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    check(LIBC.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that a descriptor stands for."""
    check(LIBC.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2); empty strings are passed as nothing."""
    text = [part.encode() if part else None for part in (source, target, kind)]
    if LIBC.mount(*text, flags, data.encode() if data else None) < 0:
        check(-1, f"mount {kind} {data}", target)


def bind_over(source: bytes, targets: Iterable[bytes]) -> list[bytes]:
    """Mount one file or folder over many; those that there were. One that is not there is passed over, which is cheaper than to look."""
    there = []
    for target in targets:
        if LIBC.mount(source or target, target, None, BIND | REC, None) == 0:
            there.append(target)
        elif ctypes.get_errno() != errno.ENOENT:
            check(-1, "mount", os.fsdecode(target))
    return there


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    check(LIBC.umount2(target.encode(), ctypes.c_int(flags)), "umount", target)


def pivot_here() -> None:
    """Make the working directory the root, and let the old root go."""
    raw("pivot_root", b".", b".")
    umount(".", DETACH)
    os.chdir("/")


def open_tree(path: str, recursive: bool = False, at: int = -100) -> int:
    """A detached copy of a mount, from a path on."""
    flags = OPEN_TREE_CLONE | CLOEXEC | (RECURSIVE if recursive else 0) | (0 if path else EMPTY_PATH)
    try:
        return raw("open_tree", at, path.encode(), flags)
    except OSError as error:
        raise OSError(error.errno, str(error.strerror), path) from None


def move_mount(fd: int, target: str) -> None:
    """Attach a detached mount."""
    try:
        raw("move_mount", fd, b"", -100, target.encode(), MOVE_FROM_EMPTY)
    except OSError as error:
        raise OSError(error.errno, str(error.strerror), target) from None


def mount_attributes(fd: int, attributes: int, users: int = 0, recursive: bool = False) -> None:
    """Set attributes of a detached mount: read-only, or the user namespace that its owners are translated by."""
    packed = ctypes.create_string_buffer(struct.pack("<QQQQ", attributes, 0, 0, users), 32)
    raw("mount_setattr", fd, b"", EMPTY_PATH | (RECURSIVE if recursive else 0), packed, 32)


def prctl(option: int, value: int = 0) -> int:
    """prctl(2) with one number."""
    zero = ctypes.c_ulong(0)
    return check(LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def close_others(kept: list[int]) -> None:
    """Close every descriptor but these."""
    start = 0
    for fd in [*kept, 1 << 30]:
        if fd > start:
            raw("close_range", start, fd - 1, 0)
        start = fd + 1


@functools.cache
def command_line() -> tuple[int, int]:
    """Where in memory the words that `ps` shows begin and end; forks have them in the same place."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[45]), int(fields[46])  # arg_start and arg_end


def name_process(name: str) -> None:
    """What `ps` shows of this process: its name, and its command line without the paths of the host."""
    LIBC.prctl(ctypes.c_int(PR_NAME), name.encode()[:15])
    first, last = command_line()
    if 0 < first < last:
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, name.encode(), min(len(name), last - first - 1))


def act_as(user: int) -> None:
    """The user and group that the file system sees."""
    LIBC.setfsgid(ctypes.c_uint(user))
    LIBC.setfsuid(ctypes.c_uint(user))


@functools.cache
def last_capability() -> int:
    """The highest capability that this kernel knows."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        return int(file.read())


def keep_capabilities(kept: frozenset[int]) -> None:
    """Drop every capability but these, from the bounding set too."""
    drop, zero = LIBC.prctl, ctypes.c_ulong(0)
    for capability in range(last_capability() + 1):
        if capability not in kept and drop(PR_CAPBSET_DROP, ctypes.c_ulong(capability), zero, zero, zero):
            check(-1, f"dropping capability {capability}")
    bits = sum(1 << capability for capability in kept)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("<IIIIII", low, low, 0, high, high, 0), 24)
    raw("capset", header, data)


def install_filter(code: bytes) -> None:
    """Put a seccomp filter on this process; it must have given up new privileges."""
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 16)
    check(LIBC.prctl(ctypes.c_int(PR_SECCOMP), ctypes.c_ulong(2), header), "seccomp")


_stack = ctypes.create_string_buffer(32768)


def user_namespace(first: int, count: int) -> int:
    """A descriptor of a new user namespace whose users 0… are the host's `first`….

    The namespace needs a process to be born; it shares this one's memory and sleeps in the C library until it is killed, which costs no
    copy.
    """
    top = (ctypes.addressof(_stack) + len(_stack)) & ~0xF
    LIBC.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    pid = check(LIBC.clone(ctypes.cast(LIBC.pause, ctypes.c_void_p), top, NEWUSER | CLONE_VM, None), "clone")
    try:
        for name in ("uid_map", "gid_map"):
            fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | CLOEXEC)
            try:
                os.write(fd, b"0 %d %d" % (first, count))
            finally:
                os.close(fd)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | CLOEXEC)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, ANY_CHILD)


def ended_children() -> Iterator[tuple[int, int]]:
    """Every child that has ended and that nobody took note of: its pid and its exit code, negative for a signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def open_inside(path: bytes, flags: int, mode: int = 0) -> int:
    """openat2(2) that follows links but not the magic ones of `/proc`, which lead to what a process holds open."""
    how = ctypes.create_string_buffer(struct.pack("<QQQ", flags | CLOEXEC, mode if flags & os.O_CREAT else 0, NO_MAGIC_LINKS), 24)
    try:
        return raw("openat2", -100, path, how, 24)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), os.fsdecode(path)) from None


def loopback_up() -> None:
    """Bring up `lo` of the present network namespace."""
    with socket(AF_INET, SOCK_DGRAM) as any_socket:
        ioctl(any_socket.fileno(), 0x8914, struct.pack("<16sH14x", b"lo", 0x1 | 0x40))


def inotify() -> int:
    """A descriptor that reports changes of files."""
    return check(LIBC.inotify_init1(ctypes.c_int(os.O_NONBLOCK | CLOEXEC)), "inotify_init1")


def inotify_watch(fd: int, path: bytes, mask: int) -> int:
    """Watch a directory; the number that its events carry."""
    return check(LIBC.inotify_add_watch(ctypes.c_int(fd), path, ctypes.c_uint32(mask)), "inotify_add_watch", os.fsdecode(path))
