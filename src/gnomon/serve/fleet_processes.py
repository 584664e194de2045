"""The processes of a fleet: replicas on ports of this machine, started again when they die, and ended with the router.

`run` is all of it: replicas, the router in front of them, and an orderly end. Read next: `fleet.py`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from gnomon.errors import GnomonError
from gnomon.serve.fleet import FleetSettings

PATIENCE = 30.0
"""Longest pause before a replica that keeps dying is started again."""
# prctl(PR_SET_PDEATHSIG, SIGTERM) before the program itself: a router that is killed leaves nobody behind.
END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
LOG = logging.getLogger(__name__)


class Replica:
    """One process. `command` makes its command line from a port; the port stays the same over restarts."""

    def __init__(self, name: str, command: Callable[[int], list[str]]):
        self.name, self.port, self.restarts = name, free_port(), 0
        self._command = command
        self._due = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, from the main thread: on Linux it ends with the thread that started it."""
        command = self._command(self.port)
        if sys.platform == "linux":
            command = [sys.executable, "-c", END_WITH_PARENT, *command]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def look(self, now: float) -> bool:
        """Start it again if it has died, after a pause that doubles as it keeps dying; whether it did."""
        if self.process is None or self.process.poll() is None:
            return False
        if not self._due:
            self._due = now + min(PATIENCE, 0.25 * 2**self.restarts)
        if now < self._due:
            return False
        self._due, self.restarts = 0.0, self.restarts + 1
        self.start()
        return True

    def stop(self) -> None:
        """Ask it to end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Wait for its end; after so many seconds it is killed."""
        if self.process is None:
            return
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def processes(command: Callable[[int], list[str]], settings: FleetSettings) -> Iterator[list[Replica]]:
    """Replicas that run, looked after by `watch`; all are ended on the way out."""
    replicas = [Replica(f"replica-{index}", command) for index in range(settings.replicas)]
    try:
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()
        deadline = time.monotonic() + settings.stop_seconds
        for replica in replicas:
            replica.end(max(0.0, deadline - time.monotonic()))


def wait(replicas: list[Replica], settings: FleetSettings) -> None:
    """Wait until every replica answers. Raises `GnomonError` where one ends or takes too long."""
    import httpx

    deadline = time.monotonic() + settings.start_seconds
    for replica in replicas:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{replica.url}/health", timeout=5).status_code == 200:
                    break
            if replica.process is None or replica.process.poll() is not None:
                raise GnomonError(f"{replica.name} ended before it answered; its own message stands above")
            if time.monotonic() > deadline:
                raise GnomonError(f"{replica.name} did not answer within {settings.start_seconds:g} s; give more with start_seconds")
            time.sleep(0.1)


def run(command: Callable[[int], list[str]], settings: FleetSettings, bound: socket.socket,
        ready: Callable[[], None] = lambda: None) -> None:
    """Answer on a socket until a signal comes. Call it on the main thread. Raises `GnomonError` where the replicas do not start."""
    import uvicorn

    from gnomon.serve.fleet_router import Router

    with processes(command, settings) as replicas:
        wait(replicas, settings)
        router = Router({replica.name: replica.url for replica in replicas}, settings)
        server = uvicorn.Server(uvicorn.Config(router.app(), log_config=None, access_log=False, server_header=False,
                                               timeout_graceful_shutdown=max(1, round(settings.stop_seconds))))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="router", daemon=True)
        ended = threading.Event()
        kept = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            serving.start()
            ready()
            while not ended.wait(settings.check_seconds) and serving.is_alive():
                for replica in replicas:
                    if replica.look(time.monotonic()):
                        LOG.warning("%s had ended and was started again", replica.name)
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
            server.should_exit = True
            serving.join(settings.stop_seconds + 1)
            bound.close()
