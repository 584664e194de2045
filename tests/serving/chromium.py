"""A browser for tests: Chromium without a window, spoken to over its own pipe (the DevTools protocol), with nothing else installed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The browser reads from descriptor 3 and writes to 4.
PLACE = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


def program() -> str | None:
    """Where a browser is, if there is one."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, at numbers that are out of the way."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


class Chromium:
    """One page. `evaluate` gives the value of an expression, promises awaited; errors of the page are kept in `complaints`."""

    def __init__(self, folder: Path, width: int = 900, height: int = 700) -> None:
        self.complaints: list[str] = []
        self._number = 0
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLACE, str(to_browser), str(from_browser), str(program()), "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={folder}",
             f"--window-size={width},{height}", "about:blank"],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._session = None
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the size of the page in CSS pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def dress(self, scheme: str) -> None:
        """Ask for `light` or `dark`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self._true(expression):
            assert time.monotonic() < end, f"never true: {expression}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.03)

    def _true(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(expression))
        except AssertionError:  # between two pages there is nothing to ask
            return False

    def type(self, text: str) -> None:
        """Type into what has the focus, as a keyboard would."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, *, control: bool = False, shift: bool = False) -> None:
        """Press a key such as `Enter`."""
        text = {"text": "\r"} if key == "Enter" and not control else {}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code or {"Enter": 13, "Escape": 27, "ArrowUp": 38}.get(key, ord(key[0])),
                 "modifiers": 2 * control + 8 * shift}
        self._call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
