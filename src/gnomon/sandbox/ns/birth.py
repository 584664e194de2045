"""From a fork of the zygote to the first process of a sandbox: namespaces, root, users, limits, and last the system-call filter.

The order is the point. All that needs power over the machine comes first; the user namespace comes after it, so that the sandbox's root has
no power over the mounts, the network and the process list it lives in; then capabilities go, and the filter makes it final.
"""

from __future__ import annotations

import os
import resource

from gnomon.sandbox.ns import calls, cgroups, mounts, seccomp

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap is not among them, net_bind_service, sys_chroot, setfcap
KEPT = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
OOM_SCORE = "300"
SPARE_PROCESSES = 8
"""How many processes the agent may have beyond the limit of the programs, so that it can always answer."""


class Order:
    """What a sandbox is made of: layers top first, limits, the user it starts from."""

    __slots__ = ("cpus_percent", "disk", "host", "hostname", "inodes", "layers", "memory", "name", "open_files", "processes", "upper",
                 "workdir")  # fmt: skip

    def __init__(self, numbers: tuple[int, ...], strings: tuple[bytes, ...]) -> None:
        self.memory, self.disk, self.cpus_percent, self.processes, self.inodes, self.open_files, host = numbers
        self.host = bool(host)
        self.name, self.hostname, self.workdir = (text.decode() for text in strings[:3])
        self.layers = [text.decode() for text in strings[3:]]
        self.upper = ""


class Place:
    """What the zygote knows about this machine and hands to every sandbox."""

    __slots__ = ("base", "filter", "rootless", "step", "workshop")

    def __init__(self, base: int, rootless: bool, workshop: str, code: bytes, step: int) -> None:
        self.base, self.rootless, self.workshop, self.filter, self.step = base, rootless, workshop, code, step


def limit(order: Order, counted: bool) -> None:
    """Limits that hold per process, and on the number of processes; memory too where no group counts it."""
    spare = order.processes + SPARE_PROCESSES
    values = {resource.RLIMIT_NOFILE: order.open_files, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: order.disk,
              resource.RLIMIT_NPROC: spare}  # fmt: skip
    if not counted:
        values[resource.RLIMIT_DATA] = order.memory
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def enter_users(users: int) -> None:
    """Enter the user namespace that was made for this sandbox, or make one in which only this user exists, as root."""
    if users > 0:
        calls.setns(users, calls.NEWUSER)
        os.setgroups([])
    else:
        user, group = os.geteuid(), os.getegid()
        calls.unshare(calls.NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            cgroups.write(f"/proc/self/{name}", text)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def make_workdir(path: str) -> None:
    """The directory that programs start in, if the image has none."""
    if path.startswith("/") and not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)


def prepare(place: Place, order: Order, users: int) -> mounts.Root:
    """In the zygote: take what the root is made of and enter a new copy of the base. `users`: a descriptor of its user namespace, or 0.

    Here and not in the fork, since what the zygote has done before costs the least: a fork copies each page that it touches first.
    """
    root = mounts.Root(users, ",userxattr" if place.rootless else "")
    try:
        root.take(order.upper, order.layers, order.host)
        calls.setns(place.base, calls.NEWNS)
        calls.unshare(calls.NEWNS)
    except BaseException:
        root.close()
        raise
    return root


def become(place: Place, order: Order, root: mounts.Root, owner: int, counted: bool) -> None:
    """Turn this process, which `prepare` has put into its mounts, into the first of a sandbox. `owner`: its root on the host."""
    calls.unshare(calls.NEWIPC | calls.NEWUTS | calls.NEWNET | calls.NEWCGROUP)
    calls.check(calls.LIBC.sethostname(order.hostname.encode(), len(order.hostname.encode())), "sethostname")
    calls.loopback_up()
    root.attach(owner)
    root.furnish()
    cgroups.write("/proc/self/oom_score_adj", OOM_SCORE)
    enter_users(root.users)
    limit(order, counted)  # in the new namespace: set before, the number of processes would bound all sandboxes of one user together
    calls.keep_capabilities(KEPT)
    os.umask(0o022)
    make_workdir(order.workdir)
    calls.prctl(calls.PR_DUMPABLE, 0)
    calls.prctl(calls.PR_NO_NEW_PRIVS, 1)
    calls.prctl(calls.PR_PDEATHSIG, 9)
    seccomp.install(place.filter)
