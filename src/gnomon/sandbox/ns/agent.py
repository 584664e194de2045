"""The first process of a sandbox: runs programs and does file calls for the host, reaps what others leave behind, and nothing else.

It is a fork of the zygote, has given up every privilege that programs do not have, and cannot be looked into or killed from inside. Its
loop never blocks: output waits in the program's pipe when the host does not read, long file calls are steps between events. When the host's
end of the socket closes, it ends, and with it everything in the sandbox. Read next: `programs.py`, `files.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Iterator

from gnomon.sandbox.ns import calls, census, files, programs, watches, wire

HIGH_WATER = 1 << 20
LOW_MEMORY_SECONDS = 0.1
STEPS = 64
NOTHING = b""


class Agent:
    """The loop, and what it keeps track of."""

    def __init__(self, control: int, joins: list[int], step: int, memory: int, processes: int, workdir: str) -> None:
        self.control, self.joins, self.stage, self.memory, self.processes, self.workdir = control, joins, step, memory, processes, workdir
        for fd in joins:
            os.set_inheritable(fd, True)  # by the step alone, which closes them
        self.splitter = wire.Splitter()
        self.out = bytearray()
        self.programs: dict[int, programs.Program] = {}
        self.by_pipe: dict[int, programs.Program] = {}
        self.orphans: list[int] = []
        self.jobs: dict[int, Iterator[bytes | None]] = {}
        self.uploads: dict[int, int] = {}
        self.watches: dict[int, watches.Watch] = {}
        self.check_memory = 0.0
        self.poll = select.poll()
        os.set_blocking(control, False)
        self.wake, wake = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def send(self, *frames: bytes) -> None:
        """Queue frames for the host."""
        for frame in frames:
            self.out += frame

    def fail(self, call: int, error: OSError | KeyError | ValueError | RecursionError) -> None:
        """Tell the host that a call failed."""
        number = error.errno or errno.EIO if isinstance(error, OSError) else errno.EINVAL
        text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error.args[0] if error.args else error)
        self.send(wire.pack(wire.ERROR, call, (number,), (text.encode("utf-8", "replace")[:2000],)))

    def flush(self) -> bool:
        """Send what is queued as far as the socket takes it; False when the host is gone."""
        while self.out:
            try:
                sent = os.write(self.control, self.out[: wire.CHUNK])
            except BlockingIOError:
                return True
            except OSError:
                return False
            del self.out[:sent]
        return True

    def start(self, call: int, numbers: tuple[int, ...], strings: tuple[bytes, ...]) -> None:
        """Run a program."""
        start = programs.Start(numbers, strings)
        start.cwd = start.cwd or self.workdir.encode()
        pid, into, out, err = programs.spawn(start, self.stage, self.joins, self.processes)
        program = programs.Program(call, pid, {out: 1, err: 2}, into)
        if start.window:
            program.credit = start.window
        else:
            program.remaining = {1: start.max_output, 2: start.max_output}
        program.deadline = programs.now() + start.timeout / 1000 if start.timeout >= 0 else 0.0
        self.programs[call] = program
        for fd in program.pipes:
            self.by_pipe[fd] = program
        if start.stdin:
            program.pending.append((0, start.stdin))
        self.feed(program)
        if not start.open_input and not program.pending:
            self.close_input(program)
        elif not start.open_input:
            program.pending.append((-1, NOTHING))
        if self.memory and not self.check_memory:
            self.check_memory = programs.now() + LOW_MEMORY_SECONDS

    def close_input(self, program: programs.Program) -> None:
        """End of the program's input; what is waiting is given up."""
        if program.input >= 0:
            os.close(program.input)
            program.input = -1

    def feed(self, program: programs.Program) -> None:
        """Pass input on, and answer the writes that are done."""
        if program.input < 0:
            return
        for call, error in programs.feed(program):
            if call < 0:
                self.close_input(program)
            elif call and error:
                self.fail(call, OSError(error, "the program does not read its input any more"))
            elif call:
                self.send(wire.pack(wire.OK, call))

    def take(self, fd: int) -> None:
        """Take output from a pipe."""
        program = self.by_pipe.get(fd)
        if program is None:  # its program has been reported; keep those who still write alive
            try:
                if os.read(fd, wire.CHUNK):
                    return
            except OSError:
                pass
            self.orphans.remove(fd)
            os.close(fd)
            return
        self.pass_on(program, fd)
        if program.status is not None:
            self.finish(program)

    def pass_on(self, program: programs.Program, fd: int) -> bool:
        """Send what a pipe has now, or close it at its end; False when there was nothing to send."""
        frames = programs.take(program, fd)
        if frames is None:
            os.close(fd)
            del program.pipes[fd], self.by_pipe[fd]
            return False
        self.send(*frames)
        return bool(frames)

    def finish(self, program: programs.Program) -> None:
        """Report an ended program, once its pipes have ended or the time for that is over."""
        if program.pipes and (programs.now() < program.linger or program.credit <= 0):
            return
        for fd in program.pipes:
            del self.by_pipe[fd]
            self.orphans.append(fd)
        while len(self.orphans) > programs.MAX_ORPHAN_PIPES:
            os.close(self.orphans.pop(0))
        for call, _ in program.pending:
            if call > 0:
                self.fail(call, OSError(errno.EPIPE, "the program has ended"))
        self.close_input(program)
        self.send(programs.ended(program))
        del self.programs[program.call]

    def reap(self) -> None:
        """Take note of every process that has ended, whoever started it."""
        by_pid = {program.pid: program for program in self.programs.values() if program.status is None}
        for pid, code in calls.ended_children():
            program = by_pid.get(pid)
            if program is not None:
                program.status = code
                program.deadline, program.linger = 0.0, programs.now() + programs.LINGER_SECONDS
                for fd in list(program.pipes):  # what it wrote is in the pipes now
                    left = programs.PIPE_BYTES
                    while left > 0 and program.credit > 0 and self.pass_on(program, fd):
                        left -= wire.CHUNK
                    if program.credit > 0 and fd in program.pipes and program.remaining[program.pipes[fd]] > 0:
                        self.pass_on(program, fd)
                self.finish(program)

    def request(self, frame: wire.Frame) -> None:
        """Do what the host asks."""
        kind, call, numbers, strings = frame
        program = self.programs.get(numbers[0]) if numbers and kind in (wire.STDIN, wire.CLOSE_STDIN, wire.SIGNAL, wire.CREDIT) else None
        if kind == wire.EXEC:
            self.start(call, numbers, strings)
        elif kind == wire.READ:
            self.jobs[call] = files.read(call, strings[0], numbers[0])
        elif kind == wire.WRITE:
            self.write(call, numbers, strings)
        elif kind == wire.LIST:
            self.jobs[call] = files.entries(call, strings[0], numbers[0])
        elif kind == wire.REMOVE:
            self.jobs[call] = files.remove(call, strings[0])
        elif kind == wire.LINK:
            os.makedirs(os.path.dirname(strings[0]), exist_ok=True)
            os.symlink(strings[1], strings[0]) if strings[1] else os.makedirs(strings[0], exist_ok=True)
            self.send(wire.pack(wire.OK, call))
        elif kind == wire.WATCH:
            self.watches[call] = watches.Watch(call, strings[0], bool(numbers[0]))
            self.send(wire.pack(wire.READY, call))
        elif kind == wire.CANCEL:
            self.cancel(numbers[0])
        elif kind == wire.STDIN:
            if program is None or program.input < 0:
                raise OSError(errno.EPIPE, "the program does not read its input any more")
            program.pending.append((call, strings[0]))
            self.feed(program)
        elif kind == wire.CLOSE_STDIN and program is not None:
            program.pending.append((-1, NOTHING))
            self.feed(program)
        elif kind == wire.CREDIT and program is not None:
            program.credit += numbers[1]
        elif kind == wire.SIGNAL:
            if program is not None and program.status is None:
                programs.signal_session(program.pid, numbers[1])
            self.send(wire.pack(wire.OK, call))
        elif kind in (wire.STOP_ALL, wire.CONTINUE_ALL):
            self.send(wire.pack(wire.OK, call, (int(census.stop_all(kind == wire.STOP_ALL)),)))
        elif kind == wire.USAGE:
            self.usage(call)
        elif kind == wire.LISTEN:
            self.listen(call, numbers[0])

    def write(self, call: int, numbers: tuple[int, ...], strings: tuple[bytes, ...]) -> None:
        """One piece of a file: the first opens it, the last answers."""
        first, last, mode = numbers
        try:
            if first:
                self.uploads[call] = files.open_for_writing(strings[0], mode)
            if call in self.uploads:
                files.write_all(self.uploads[call], strings[1])
        except OSError:
            last = 1
            raise
        finally:
            if last and call in self.uploads:
                os.close(self.uploads.pop(call))
        if last:
            self.send(wire.pack(wire.OK, call))

    def cancel(self, call: int) -> None:
        """Stop a watch or a long call."""
        watch = self.watches.pop(call, None)
        if watch is not None:
            watch.close()
        self.jobs.pop(call, None)

    def usage(self, call: int) -> None:
        """Disk from the file system, the rest from the process list."""
        disk = os.statvfs("/")
        memory, _, count = census.memory()
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        self.send(wire.pack(wire.OK, call, (memory, used, count, int(census.processor_seconds() * 1e6))))

    def listen(self, call: int, port: int) -> None:
        """Listen on a port of this sandbox's loopback and hand the listening socket to the host: the only door there is."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, socket.socket(fileno=os.dup(self.control)) as control:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
            while self.out:
                self.flush()
            control.setblocking(True)
            socket.send_fds(control, [wire.pack(wire.OK, call)], [listener.fileno()])
            control.setblocking(False)

    def step(self) -> None:
        """Advance the long calls, as long as the host keeps up."""
        for call, job in list(self.jobs.items()):
            for _ in range(STEPS):
                if len(self.out) > HIGH_WATER:
                    return
                try:
                    frame = next(job)
                except StopIteration:
                    self.jobs.pop(call, None)
                    break
                except (OSError, ValueError) as error:
                    self.jobs.pop(call, None)
                    self.fail(call, error)
                    break
                if frame is None:
                    break
                self.send(frame)

    def tick(self) -> float:
        """Deadlines that have passed; seconds until the next one."""
        moment = programs.now()
        if self.check_memory and moment >= self.check_memory:
            largest = census.over(self.memory)
            if largest:
                os.kill(largest, signal.SIGKILL)
            self.check_memory = moment + LOW_MEMORY_SECONDS if largest or census.pids() else 0.0
        for program in list(self.programs.values()):
            if program.deadline and moment >= program.deadline:
                program.timed_out, program.deadline = True, 0.0
                programs.signal_session(program.pid, signal.SIGKILL)
            elif program.linger and moment >= program.linger:
                self.finish(program)
        moments = [programs.due(program) for program in self.programs.values() if program.credit > 0 or program.deadline]
        nearest = min([*moments, self.check_memory or float("inf")])
        return max(0.0, nearest - programs.now())

    def prepare(self) -> list[int]:
        """Register what may happen next; the descriptors to unregister afterwards."""
        room = len(self.out) < HIGH_WATER
        self.poll.register(self.control, (select.POLLIN if room else 0) | (select.POLLOUT if self.out else 0))
        self.poll.register(self.wake, select.POLLIN)
        fds = [self.control, self.wake, *self.orphans]
        for program in self.programs.values():
            if room and program.credit > 0:
                fds.extend(program.pipes)
            if program.pending and program.input >= 0:
                self.poll.register(program.input, select.POLLOUT)
        if room:
            fds.extend(watch.fd for watch in self.watches.values())
        for fd in fds[2:]:
            self.poll.register(fd, select.POLLIN)
        return fds + [program.input for program in self.programs.values() if program.pending and program.input >= 0]

    def handle(self, fd: int) -> bool:
        """One event; False when the host is gone."""
        if fd == self.wake:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)
            self.reap()
        elif fd == self.control:
            return self.hear()
        elif fd in self.by_pipe or fd in self.orphans:
            self.take(fd)
        else:
            for program in list(self.programs.values()):
                if program.input == fd:
                    self.feed(program)
            for call, watch in list(self.watches.items()):
                if watch.fd == fd:
                    try:
                        self.send(*watch.read())
                    except OSError as error:
                        self.fail(call, error)
                        self.cancel(call)
        return True

    def hear(self) -> bool:
        """Take requests from the host; False when it is gone."""
        try:
            data = os.read(self.control, wire.CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for frame in self.splitter.feed(data):
            try:
                self.request(frame)
            except (OSError, KeyError, ValueError, RecursionError) as error:
                self.fail(frame[1], error)
        return bool(data)

    def serve(self) -> None:
        """Until the host goes."""
        self.send(wire.pack(wire.READY, 0))
        alive = self.flush()
        while alive:
            wait = self.tick()
            fds = self.prepare()
            timeout = 0 if self.jobs and len(self.out) < HIGH_WATER else None if wait == float("inf") else int(wait * 1000) + 1
            events = self.poll.poll(timeout)
            for fd in fds:
                self.poll.unregister(fd)
            for fd, _ in events:
                alive = self.handle(fd) and alive
            self.step()
            alive = self.flush() and alive
        os._exit(0)
