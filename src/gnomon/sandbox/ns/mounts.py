"""What a sandbox sees: a read-only base that is made once, and a root that is put together for each.

There are three mount namespaces. The *workshop* is the zygote's copy of the host's: it sees the layers, and holds the writable layer of
every sandbox as a tmpfs of its own, with its limits. The *base* has next to nothing: devices, places to mount upon. A new sandbox takes
detached copies of what it needs out of the workshop, enters a copy of the base (small, so quickly copied), attaches them, and makes the
result its root.
"""

from __future__ import annotations

import contextlib
import os

from gnomon.sandbox.ns import calls, cgroups

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}
READ_ONLY = [b"/new/proc/%s" % name for name in b"sys bus fs irq driver tty".split()]
HIDDEN_FILES = [b"/new/proc/%s" % name for name in
                b"kcore keys key-users timer_list sysrq-trigger config.gz cmdline kpagecount kpageflags kpagecgroup sched_debug "
                b"latency_stats kallsyms kmsg vmallocinfo slabinfo iomem ioports mtrr".split()]  # fmt: skip
HIDDEN_FOLDERS = [b"/new/proc/%s" % name for name in b"acpi scsi asound".split()]
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
MAX_LAYERS = 500
WORKSHOPS = ("/mnt", "/media", "/srv", "/opt", "/tmp")
QUIET = calls.NOSUID | calls.NODEV


def workshop(avoid: str) -> str:
    """Mount the place in the zygote's own namespace that holds the writable layers; nothing of it is seen outside."""
    calls.mount("", "/", flags=calls.REC | calls.PRIVATE)
    for folder in WORKSHOPS:
        if os.path.isdir(folder) and not (avoid + "/").startswith(folder + "/"):
            calls.mount("gnomon", folder, "tmpfs", QUIET, "size=64m,mode=700")
            return folder
    raise OSError(f"none of {WORKSHOPS} can be mounted upon")


def make_devices(folder: str) -> None:
    """A `/dev` with six devices of the host and places for terminals and shared memory; the tree itself is read-only."""
    calls.mount("dev", folder, "tmpfs", calls.NOSUID | calls.NOEXEC, "size=64k,mode=755")
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"{folder}/{name}")
    for name, target in LINKS.items():
        os.symlink(target, f"{folder}/{name}")
    for name in DEVICES:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        calls.mount(f"/dev/{name}", f"{folder}/{name}", flags=calls.BIND)
    calls.mount("", folder, flags=calls.REMOUNT | calls.BIND | calls.RDONLY | calls.NOSUID | calls.NOEXEC)


def make_base(place: str) -> int:
    """A descriptor of the base namespace. The caller is back in the workshop afterwards."""
    home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    calls.unshare(calls.NEWNS)
    calls.mount("base", place, "tmpfs", QUIET, "size=4m,mode=755")
    for name in ("proc", "dev", "new", "upper", "host", "empty", "layers"):
        os.mkdir(f"{place}/{name}")
    for index in range(MAX_LAYERS):
        os.mkdir(f"{place}/layers/{index}")
    make_devices(f"{place}/dev")
    # A fresh proc may only be mounted where one is already in sight.
    calls.mount("/proc", f"{place}/proc", flags=calls.BIND | calls.REC)
    os.chdir(place)
    calls.pivot_here()
    base = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    calls.setns(home, calls.NEWNS)
    os.close(home)
    os.chdir("/")
    return base


def make_upper(place: str, name: str, size: int, inodes: int) -> str:
    """The writable layer of one sandbox in the workshop: a tmpfs with its limits."""
    folder = f"{place}/{name}"
    os.mkdir(folder, 0o700)
    try:
        calls.mount("sandbox", folder, "tmpfs", QUIET, f"size={size},nr_inodes={inodes},mode=755")
        for part in ("upper", "work", "work-usr", "shm"):
            os.mkdir(f"{folder}/{part}", 0o755)
        os.chmod(f"{folder}/shm", 0o1777)
    except OSError:
        drop_upper(folder)
        raise
    return folder


def drop_upper(folder: str) -> None:
    """Give a writable layer and all it holds back."""
    with contextlib.suppress(OSError):
        calls.umount(folder, calls.DETACH)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


class Root:
    """The root of one sandbox while it is put together, inside the process that will live there."""

    def __init__(self, users: int, overlay_option: str) -> None:
        self.users, self.option = users, overlay_option
        self.layers: list[int] = []
        self.upper = self.host = -1
        self.binds: list[tuple[str, int]] = []
        self.open: list[int] = []

    def _copy(self, path: str, read_only: bool) -> int:
        try:
            fd = calls.open_tree(path)
        except OSError:  # without privileges on the host, mounts below must come along
            fd = calls.open_tree(path, recursive=True)
        attributes = calls.ATTR_NOSUID | calls.ATTR_NODEV | (calls.ATTR_RDONLY if read_only else 0)
        self.open.append(fd)
        if self.users > 0:
            calls.mount_attributes(fd, attributes | calls.ATTR_IDMAP, self.users)
        else:
            calls.mount_attributes(fd, attributes, recursive=True)
        return fd

    def take(self, upper: str, layers: list[str], host: bool) -> None:
        """Take detached copies out of the workshop."""
        if len(layers) > MAX_LAYERS:
            raise OSError(f"{len(layers)} layers are more than {MAX_LAYERS}; flatten the chain")
        self.upper = self._copy(upper, False)
        self.layers = [self._copy(layer, True) for layer in layers]
        if host:
            self.host = self._copy("/usr", True)
            for name in MERGED:
                if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
                    self.binds.append((name, self._copy(f"/{name}", True)))

    def close(self) -> None:
        """Let the copies go; what has been attached stays."""
        while self.open:
            os.close(self.open.pop())

    def attach(self, owner: int) -> None:
        """Attach them in the new namespace, lay the layers over each other and make the result the root. `owner` is the sandbox's root."""
        calls.move_mount(self.upper, "/upper")
        for index, fd in enumerate(self.layers):
            calls.move_mount(fd, f"/layers/{index}")
        if self.host >= 0:
            calls.move_mount(self.host, "/host")
        if self.users > 0:  # overlay works as whoever mounts it, who must exist among the translated users
            calls.prctl(calls.PR_SECUREBITS, calls.NO_SETUID_FIXUP)
            calls.act_as(owner)
        try:
            self._overlays()
        finally:
            if self.users > 0:
                calls.act_as(0)
                calls.prctl(calls.PR_SECUREBITS, 0)
        for name, fd in self.binds:
            calls.move_mount(fd, f"/new/{name}")
        self.close()

    def _overlays(self) -> None:
        os.chdir("/layers")
        lower = [str(index) for index in range(len(self.layers))]
        options = f"index=off,metacopy=off{self.option}"
        calls.mount("overlay", "/new", "overlay", QUIET, f"lowerdir={':'.join(lower)},upperdir=/upper/upper,workdir=/upper/work,{options}")
        if self.host >= 0 and self.users > 0:
            usr = [f"{index}/usr" for index in lower if os.path.isdir(f"{index}/usr")]
            calls.mount("overlay", "/new/usr", "overlay", QUIET,
                        f"lowerdir={':'.join([*usr, '/host'])},upperdir=/upper/upper/usr,workdir=/upper/work-usr,{options}")  # fmt: skip
        elif self.host >= 0:  # files of a user that does not exist here cannot be copied up
            calls.mount("/host", "/new/usr", flags=calls.BIND | calls.REC)

    def furnish(self) -> None:
        """Devices, terminals, shared memory, a process list of its own; then enter."""
        for name in ("proc", "dev", "sys", "tmp"):
            folder = f"/new/{name}"
            if os.path.islink(folder):
                raise OSError(f"the image's /{name} is a link")
            if not os.path.isdir(folder):
                os.mkdir(folder)
        calls.mount("/dev", "/new/dev", flags=calls.BIND | calls.REC)
        calls.mount("devpts", "/new/dev/pts", "devpts", calls.NOSUID | calls.NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
        calls.mount("/upper/shm", "/new/dev/shm", flags=calls.BIND)
        calls.mount("proc", "/new/proc", "proc", calls.NOSUID | calls.NODEV | calls.NOEXEC)
        cgroups.write("/new/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
        for path in calls.bind_over(b"", READ_ONLY):
            calls.mount("", path.decode(), flags=calls.REMOUNT | calls.BIND | calls.RDONLY | QUIET | calls.NOEXEC)
        calls.bind_over(b"/dev/null", HIDDEN_FILES)
        for path in calls.bind_over(b"/empty", HIDDEN_FOLDERS):
            calls.mount("", path.decode(), flags=calls.REMOUNT | calls.BIND | calls.RDONLY | QUIET)
        os.chdir("/new")
        calls.pivot_here()
