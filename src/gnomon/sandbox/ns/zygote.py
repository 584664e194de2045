"""The process that sandboxes are forked from: small, of one thread, started afresh so that nothing of its owner is in it.

It is told what to do over a socket, one request a message, and owns what outlives the processes of a sandbox: writable layers and control
groups. When its owner is gone, by whatever death, it ends every sandbox and itself; when it is killed, the kernel ends the sandboxes.
Run as `python -I -S -c "from gnomon.sandbox.ns.zygote import main; main()"` with an empty environment. Read next: `birth.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys

from gnomon.sandbox.ns import agent, birth, calls, cgroups, launch, layers, mounts, seccomp, skeleton, users, wire

MAX_REQUEST = 1 << 18
SPARE_FILES = 128
"""Descriptors that are left for what cannot do without: mounts of sandboxes are held as long as there are more."""


class Box:
    """A sandbox as the zygote knows it: its first process (0 once that has ended), its group, its writable layer."""

    __slots__ = ("group", "mounts", "owner", "pid", "upper", "waiting")

    def __init__(self, upper: str) -> None:
        self.upper, self.pid, self.owner, self.mounts = upper, 0, 0, -1
        self.group: cgroups.Group | None = None
        self.waiting: list[tuple[int, bool]] = []

    def hold_mounts(self) -> None:
        """Keep the mounts that this process is in now until all is over: whoever waits for the end need not wait for theirs."""
        held = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        if held > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES:
            os.close(held)
        else:
            self.mounts = held

    def let_mounts_go(self) -> None:
        """Once nothing runs in them they go with this."""
        if self.mounts >= 0:
            os.close(self.mounts)
            self.mounts = -1

    def strike(self) -> None:
        """Kill the first process, and with it all others; what is frozen must go on to die."""
        os.kill(self.pid, signal.SIGKILL)
        if self.group is not None:
            self.group.thaw()


class Zygote:
    """The loop and the requests it answers."""

    def __init__(self, control: socket.socket, owner: int, avoid: str) -> None:
        self.control = control
        self.owner = os.pidfd_open(owner)
        self.boxes: dict[str, Box] = {}
        self.copies: dict[int, tuple[int, str]] = {}
        self.rootless = os.geteuid() != 0
        self.groups = cgroups.Cgroups()
        if self.rootless:
            user, group = os.geteuid(), os.getegid()
            calls.unshare(calls.NEWUSER | calls.NEWNS)
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                cgroups.write(f"/proc/self/{name}", text)
            stand_in()
        else:
            calls.unshare(calls.NEWNS)
        self.ranges = users.Ranges(() if self.rootless else users.PLACES)
        self.spare: tuple[int, int] | None = None
        self.frame = bytearray(MAX_REQUEST)
        self.pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.folder = mounts.workshop(avoid)
        self.home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        os.mkdir(f"{self.folder}/base")
        os.mkdir(f"{self.folder}/skeleton")
        base = mounts.make_base(f"{self.folder}/base")
        skeleton.make(f"{self.folder}/skeleton", self.rootless)
        self.counted = "memory" in self.groups.folders
        calls.last_capability()  # known before the first fork
        code = seccomp.program(calls.MACHINE, self.counted)
        self.place = birth.Place(base, self.rootless, self.folder, code, launch.prepare())

    def hello(self) -> bytes:
        """What this machine can do: rootless, controllers by name, where the freezer is, and why others are missing."""
        names = ",".join(sorted(self.groups.folders)).encode()
        freezer, unified = self.groups.freezer
        notes = [note.encode()[:500] for note in self.groups.notes]
        return wire.pack(wire.HELLO, 0, (int(self.rootless), int(unified)), (names, freezer.encode(), *notes))

    def reply(self, frame: bytes) -> None:
        """Answer; an owner that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.control.send(frame)

    def layer(self, name: str) -> str:
        """Where a layer lies: `@id` is the files of a sandbox or a copy, `@` the skeleton, else a folder of the host."""
        if name == "@":
            return f"{self.folder}/skeleton"
        return f"{self.boxes[name[1:]].upper}/upper" if name.startswith("@") else name

    def create(self, call: int, order: birth.Order, control: int) -> None:
        """Fork a sandbox; it reports on its own socket."""
        box = self.boxes.get(order.name)
        fresh = box is None
        if box is None:
            box = self.boxes[order.name] = Box(mounts.make_upper(self.folder, order.name, order.disk, order.inodes))
            if order.host:
                os.mkdir(f"{box.upper}/upper/usr", 0o755)
        try:
            order.upper = box.upper
            order.layers = [self.layer(name) for name in order.layers]
            if self.groups.folders:
                box.group = self.groups.make(order.name, order.memory, order.cpus_percent, order.processes)
            self.bear(order, box, control)
        except BaseException:
            if fresh:
                self.clear(order.name)
            else:
                self.release(box)
            raise
        self.reply(wire.pack(wire.OK, call, (0 if self.rootless else box.pid,)))  # an ordinary user's has its own process list
        if box.group is not None:
            box.group.close_joins()
        with contextlib.suppress(OSError):  # who asks next is told why
            self.make_users()

    def bear(self, order: birth.Order, box: Box, control: int) -> None:
        """Fork, in the mounts and the process list of the new sandbox, and come back."""
        space, root = 0, None
        try:
            if not self.rootless:
                self.make_users()
                (box.owner, space), self.spare = self.spare or (0, 0), None
            root = birth.prepare(self.place, order, space)
            box.hold_mounts()
            calls.unshare(calls.NEWPID)
            box.pid = os.fork()
            if box.pid == 0:
                self.child(order, box, root, control)
        finally:
            calls.setns(self.pids, calls.NEWPID)
            calls.setns(self.home, calls.NEWNS)
            if space:
                os.close(space)
            if root is not None:
                root.close()

    def make_users(self) -> None:
        """Have the users of the next sandbox ready: they are made while nobody waits."""
        if self.spare is None and not self.rootless:
            first = self.ranges.take()
            try:
                self.spare = first, calls.user_namespace(first, users.USERS)
            except OSError:
                self.ranges.give(first)
                raise

    def child(self, order: birth.Order, box: Box, root: mounts.Root, control: int) -> None:
        """In the new process: become the sandbox, serve, and never return."""
        joins = box.group.joins if box.group is not None else []
        try:
            calls.prctl(calls.PR_PDEATHSIG, signal.SIGKILL)  # and again at the end: a change of user takes it back
            signal.set_wakeup_fd(-1)
            calls.name_process("gnomon-agent")
            calls.close_others(sorted({0, 1, 2, control, root.users, *root.open, *joins, max(0, self.place.step)}))
            birth.become(self.place, order, root, box.owner, self.counted)
            if root.users:
                os.close(root.users)
            agent.Agent(control, joins, self.place.step, 0 if self.counted else order.memory, order.processes, order.workdir).serve()
        except BaseException as error:  # noqa: BLE001 - the host must hear of it, whatever it is
            try:
                text = f"{type(error).__name__}: {error}"
                os.write(control, wire.pack(wire.ERROR, 0, (getattr(error, "errno", 0) or 0,), (text.encode()[:2000],)))
            except OSError:
                pass
        os._exit(1)

    def end(self, call: int, name: str, keep: bool) -> None:
        """Kill a sandbox; the answer goes out when the kernel has ended all that ran in it. With `keep` its files stay."""
        box = self.boxes.get(name)
        if box is None:
            self.reply(wire.pack(wire.OK, call))
        elif box.pid == 0:
            if not keep:
                self.clear(name)
            self.reply(wire.pack(wire.OK, call))
        else:
            box.waiting.append((call, keep))
            box.strike()

    def clear(self, name: str) -> None:
        """Give back all that a sandbox without processes has."""
        box = self.boxes.pop(name, None)
        if box is not None:
            self.release(box)
            mounts.drop_upper(box.upper)

    def release(self, box: Box) -> None:
        """Give back what a sandbox without processes has beside its files."""
        box.let_mounts_go()
        self.free_users(box)
        group, box.group = box.group, None
        if group is not None:
            group.remove()

    def free_users(self, box: Box) -> None:
        """Its processes have ended, so its users are free: files that stay have no owner but those of the image."""
        if box.owner:
            self.ranges.give(box.owner)
            box.owner = 0

    def reap(self) -> None:
        """Take note of everything that has ended."""
        for pid, code in calls.ended_children():
            if pid in self.copies:
                call, name = self.copies.pop(pid)
                self.copied(call, name, code)
                continue
            for name, box in list(self.boxes.items()):
                if box.pid == pid:
                    self.ended(name, box)

    def ended(self, name: str, box: Box) -> None:
        """A sandbox has no processes any more; its files stay if somebody asked for that.

        The answer goes first: what follows takes as long again, and nobody sees it. Its mounts are held until here for that.
        """
        box.pid = 0
        waiting, box.waiting = box.waiting, []
        for call, _ in waiting:
            self.reply(wire.pack(wire.OK, call))
        if not waiting:
            self.reply(wire.pack(wire.GONE, 0, (), (name.encode(),)))
        if not waiting or not all(keep for _, keep in waiting):
            self.clear(name)
        else:
            self.release(box)

    def copy(self, call: int, numbers: tuple[int, ...], source: str, target: str) -> None:
        """Copy a writable layer in a process of its own: into the workshop as a new layer, or to a folder of the host."""
        if target.startswith("/"):
            folder = target
        else:
            box = self.boxes[target] = Box(mounts.make_upper(self.folder, target, *numbers))
            folder = f"{box.upper}/upper"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                calls.prctl(calls.PR_PDEATHSIG, signal.SIGKILL)
                calls.name_process("gnomon-copy")
                calls.close_others([0, 1, 2])
                layers.copy_tree(self.layer(source), folder)
                code = 0
            except OSError as error:
                code = error.errno or 1
            finally:
                os._exit(code & 0x7F)
        self.copies[pid] = (call, target)

    def copied(self, call: int, name: str, code: int) -> None:
        """A copy is complete, or has failed and is dropped."""
        if code == 0:
            self.reply(wire.pack(wire.OK, call))
            return
        if not name.startswith("/"):
            self.clear(name)
        self.reply(wire.pack(wire.ERROR, call, (code,), (f"copying failed: {os.strerror(code) if code > 0 else 'killed'}".encode(),)))

    def request(self, frame: wire.Frame, fds: list[int]) -> None:
        """Do one thing; the answer may come later."""
        kind, call, numbers, strings = frame
        names = [text.decode() for text in strings]
        if kind == wire.CREATE:
            self.create(call, birth.Order(numbers, strings), fds[0])
        elif kind in (wire.KILL, wire.SEAL):
            self.end(call, names[0], kind == wire.SEAL)
        elif kind == wire.COPY:
            self.copy(call, numbers, names[0], names[1])
        elif kind == wire.DROP:
            self.clear(names[0])
            self.reply(wire.pack(wire.OK, call))
        elif kind in (wire.FREEZE, wire.THAW):
            group = self.boxes[names[0]].group
            self.reply(wire.pack(wire.OK, call, (int(group is not None and group.freeze(kind == wire.FREEZE)),)))
        elif kind == wire.COUNT:
            box = self.boxes[names[0]]
            disk = os.statvfs(box.upper)
            counted = box.group.count() if box.group is not None else (-1, -1, -1)
            self.reply(wire.pack(wire.OK, call, (*counted, (disk.f_blocks - disk.f_bfree) * disk.f_frsize)))

    def turn(self) -> bool:
        """Take one request; False when the owner is gone."""
        try:
            size, ancillary, _, _ = self.control.recvmsg_into([self.frame], socket.CMSG_LEN(4 * 4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return True
        if not size:
            return False
        fds = [fd for _, _, content in ancillary for (fd,) in struct.iter_unpack("i", content[: len(content) & ~3])]
        frame = wire.unpack(bytes(memoryview(self.frame)[:size]))
        try:
            self.request(frame, fds)
        except (OSError, KeyError, ValueError) as error:
            text = f"{type(error).__name__}: {error}".encode()[:2000]
            self.reply(wire.pack(wire.ERROR, frame[1], (getattr(error, "errno", 0) or 0,), (text,)))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def serve(self) -> None:
        """Until the owner goes."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for fd in (self.control.fileno(), read, self.owner):
            poll.register(fd, select.POLLIN)
        alive = True
        while alive:
            for fd, _ in poll.poll():
                if fd == read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(read, 4096)
                    self.reap()
                elif fd == self.owner:
                    alive = False
                else:
                    alive = self.turn() and alive

    def close(self) -> None:
        """End every sandbox and give everything back."""
        for box in self.boxes.values():
            if box.pid:
                box.strike()
        while any(box.pid for box in self.boxes.values()):
            pid, _ = os.waitpid(-1, 0)
            for box in self.boxes.values():
                if box.pid == pid:
                    box.pid = 0
        for name in list(self.boxes):
            self.clear(name)
        self.groups.close()


def stand_in() -> None:
    """Go on as the first process of a new process list while the parent waits.

    A process may send children into new lists again and again only if it has power over its own, which an ordinary user's process lacks.
    """
    calls.unshare(calls.NEWPID)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    calls.prctl(calls.PR_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Arguments: the descriptor of the socket to the owner, the owner's process number, a folder that must stay in sight."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # its owner's death ends it, a Ctrl-C in the terminal does not
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(False)
    os.setsid()
    owner, avoid = int(sys.argv[2]), sys.argv[3]
    calls.name_process("gnomon-zygote")
    calls.prctl(calls.PR_SUBREAPER, 1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        zygote = Zygote(control, owner, avoid)
    except Exception as error:  # noqa: BLE001 - the owner sees no traceback
        errno = error.errno or 0 if isinstance(error, OSError) else 0
        control.send(wire.pack(wire.ERROR, 0, (errno,), (f"{type(error).__name__}: {error}".encode()[:2000],)))
        return
    # From here on an import could find files of a sandbox; everything that is needed has been loaded.
    sys.path.clear()
    sys.meta_path.clear()
    sys.path_hooks.clear()
    gc.disable()
    gc.freeze()
    zygote.reply(zygote.hello())
    try:
        zygote.serve()
    finally:
        zygote.close()
