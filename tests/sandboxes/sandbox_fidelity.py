"""What an agent may do inside a sandbox: a small program for each row of the table in `docs/sandbox.md`. Run: name of a backend → JSON."""

import asyncio
import importlib
import json
import sys

from gnomon.errors import SandboxError
from gnomon.sandbox.sandbox import Command, Limits, Spec

PATIENCE_SECONDS = 240.0
"""Nothing here waits for anything; a translated guest on a busy machine is slow."""

LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)
MOUNT = "import ctypes; l = ctypes.CDLL(None); raise SystemExit(l.mount(b'none', b'/mnt', b'tmpfs', 0, None) != 0)"
CONTAINER = "import ctypes; l = ctypes.CDLL(None); raise SystemExit(l.unshare(0x10000000) != 0)"
TRACE = """import ctypes, os
l = ctypes.CDLL(None)
pid = os.fork()
if pid == 0:
    l.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19); os._exit(0)
_, status = os.waitpid(pid, 0)
ok = os.WIFSTOPPED(status) and l.ptrace(7, pid, 0, 0) == 0
os.waitpid(pid, 0)
raise SystemExit(not ok)"""
SERVER = """import socket, threading
s = socket.socket(); s.bind(("127.0.0.1", 80)); s.listen()
c = socket.create_connection(("127.0.0.1", 80), 5); a, _ = s.accept(); a.send(b"x")
raise SystemExit(c.recv(1) != b"x")"""
PACKAGE = """python3 -m venv --without-pip /tmp/v && echo 'WORD = "hi"' > $(echo /tmp/v/lib/python3*/site-packages)/greeting.py
/tmp/v/bin/python -c 'import greeting'"""

ROWS: dict[str, tuple[str, ...]] = {
    "run programs as root inside": ("sh", "-c", "test $(id -u) = 0"),
    "run programs as another user": ("sh", "-c", "true"),
    "change who owns a file": ("python3", "-c", "import os; open('/tmp/o', 'w'); os.chown('/tmp/o', 1000, 1000)"),
    "add to /usr (packages of the system)": ("sh", "-c", "echo > /usr/bin/added && test -f /usr/bin/added"),
    "make a Python environment": ("sh", "-c", PACKAGE),
    "serve on any port, 80 included": ("python3", "-c", SERVER),
    "leave servers running between calls": ("sh", "-c", "(while sleep 0.2; do :; done) > /dev/null 2>&1 & echo $! > /tmp/server"),
    "trace programs (gdb, strace)": ("python3", "-c", TRACE),
    "use terminals": ("python3", "-c", "import pty; pty.openpty()"),
    "mount file systems": ("python3", "-c", MOUNT),
    "make namespaces (containers)": ("python3", "-c", CONTAINER),
    "run a virtual machine on KVM": ("sh", "-c", "test -c /dev/kvm && exec 3<> /dev/kvm"),
    "open /dev/fuse": ("sh", "-c", "test -c /dev/fuse && exec 3<> /dev/fuse"),
    "send raw packets (ping)": ("python3", "-c", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    "set the host name": ("python3", "-c", "import socket; socket.sethostname('other')"),
}


async def answers(name: str) -> dict[str, str]:
    """Row → `yes` or `no`."""
    backend = importlib.import_module(f"gnomon.sandbox.backends.{name}").Backend()
    try:
        async with await backend.create(Spec(limits=LIMITS)) as box:
            found = {}
            for row, argv in ROWS.items():
                user = "user" if "another user" in row else None
                try:
                    result = await box.exec(Command(argv=argv, timeout_seconds=PATIENCE_SECONDS, user=user))
                    found[row] = "yes" if result.code == 0 else "no"
                except SandboxError:  # a refusal by the backend
                    found[row] = "no"
            alive = await box.exec(Command(argv=("sh", "-c", "kill -0 $(cat /tmp/server)")))
            found["leave servers running between calls"] = "yes" if alive.code == 0 else "no"
        return found
    finally:
        await backend.close()


if __name__ == "__main__":
    json.dump(asyncio.run(answers(sys.argv[1])), sys.stdout)
