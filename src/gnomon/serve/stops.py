"""Stop strings in text that comes in pieces: what may become one is held back, and none is ever sent.

The string that is complete first wins, so the same text gives the same cut however it was divided into tokens. Read next: `reading.py`.
"""

from __future__ import annotations


class StopStrings:
    """Looks for any of `stops` in a text that grows. `matched` is the one that was found; after it nothing more comes out."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """More text; returns what can no longer be part of a stop string."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            free, self._held = self._held[:at], ""
            return free
        keep = max(self._overlap(stop) for stop in self._stops)
        free = self._held[:len(self._held) - keep]
        self._held = self._held[len(free):]
        return free

    def flush(self) -> str:
        """What was held back when the text ended: it became no stop string."""
        free, self._held = self._held, ""
        return free

    def _overlap(self, stop: str) -> int:
        """The length of the longest end of the held text that begins `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
