"""The gateway: programs that speak OpenAI's or Anthropic's API reach a policy through it, unchanged, and every answer goes on record.

Each attempt has a secret, which its program presents as an API key; it picks the recorder. The gateway listens on this machine's loopback
and on a Unix socket that only this user can reach: as `Network(proxy=gateway.socket)` it is the only way out of a sandbox, and appears
inside as `INSIDE`. Needs the extra `serve`. Read next: `gateway_visit.py`, `gateway_routes.py`, `gateway_speech.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Self

from gnomon.agent.gateway_visit import Bounds, Visit, Visits
from gnomon.agent.policy import Sampling
from gnomon.agent.record import Recorder
from gnomon.data.messages import Effort
from gnomon.errors import ConfigError

INSIDE = "http://127.0.0.1:3128"
"""Where a sandbox reaches its proxy; a program inside takes it for the API's address."""

BACKLOG = 512
START_SECONDS = 60.0


class Gateway:
    """Listens while it is open: `async with Gateway() as gateway: visit = gateway.admit(recorder)`.

    `url` is for programs on this machine, `socket` for sandboxes. Serves any number of attempts at a time; those that have left are
    strangers. Raises `ConfigError` where the extra `serve` is not installed.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.url = ""
        self.socket = Path()
        self._visits = Visits()
        self._open = contextlib.AsyncExitStack()

    def admit(self, recorder: Recorder, *, sampling: Sampling | None = None, effort: Effort | None = None) -> Visit:
        """Let an attempt in, under a secret of its own."""
        return self._visits.enter(Visit(recorder, sampling, effort))

    def leave(self, visit: Visit) -> None:
        """Its secret is worth nothing from now on; twice is no error."""
        self._visits.leave(visit)

    async def __aenter__(self) -> Self:
        """Listen."""
        try:
            from gnomon.agent.gateway_routes import server
        except ImportError as error:
            raise ConfigError(f"the gateway needs {error.name}; install the extra: pip install 'gnomon[serve]'") from None
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gnomon-", ignore_cleanup_errors=True))
            self.socket = Path(folder) / "gateway.sock"
            tcp, local = stack.enter_context(socket.socket()), stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                tcp.bind(("127.0.0.1", 0))
                local.bind(str(self.socket))
            except OSError as error:
                raise ConfigError(f"the gateway cannot listen ({error}); give TMPDIR a short path to a folder of yours") from None
            os.chmod(self.socket, 0o600)
            for each in (tcp, local):
                each.listen(BACKLOG)
            self.url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
            serving = server(self._visits, self.bounds)
            running = asyncio.create_task(serving.serve(sockets=[tcp, local]))
            stack.push_async_callback(_ended, serving, running)
            async with asyncio.timeout(START_SECONDS):
                while not serving.started:
                    if running.done():
                        raise ConfigError("the gateway did not start")
                    await asyncio.sleep(0.001)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop listening; requests under way are cut."""
        await self._open.aclose()


async def _ended(serving: Any, running: asyncio.Task[None]) -> None:
    serving.should_exit = serving.force_exit = True
    await asyncio.gather(running, return_exceptions=True)
