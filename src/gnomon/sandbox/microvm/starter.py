"""The thread that starts machines, one for this process and as long as it lives.

The kernel ends a machine when the thread that started it is gone (see `qemu.BOUND`), and an event loop may run in a thread that ends long
before the program does. This one runs no loop and ends with the process alone, whichever thread ends when.
"""

from __future__ import annotations

import asyncio
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future

Child = subprocess.Popen[bytes]
Order = tuple[Callable[[], Child], "Future[Child]"]

_orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _work() -> None:
    while True:
        start, done = _orders.get()
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(start())
            except BaseException as error:  # noqa: BLE001 - it is raised where the program was asked for
                done.set_exception(error)


async def start(order: Callable[[], Child]) -> Child:
    """What `order` starts when the thread calls it; it ends if whoever waits here is cancelled. Raises what `order` raises."""
    global _thread  # noqa: PLW0603 - a fork of this process has the name and not the thread
    done: Future[Child] = Future()
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="gnomon-machines", daemon=True)
            _thread.start()
    _orders.put((order, done))
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError:
        if not done.cancel() and done.exception() is None:  # some milliseconds, in which it uses what the caller closes next
            done.result().kill()
            done.result().wait()
        raise
