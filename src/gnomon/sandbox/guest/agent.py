"""The program that is process 1 inside a machine with a kernel of its own: it starts programs and keeps files for the host.

It speaks frames (see `channel`) over standard input and output, or over one device given as its argument, in one thread that never waits
for anything inside: a program that floods, hangs or keeps its pipes wedges nobody else. It runs from its own file under any Python from
3.9 on, with the standard library alone, and survives a checkpoint: `hold` makes it write nothing more until `go` gives it its new identity.
"""

from __future__ import annotations

import collections
import errno
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import IO

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import agent_files  # the neighbours in the same folder, wherever that is inside
import agent_kernel
from agent_calls import Calls
from agent_child import Child
from agent_door import Door
from agent_seal import Seal, close_up

FRAME = struct.Struct(">II")
CHUNK = 1 << 16
DRAIN_SECONDS = 0.2
PIPE_CHUNKS = 17
"""What a pipe can hold at most, and one more for its end."""

MAX_ORPHANS = 64
IDENTITY = "/run/gnomon/instance"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Agent(Calls):
    """The loop: frames from the host, output of programs, ends of programs, changes of watched folders."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink, self.whole = source, sink, source == sink
        self.buffer = bytearray()
        self.children: dict[int, Child] = {}
        self.by_pid: dict[int, Child] = {}
        self.orphans: collections.deque[IO[bytes]] = collections.deque()
        self.env: dict[str, str] = {}
        self.seal = Seal()
        self.held = False
        self.stopped: set[int] | None = None
        self.watches = agent_files.Watches()
        self.uploads: dict[int, agent_files.Upload] = {}
        self.selector = selectors.PollSelector()
        self.door = Door(self.send, self.selector)
        self.selector.register(source, selectors.EVENT_READ, ("host", None))
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        self.selector.register(wake_read, selectors.EVENT_READ, ("reap", None))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a handler, as programs would inherit "ignored"
            signal.signal(number, lambda *_: None)

    def send(self, header: dict[str, object], payload: bytes = b"") -> None:
        """One frame to the host; the host always reads, so this ends."""
        head = json.dumps(header).encode()
        lengths = FRAME.pack(len(head), len(payload))
        view = memoryview(lengths + self.seal.of(lengths, head, payload) + head + payload)
        while view:
            view = view[os.write(self.sink, view) :]

    def run(self) -> None:
        """Serve until the host goes away, which ends the machine."""
        while True:
            waiting = any(child.code is not None for child in self.children.values())
            for event, mask in self.selector.select(0.05 if waiting and not self.held else None):
                what, subject = event.data
                if what == "host":
                    self.from_host()
                elif self.held:
                    time.sleep(0.001)
                elif what == "reap":
                    os.read(event.fd, 4096)
                elif what == "output":
                    self.output(subject, event.fd)
                elif what == "input" and mask & selectors.EVENT_WRITE:
                    self.feed(subject)
                elif what == "orphan":
                    self.drain(subject)
                elif what == "watch":
                    self.changed(event.fd)
                elif what == "door":
                    self.door.happened(subject, mask)
            if not self.held:
                self.reap()

    def from_host(self) -> None:
        """Read what has come and obey each complete frame."""
        data = os.read(self.source, CHUNK * 4)
        if not data:
            os._exit(0)
        self.buffer += data
        while len(self.buffer) >= FRAME.size:
            head, body = FRAME.unpack_from(self.buffer)
            if len(self.buffer) < FRAME.size + head + body:
                return
            header = json.loads(self.buffer[FRAME.size : FRAME.size + head])
            payload = bytes(self.buffer[FRAME.size + head : FRAME.size + head + body])
            del self.buffer[: FRAME.size + head + body]
            self.obey(header, payload)

    def obey(self, header: dict, payload: bytes) -> None:
        """One request: an error inside becomes a reply and never the end of the agent."""
        operation = getattr(self, "do_" + header["op"], None)
        try:
            if operation is None:
                raise ValueError(f"no such operation: {header['op']}")
            operation(header, payload)
        except (OSError, ValueError, KeyError, LookupError, subprocess.SubprocessError) as error:
            number = getattr(error, "errno", None)
            self.send({"ev": "error", "id": header.get("id"), "error": str(error), "errno": number})

    def do_hold(self, header: dict, payload: bytes) -> None:
        """Write nothing more; with `stop`, stop every other process first, so that the files stand still."""
        self.door.close()
        self.stopped = agent_files.stop_all() if header.get("stop") else None
        self.reply(header)
        self.held = True

    def do_go(self, header: dict, payload: bytes) -> None:
        """Go on under a name: the same machine, or (`forget`) a copy that owes its parent's host nothing."""
        self.held = False
        if header.get("seed"):
            agent_kernel.reseed(header["seed"])
        if header.get("time"):
            agent_kernel.set_clock(header["time"])
        self.seal.turn(header.get("key") or "", header["word"])
        if header.get("forget"):
            for child in self.children.values():
                child.key = None
                child.pending.clear()
                self.listen(child)
            self.uploads.clear()
            for handle in self.watches.close():
                self.selector.unregister(handle)
        if header.get("end"):
            agent_files.signal_all(signal.SIGKILL)
        elif self.stopped is not None:
            agent_files.signal_all(signal.SIGCONT, self.stopped)
        self.stopped = None
        if header.get("hostname"):
            socket.sethostname(header["hostname"])
        if header.get("env") is not None:
            self.env = header["env"]
        if header.get("instance"):
            os.makedirs(os.path.dirname(IDENTITY), exist_ok=True)
            with open(IDENTITY, "w") as file:
                file.write(header["instance"] + "\n")
        if header.get("workdir"):
            agent_files.make_home(header["workdir"], header.get("owner") or "root")
        self.reply(header, time=time.time())

    def do_clock(self, header: dict, payload: bytes) -> None:
        """The time of day, after it stood still."""
        agent_kernel.set_clock(header["time"])
        self.reply(header)

    def do_ping(self, header: dict, payload: bytes) -> None:
        """A sign of life."""
        self.reply(header)

    def do_door(self, header: dict, payload: bytes) -> None:
        """Listen for programs that want out, or do no more of it."""
        self.door.close()
        if header["port"]:
            self.door.open(header["port"])
        self.reply(header)

    def do_pass(self, header: dict, payload: bytes) -> None:
        """Bytes for a connection of the door, its end, or room for more of its own."""
        self.door.obey(header, payload)

    def do_start(self, header: dict, payload: bytes) -> None:
        """Start a program; its end, or why it could not start, comes as an event."""
        uid, gid, groups, home, name = agent_files.find_user(header["user"])
        env = {"PATH": DEFAULT_PATH, "HOME": home, "USER": name, "LOGNAME": name, "LANG": "C.UTF-8", **self.env, **header["env"]}
        switch = {} if uid == 0 else {"user": uid, "group": gid, "extra_groups": groups}
        try:
            process = subprocess.Popen(
                header["argv"], bufsize=0, close_fds=False, cwd=header["cwd"], env=env, start_new_session=True, **switch,
                stdin=subprocess.PIPE if header["stdin"] else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            self.reply(header, pid=0)
            said = f"{error.filename or header['argv'][0]}: {error.strerror}\n".encode()
            self.send({"ev": "out", "id": header["id"], "stream": "stderr"}, said)
            self.send({"ev": "exit", "id": header["id"], "code": 127 if error.errno == errno.ENOENT else 126, "truncated": False})
            return
        child = Child(header["id"], process, header.get("limit"), header.get("credit"))
        self.children[header["id"]] = self.by_pid[child.pid] = child
        self.reply(header, pid=child.pid)
        self.listen(child)

    def listen(self, child: Child) -> None:
        """Watch the program's pipes as far as the host has asked for their content."""
        wanted = child.credit is None or child.credit > 0 or child.key is None
        for handle in child.outputs:
            known = handle in self.selector.get_map()
            if wanted and not known:
                self.selector.register(handle, selectors.EVENT_READ, ("output", child))
            elif known and not wanted:
                self.selector.unregister(handle)

    def output(self, child: Child, handle: int) -> bool:
        """Pass on what a program wrote, or drop it beyond its limit; False when there was nothing."""
        size = CHUNK if child.credit is None or child.key is None else min(CHUNK, child.credit)
        try:
            data = os.read(handle, size)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(handle)
            getattr(child.process, child.outputs.pop(handle)).close()
            return False
        left = child.limits[child.outputs[handle]]
        if left is not None:
            child.truncated = child.truncated or left < len(data)
            data = data[:left]
            child.limits[child.outputs[handle]] = left - len(data)
        if data and child.key is not None:
            if child.credit is not None:
                child.credit -= len(data)
                self.listen(child)
            self.send({"ev": "out", "id": child.key, "stream": child.outputs[handle]}, data)
        return True

    def empty(self, child: Child) -> None:
        """Pass on what lies in the pipes of a program that has ended: it wrote that, however late it is looked for."""
        for handle in list(child.outputs):
            for _ in range(PIPE_CHUNKS):
                if child.waits_for_host or not self.output(child, handle):
                    break

    def do_more(self, header: dict, payload: bytes) -> None:
        """The host took some output and can take as much again."""
        child = self.children.get(header["id"])
        if child is not None and child.credit is not None:
            child.credit += header["bytes"]
            self.listen(child)

    def do_stdin(self, header: dict, payload: bytes) -> None:
        """Bytes for a program's input; `took` is sent when they are in its pipe."""
        child = self.children[header["child"]]
        if child.process.stdin is None:
            raise ValueError("the program's standard input is not open")
        child.pending += payload
        child.closing = child.closing or bool(header.get("eof"))
        self.reply(header)
        self.feed(child)

    def feed(self, child: Child) -> None:
        """Write pending input as far as the pipe takes it."""
        stream = child.process.stdin
        if stream is None:
            return
        handle = stream.fileno()
        try:
            while child.pending:
                del child.pending[: os.write(handle, child.pending[:CHUNK])]
        except BlockingIOError:
            if handle not in self.selector.get_map():
                self.selector.register(handle, selectors.EVENT_WRITE, ("input", child))
            return
        except OSError:
            child.pending.clear()
            child.closing = True
        if handle in self.selector.get_map():
            self.selector.unregister(handle)
        if child.closing:
            stream.close()
            child.process.stdin = None
        if child.key is not None:
            self.send({"ev": "took", "id": child.key})

    def do_signal(self, header: dict, payload: bytes) -> None:
        """A signal for a program and its session."""
        child = self.children.get(header["child"])
        if child is not None and child.code is None:
            agent_files.signal_session(child.pid, header["signal"])
        self.reply(header)

    def reap(self) -> None:
        """Take the ends of programs, and report one when its pipes are empty or were given time enough."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            child = self.by_pid.pop(pid, None)
            if child is not None:
                child.code = child.process.returncode = -(status & 127) if status & 127 else status >> 8
                child.ended = time.monotonic()
                self.empty(child)
        for key, child in list(self.children.items()):
            if child.code is None:
                continue
            if child.outputs and (child.waits_for_host or time.monotonic() - child.ended < DRAIN_SECONDS):
                continue
            self.forget(child)
            del self.children[key]
            if child.key is not None:
                self.send({"ev": "exit", "id": child.key, "code": child.code, "truncated": child.truncated})

    def forget(self, child: Child) -> None:
        """Close an ended program's input; what it left running may still write, so its pipes are drained to nowhere."""
        for name in ("stdin", "stdout", "stderr"):
            stream = getattr(child.process, name)
            if stream is None or stream.closed:
                continue
            if stream.fileno() in self.selector.get_map():
                self.selector.unregister(stream.fileno())
            if name == "stdin":
                stream.close()
                continue
            self.orphans.append(stream)
            self.selector.register(stream.fileno(), selectors.EVENT_READ, ("orphan", stream))
            if len(self.orphans) > MAX_ORPHANS:
                self.close_orphan(self.orphans[0])

    def drain(self, stream: IO[bytes]) -> None:
        """Drop what an ended program's offspring wrote."""
        try:
            if os.read(stream.fileno(), CHUNK):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.close_orphan(stream)

    def close_orphan(self, stream: IO[bytes]) -> None:
        """Nobody writes to it any more, or there are too many."""
        self.orphans.remove(stream)
        self.selector.unregister(stream.fileno())
        stream.close()


def main() -> None:
    """Take the channel from standard input and output, so that no program inherits them, and serve."""
    if len(sys.argv) > 1:
        source = sink = os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)
    else:
        source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.umask(0o022)
    close_up()
    Agent(source, sink).run()


if __name__ == "__main__":
    main()
