"""Who may enter: lanes with a budget of tokens each, a queue of bounded length, and an honest "come back later".

A request takes its lane's budget for as long as it runs: the tokens of its prompt and those it may add. Interactive requests with long
prompts have a lane of their own, and so have batch requests: a burst of either fills its own lane and no other. Read next: `service.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gnomon.errors import GnomonError
from gnomon.serve.request import Priority
from gnomon.serve.settings import AdmissionSettings, LaneSettings

LONGEST_RETRY_SECONDS = 60
REMEMBERED_SECONDS = 60.0


class Busy(GnomonError):
    """There is no room now; `retry_seconds` says when there may be. `draining` when the server is about to end."""

    def __init__(self, message: str, retry_seconds: int, *, draining: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.draining = draining


@dataclass(slots=True)
class Lane:
    """One class of requests: what is in use of its budget, and who waits, in order."""

    name: str
    settings: LaneSettings
    used: int = 0
    running: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    freed: deque[tuple[float, int]] = field(default_factory=deque)

    def fits(self, tokens: int) -> bool:
        """Whether a request may start: within the budget, or alone when it is larger than the whole of it."""
        return self.running == 0 or self.used + tokens <= self.settings.tokens


class Ticket:
    """A place in a lane; `release` gives it back, once."""

    __slots__ = ("_admission", "_tokens", "lane")

    def __init__(self, admission: Admission, lane: Lane, tokens: int) -> None:
        self._admission: Admission | None = admission
        self.lane = lane
        self._tokens = tokens

    def release(self) -> None:
        """Give the budget back and let the next ones in."""
        if self._admission is not None:
            self._admission.leave(self.lane, self._tokens)
            self._admission = None


class Admission:
    """The lanes of a server. All methods are called from its event loop."""

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._closed = False
        lanes = {"interactive": settings.interactive, "long": settings.long, "batch": settings.batch}
        self.lanes = {name: Lane(name, lane) for name, lane in lanes.items()}

    def lane(self, priority: Priority, prompt_tokens: int) -> Lane:
        """The lane of a request."""
        long = priority == "interactive" and prompt_tokens > self._settings.long_prompt_tokens
        return self.lanes["long" if long else priority]

    async def enter(self, priority: Priority, prompt_tokens: int, tokens: int, seconds: float = math.inf) -> Ticket:
        """Wait for a place for `tokens` (prompt and output), for `seconds` at most. Raises `Busy` when the queue is full, the wait too
        long, or the end near."""
        if self._closed:
            raise Busy("the server is shutting down; try another one, or later", 5, draining=True)
        lane = self.lane(priority, prompt_tokens)
        if not lane.waiting and lane.fits(tokens):
            return self._taken(lane, tokens)
        if len(lane.waiting) >= lane.settings.queue:
            raise Busy(f"{len(lane.waiting)} {lane.name} requests wait already, and no more are queued; try again later", self._retry(lane))
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (tokens, place)
        lane.waiting.append(entry)
        try:
            wait = min(lane.settings.wait_seconds, max(seconds, 0.0))
            async with asyncio.timeout(wait):
                await place
        except (TimeoutError, asyncio.CancelledError) as error:
            self._withdraw(lane, entry)
            if isinstance(error, TimeoutError):
                message = f"no room for another {lane.name} request came up in {wait:.3g} s; try again later"
                raise Busy(message, self._retry(lane)) from None
            raise
        return Ticket(self, lane, tokens)

    def leave(self, lane: Lane, tokens: int) -> None:
        """Give back what a request held; the lane's next ones enter, in order."""
        lane.used -= tokens
        lane.running -= 1
        now = self._clock()
        lane.freed.append((now, tokens))
        while lane.freed and now - lane.freed[0][0] > REMEMBERED_SECONDS:
            lane.freed.popleft()
        self._let_in(lane)

    def close(self) -> None:
        """Let nobody in any more: those who wait are sent away, those who run go on."""
        self._closed = True
        for lane in self.lanes.values():
            while lane.waiting:
                _, place = lane.waiting.popleft()
                if not place.done():
                    place.set_exception(Busy("the server is shutting down; try another one, or later", 5, draining=True))

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    @property
    def running(self) -> int:
        """How many requests are inside."""
        return sum(lane.running for lane in self.lanes.values())

    def _taken(self, lane: Lane, tokens: int) -> Ticket:
        lane.used += tokens
        lane.running += 1
        return Ticket(self, lane, tokens)

    def _let_in(self, lane: Lane) -> None:
        while lane.waiting and lane.fits(lane.waiting[0][0]):
            tokens, place = lane.waiting.popleft()
            if not place.done():
                lane.used += tokens
                lane.running += 1
                place.set_result(None)

    def _withdraw(self, lane: Lane, entry: tuple[int, asyncio.Future[None]]) -> None:
        """Take back a wait that was given up, also when its turn came in the same moment."""
        tokens, place = entry
        if entry in lane.waiting:
            lane.waiting.remove(entry)
            self._let_in(lane)
        elif place.done() and not place.cancelled() and place.exception() is None:
            self.leave(lane, tokens)

    def _retry(self, lane: Lane) -> int:
        """Seconds until there may be room: what is ahead, at the rate at which the last minute's requests gave back."""
        ahead = lane.used + sum(tokens for tokens, _ in lane.waiting)
        if not lane.freed:
            return min(LONGEST_RETRY_SECONDS, math.ceil(lane.settings.wait_seconds))
        span = max(self._clock() - lane.freed[0][0], 1.0)
        rate = sum(tokens for _, tokens in lane.freed) / span
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(ahead / rate)))
