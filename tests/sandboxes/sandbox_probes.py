"""Attempts to break out of a sandbox, or to use up what it stands on; each says in words what became of it. Run it: one JSON object.

Every probe is a program that runs inside, in a sandbox of the default backend, or of the one that is named, with the limits below, and
prints one line. What line is right is in `test_sandbox_abuse.py`. This runs as root and as an ordinary user, and needs nothing but the
standard library and the package.
"""

import asyncio
import contextlib
import importlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from gnomon.errors import GnomonError, SandboxLost
from gnomon.sandbox.sandbox import Backend, Command, Limits, Result, Sandbox, Spec

LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, cpus=1.0, processes=64, inodes=4096, open_files=256)
NAME = sys.argv[1] if len(sys.argv) > 1 else "namespaces"
PATIENCE_SECONDS = {"namespaces": 20, "gvisor": 60}.get(NAME, 240)
SECRET = "launcher-secret-5e2f"
MARK = f"9876{os.getpid()}"
"""How long the programs sleep that must not outlive their sandbox: a number that only this process uses."""

PRELUDE = r"""
import ctypes, errno, fcntl, mmap, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def said(result):
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def call(number, *args):
    ctypes.set_errno(0)
    return said(libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]))
def attempt(function, *args):
    try:
        function(*args)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
def put(path, text, flags=os.O_WRONLY):
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
def child(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except MemoryError:
            os._exit(77)
        except OSError:
            os._exit(78)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

FORK_BOMB = r"""
pids, reason = [], ""
while len(pids) < 5000 and not reason:
    try:
        pid = os.fork()
    except OSError as error:
        reason = errno.errorcode[error.errno]
        break
    if pid == 0:
        time.sleep(30); os._exit(0)
    pids.append(pid)
print(reason, "few" if len(pids) <= 64 else len(pids), flush=True)
[os.kill(pid, 9) for pid in pids]
"""

MEMORY_BOMB = r"""
def eat():
    kept = []
    for _ in range(90):
        block = mmap.mmap(-1, 20 << 20, flags=mmap.{kind} | mmap.MAP_ANONYMOUS)
        for at in range(0, 20 << 20, 4096):
            block[at] = 1
        kept.append(block)
code = child(eat)
print("contained" if code in (-9, 77, 78) else f"ended with {{code}}")
"""

MANY_EATERS = r"""
pids = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        block = mmap.mmap(-1, 90 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, 90 << 20, 4096):
            block[at] = 1
        time.sleep(1.5)
        os._exit(0)
    pids.append(pid)
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print("contained" if ends.count(-9) >= 3 else ends)
"""

FILL = r"""
def fill(path, size):
    fd, total = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), 0
    block = b"x" * (1 << 20)
    try:
        while total < size:
            total += os.write(fd, block)
        return "ok", total
    except OSError as error:
        return errno.errorcode[error.errno], total
    finally:
        os.close(fd)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
results = []
for name in ("{place}/a", "{place}/b"):
    results.append(fill(name, 1500 << 20))
for name in ("{place}/a", "{place}/b"):
    os.unlink(name)
total = sum(size for _, size in results)
print("full" if all(why in ("ENOSPC", "EFBIG", "ENOMEM") for why, _ in results) and total <= 64 << 20 else results)
"""

INODES = r"""
os.mkdir("/tmp/many")
count = 0
try:
    while count < 30000:
        os.close(os.open(f"/tmp/many/{count}", os.O_CREAT | os.O_WRONLY)); count += 1
    why = "ok"
except OSError as error:
    why = errno.errorcode[error.errno]
import shutil; shutil.rmtree("/tmp/many")
print(why, "few" if count <= 4096 else count)
"""

DESCRIPTORS = r"""
fds, why = [], ""
try:
    while len(fds) < 5000:
        fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    why = errno.errorcode[error.errno]
    count = len(fds)
os.close(fds.pop()); os.close(fds.pop())
import resource
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); raised = "ok"
except (ValueError, OSError) as error:
    raised = "refused"
print(why, "few" if count <= 256 else count, raised)
"""

PIPES = r"""
pipes, why, grown = [], "", set()
try:
    while len(pipes) < 5000:
        ends = os.pipe(); pipes.append(ends)
        grown.add(attempt(fcntl.fcntl, ends[0], 1031, 1 << 22))
except OSError as error:
    why = errno.errorcode[error.errno]
print(why, "few" if len(pipes) <= 128 else len(pipes), "EPERM" in grown)
"""

KERNEL = r"""
import platform
NUMBERS = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "acct": 163, "settimeofday": 164, "adjtimex": 159, "modify_ldt": 154, "_sysctl": 156, "kexec_load": 246, "add_key": 248,
    "request_key": 249, "keyctl": 250, "migrate_pages": 256, "vmsplice": 278, "move_pages": 279, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_settime": 227, "clock_adjtime": 305, "kcmp": 312,
    "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "statmount": 457, "listmount": 458,
    "syslog": 103, "vhangup": 153, "personality": 135,
}
if platform.machine() != "x86_64":
    NUMBERS = {name: number for name, number in NUMBERS.items() if number >= 424}
bad = {}
for name, number in NUMBERS.items():
    answer = call(number, 0x10000000 if name == "unshare" else 0x1234 if name == "personality" else 0, 0, 0, 0, 0)
    if answer != "EPERM":
        bad[name] = answer
print(bad or "all refused")
"""

NEWER = r"""
print(call(435, 0, 0), call(999), call(0x40000000 + 39) if os.uname().machine == "x86_64" else "ENOSYS")
"""

CLONE = r"""
number = 56 if os.uname().machine == "x86_64" else 220
print(*[call(number, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000)])
"""

SOCKETS = r"""
def family(*args):
    return attempt(lambda: socket.socket(*args).close())
print("vsock", family(40, socket.SOCK_STREAM), "packet", family(17, socket.SOCK_RAW), "alg", family(38, socket.SOCK_SEQPACKET),
      "raw", family(socket.AF_INET, socket.SOCK_RAW, 1), "netfilter", family(16, socket.SOCK_RAW, 12),
      "bluetooth", family(31, socket.SOCK_RAW, 1), "xdp", family(44, socket.SOCK_RAW), "inet", family(2, 1), "unix", family(1, 1))
"""

NETWORK = r"""
import json
port, name = json.loads(sys.argv[1])
def reach(kind, address):
    made = socket.socket(kind, socket.SOCK_STREAM); made.settimeout(2)
    return attempt(made.connect, address)
print(reach(socket.AF_INET, ("127.0.0.1", port)), reach(socket.AF_UNIX, "\0" + name), reach(socket.AF_INET, ("169.254.169.254", 80)),
      reach(socket.AF_INET, ("8.8.8.8", 53)), reach(socket.AF_INET6, ("::1", port)))
"""

HOST_FILES = r"""
import json
secret, folder = json.loads(sys.argv[1])
found = []
fixed = ("", "/proc/1/root", "/proc/self/root", "/proc/1/cwd", "/proc/self/cwd", "/../../..")
for start in (*fixed, *(f"/proc/{p}/root" for p in range(1, 40))):
    if os.path.exists(start + secret):
        found.append(start)
for path in (folder, "/var/lib/dpkg", "/root/.ssh", "/sys/kernel", "/dev/vda", "/dev/sda", "/dev/kmsg", "/dev/mem", "/dev/kvm"):
    if os.path.exists(path):
        found.append(path)
print(found or "nothing")
"""

CHROOT = r"""
os.mkdir("/tmp/jail")
top = os.open("/", os.O_RDONLY)
os.chroot("/tmp/jail")
os.fchdir(top)
for _ in range(100):
    os.chdir("..")
os.chroot(".")
print("sandbox" if "user:x:1000:1000" in open("/etc/passwd").read() and os.path.isdir("/tmp/jail") else "outside")
"""

DEVICES = r"""
results = [attempt(os.mknod, f"/tmp/{kind}-{major}", kind | 0o666, os.makedev(major, minor)) for kind, major, minor in
           ((0o060000, 254, 0), (0o060000, 8, 0), (0o020000, 1, 1), (0o020000, 10, 232))]
print(*results, attempt(put, "/dev/file", b"x", os.O_CREAT | os.O_WRONLY), attempt(os.open, "/dev/mem", os.O_RDWR))
"""

AGENT = r"""
space = ctypes.create_string_buffer(64)
pair = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(space), 64), 16)
vector = ctypes.addressof(pair)
results = {
    "ptrace": said(libc.ptrace(16, 1, 0, 0)),
    "vm_readv": call(310 if os.uname().machine == "x86_64" else 270, 1, vector, 1, vector, 1, 0),
    "prlimit": call(302 if os.uname().machine == "x86_64" else 261, 1, 7, 0, 0),
}
for name in ("environ", "maps", "auxv", "stack", "syscall"):
    results[name] = attempt(lambda: open(f"/proc/1/{name}", "rb").read())
results["mem"] = attempt(os.open, "/proc/1/mem", os.O_RDWR)
results["fd"] = attempt(os.listdir, "/proc/1/fd")
results["root"] = attempt(os.listdir, "/proc/1/root/")
results["exe"] = attempt(os.readlink, "/proc/1/exe")
results["ns"] = attempt(os.open, "/proc/1/ns/user", os.O_RDONLY)
results["oom"] = attempt(put, "/proc/1/oom_score_adj", b"1000")
results["uid_map"] = attempt(put, "/proc/self/uid_map", b"0 0 1")
bad = {name: why for name, why in results.items() if why not in ("EPERM", "EACCES", "EROFS")}
print(bad or "closed", open("/proc/1/cmdline", "rb").read().split(b"\0")[0].decode())
"""

SIGNALS = r"""
for number in (9, 19, 15, 11, 6, 17, 1, 2):
    os.kill(1, number)
time.sleep(0.1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
state = open("/proc/1/stat").read().rpartition(")")[2].split()[0]
print("alive" if state in "SR" else state, attempt(os.kill, 1, 0))
"""

PROC = r"""
targets = {"/proc/sys/kernel/core_pattern": b"|/tmp/x", "/proc/sys/vm/drop_caches": b"1", "/proc/sysrq-trigger": b"",
           "/proc/sys/kernel/hostname": b"h",
           "/proc/sys/net/ipv4/ip_forward": b"1", "/proc/irq/default_smp_affinity": b"1", "/proc/self/oom_score_adj": b"-1000",
           "/proc/sys/kernel/modprobe": b"/tmp/x", "/proc/acpi/x": b"1", "/sys/fs/cgroup/x": b"1"}
bad = {path: why for path, text in targets.items() if (why := attempt(put, path, text)) not in ("EROFS", "EACCES", "EPERM", "ENOENT")
       and not (path == "/proc/sysrq-trigger" and os.major(os.stat(path).st_rdev) == 1)}
read = {}
for name in ("kcore", "keys", "timer_list", "config.gz", "cmdline", "kallsyms", "kmsg", "kpageflags", "sched_debug", "vmallocinfo"):
    try:
        data = os.read(os.open(f"/proc/{name}", os.O_RDONLY | os.O_NONBLOCK), 100)
    except OSError:
        data = b""
    if data:
        read[name] = data[:20]
print(bad or "closed", read or "empty")
"""

LEAKS = r"""
import json, glob
secret, folder = json.loads(sys.argv[1])
leaks = []
for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline"), "/proc/self/mountinfo", "/proc/self/mounts"]:
    if path.startswith((f"/proc/{os.getpid()}/cmdline", f"/proc/{os.getppid()}/cmdline")):
        continue
    try:
        text = open(path, "rb").read().decode("utf-8", "replace")
    except OSError:
        continue
    if secret in text or folder in text or "gnomon/sandbox" in text or ("/src" in text and "mount" in path):
        leaks.append(path)
fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
for name in os.environ:
    if secret in os.environ[name]:
        leaks.append(name)
print(leaks or "none", "fds", fds[:-1])
"""

SETUID = r"""
import shutil
shutil.copy("/usr/bin/id", "/tmp/id"); os.chmod("/tmp/id", 0o4755)
status = open("/proc/self/status").read()
nnp = "NoNewPrivs:\t1" in status
caps = int(status.split("CapBnd:\t")[1].split()[0], 16)
dangerous = [bit for bit in (2, 8, 12, 13, 16, 17, 19, 21, 22, 24, 25, 27, 33, 34, 38, 39, 40) if caps >> bit & 1]
print(nnp, dangerous or "none", os.statvfs("/tmp").f_flag & 2 != 0)
"""

TERMINAL = r"""
import pty, termios
a, b = pty.openpty()
print(attempt(fcntl.ioctl, b, 0x5412, b"x"), attempt(fcntl.ioctl, b, 0x541C, b"\x03"), attempt(fcntl.ioctl, b, 0x541E, b"\0" * 4))
"""

SYSTEM_V = r"""
if os.uname().machine != "x86_64":
    print("ok"); sys.exit()
libc.shmget.restype = ctypes.c_int
ctypes.set_errno(0)
key = libc.shmget(0, ctypes.c_size_t(400 << 20), 0o1600)
if key < 0:
    print(errno.errorcode[ctypes.get_errno()]); sys.exit()
def eat():
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(key, None, 0)
    for at in range(0, 400 << 20, 4096):
        ctypes.memset(address + at, 1, 1)
code = child(eat)
libc.shmctl(key, 0, None)
print("contained" if code == -9 else f"ended with {code}")
"""

PRIORITY = r"""
def real_time():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
print(attempt(real_time), attempt(os.setpriority, os.PRIO_PROCESS, 0, -20),
      call(251 if os.uname().machine == "x86_64" else 30, 1, 0, 1 << 13))
"""

OVERLAY = r"""
os.makedirs("/etc/extra", exist_ok=True)
names = ("trusted.overlay.opaque", "trusted.overlay.redirect", "user.overlay.opaque", "user.overlay.redirect")
results = [attempt(os.setxattr, "/etc/ssl", name, b"y" if name.endswith("opaque") else b"/../../..") for name in names]
print(*results[:2], "y" if os.path.isdir("/etc/ssl/certs") else "hidden")
"""

INOTIFY = r"""
fds, why = [], ""
while len(fds) < 5000 and not why:
    fd = libc.inotify_init1(0)
    if fd < 0:
        why = errno.errorcode[ctypes.get_errno()]
    else:
        fds.append(fd)
print(why, "few" if len(fds) <= 256 else len(fds))
"""

FLIGHT = r"""
import array
a, b = socket.socketpair()
sent = 0
try:
    while sent < 5000:
        x, y = socket.socketpair()
        x.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno(), b.fileno()]))])
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [x.fileno(), y.fileno()]))], socket.MSG_DONTWAIT)
        x.close(); y.close()
        sent += 1
    why = "ok"
except OSError as error:
    why = "bounded"
print(why)
"""

LOCKED = r"""
block = mmap.mmap(-1, 200 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(block))
print(said(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(200 << 20))))
"""

STOP_ALL = r"""
pid = os.fork()
if pid == 0:
    os.setsid(); os.kill(-1, signal.SIGSTOP); os._exit(0)
time.sleep(5)
print("went on")
"""

CORE = r"""
os.chdir("/tmp")
def crash():
    os.abort()
code = child(crash)
print(code, [name for name in os.listdir("/tmp") if "core" in name] or "no core")
"""

PROBES: dict[str, str] = {
    "fork bomb": FORK_BOMB, "memory bomb": MEMORY_BOMB.format(kind="MAP_PRIVATE"),
    "shared memory bomb": MEMORY_BOMB.format(kind="MAP_SHARED"),
    "six eaters": MANY_EATERS, "disk fill": FILL.format(place="/tmp"), "shm fill": FILL.format(place="/dev/shm"), "inodes": INODES,
    "descriptors": DESCRIPTORS, "pipes": PIPES, "kernel surface": KERNEL, "newer calls": NEWER, "clone": CLONE, "sockets": SOCKETS,
    "chroot": CHROOT, "devices": DEVICES, "agent": AGENT, "signals": SIGNALS, "proc": PROC, "set-user programs": SETUID,
    "terminal": TERMINAL,
    "system v": SYSTEM_V, "priority": PRIORITY, "overlay attributes": OVERLAY, "inotify": INOTIFY, "descriptors in flight": FLIGHT,
    "locked memory": LOCKED, "core dump": CORE,
}  # fmt: skip


NOT_THERE = ("fork bomb", "inodes", "clone")
"""What gVisor does not refuse: its memory bounds processes and files, its namespaces are its own kernel's, and trying it takes minutes."""


def program(script: str, *arguments: str) -> Command:
    """A probe as a command."""
    return Command(argv=("python3", "-c", PRELUDE + script, *arguments), timeout_seconds=PATIENCE_SECONDS)


def told(result: Result) -> str:
    """What a probe said, or how it failed."""
    last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return result.text.strip() or f"code {result.code}, timed out {result.timed_out}: {' '.join(last)}"


async def on_the_host(box: Sandbox, told_of: dict[str, str]) -> None:
    """Probes that need something on the host to aim at."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener, socket.socket(socket.AF_UNIX) as named:
        secret = Path(folder) / "secret"
        secret.write_text("x")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        name = f"gnomon-probe-{os.getpid()}"
        named.bind("\0" + name)
        named.listen()
        told_of["host files"] = told(await box.exec(program(HOST_FILES, json.dumps([str(secret), folder]))))
        told_of["network"] = told(await box.exec(program(NETWORK, json.dumps([listener.getsockname()[1], name]))))
        told_of["leaks"] = told(await box.exec(program(LEAKS, json.dumps([SECRET, str(Path(__file__).parent)]))))


async def over_time(box: Sandbox, told_of: dict[str, str]) -> None:
    """Programs that will not end, will not be quiet, or leave things behind."""
    began = time.monotonic()
    stubborn = f"trap '' TERM INT HUP QUIT USR1 USR2; (trap '' TERM; setsid sleep {MARK} &) ; while :; do kill -STOP $$ ; done"
    result = await box.exec(Command(argv=("sh", "-c", stubborn), timeout_seconds=0.5))
    told_of["time bomb"] = f"{result.timed_out} {result.code} {'soon' if time.monotonic() - began < 15 else 'late'}"
    result = await box.exec(Command(argv=("yes",), timeout_seconds=0.5, max_output_bytes=1 << 20))
    told_of["endless output"] = f"{result.timed_out} {result.truncated} {len(result.stdout) == 1 << 20}"
    daemons = f"for i in 1 2 3 4 5 6 7 8 9 10; do (trap '' TERM; setsid sleep {MARK} &) ; done; (for i in 1 2 3; do true & done); echo left"
    told_of["daemons"] = told(await box.exec(Command(argv=("sh", "-c", daemons), timeout_seconds=PATIENCE_SECONDS)))
    await asyncio.sleep(0.3)
    zombies = "cat /proc/[0-9]*/stat | awk '$3 == \"Z\"' | wc -l"
    told_of["zombies"] = told(await box.exec(Command(argv=("sh", "-c", zombies))))
    await box.exec(Command(argv=("python3", "-c", PRELUDE + STOP_ALL), timeout_seconds=0.5))
    told_of["stop everything"] = told(await box.exec(Command(argv=("echo", "still here"))))
    try:
        await box.exec(Command(argv=("echo", "x" * (3 << 20))))
        told_of["large argument"] = "ran"
    except GnomonError as error:
        told_of["large argument"] = type(error).__name__
    result = await box.exec(Command(argv=("echo", *["x" * 100_000] * 9)))
    told_of["large arguments"] = f"{result.code} {len(result.stdout)}"
    result = await box.exec(Command(argv=("printf", r"\033]0;owned\007\033[2J")))
    told_of["terminal escapes"] = repr(result.stdout)


async def processor(box: Sandbox, told_of: dict[str, str]) -> None:
    """Six busy programs for a while: how much of a second each second they got."""
    before, began = await box.usage(), time.monotonic()
    await box.exec(Command(argv=("sh", "-c", "for i in 1 2 3 4 5 6; do (while :; do :; done) & done; wait"), timeout_seconds=0.8))
    after, ended = await box.usage(), time.monotonic()
    told_of["processor"] = "within 1.3" if (after.cpu_seconds - before.cpu_seconds) / (ended - began) < 1.3 else "more"


def left_over() -> int:
    """Processes of the machine that a probe has started and that live."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                count += MARK.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
    return count


async def everything() -> dict[str, str]:
    """All probes, in two sandboxes so that exhausting one does not spare the others."""
    told_of: dict[str, str] = {}
    backend: Backend = importlib.import_module(f"gnomon.sandbox.backends.{NAME}").Backend()
    try:
        spec = Spec(limits=LIMITS)
        box, other = await backend.create(spec), await backend.create(spec)
        for name, script in PROBES.items():
            if NAME == "gvisor" and name in NOT_THERE:
                told_of[name] = "not held"
                continue
            try:
                told_of[name] = told(await box.exec(program(script)))
                await box.exec(Command(argv=("true",), timeout_seconds=PATIENCE_SECONDS))
            except SandboxLost:
                told_of[name] = "its sandbox ended"
                box = await backend.create(spec)
        await on_the_host(other, told_of)
        await processor(other, told_of)
        await over_time(other, told_of)
        told_of["after all"] = told(await box.exec(Command(argv=("echo", "works"))))
        await other.write("/dev/shm/mark", b"x")
        places = Command(argv=("sh", "-c", "ls /dev/shm | wc -l; ls /proc/acpi 2>/dev/null | wc -l"))
        told_of["shared memory of another"] = told(await box.exec(places))
        told_of["running before the end"] = "some" if left_over() else "none"
        told_of["unenforced"] = " ".join(sorted((await backend.probe()).unenforced)) or "nothing"
    finally:
        await backend.close()
    told_of["running after the end"] = str(left_over())
    return told_of


if __name__ == "__main__":
    os.environ["SECRET_TOKEN"] = SECRET
    json.dump(asyncio.run(everything()), sys.stdout)
