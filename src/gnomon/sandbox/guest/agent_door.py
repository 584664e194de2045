"""The way out of a machine without a network: a port of its loopback, whose connections travel in frames to the host.

Used by `agent` alone and, like it, runs inside under any Python from 3.9 on. Both directions have a window, so that neither side holds
more of a connection than that. What may be reached is the host's decision. A checkpoint cuts all connections.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

WINDOW = 1 << 18
PIECE = 1 << 16
MOST = 128


class Way:
    """One connection: what the host may still be sent, what the program has yet to take."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.room, self.pending = WINDOW, bytearray()
        self.heard_end = self.ending = False


class Door:
    """The listening socket and its connections."""

    def __init__(self, send: Callable[..., None], selector: selectors.PollSelector) -> None:
        self.send, self.selector = send, selector
        self.listening: socket.socket | None = None
        self.ways: dict[int, Way] = {}
        self.last = 0

    def open(self, port: int) -> None:
        """Listen on the loopback."""
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(64)
        except OSError:
            listening.close()
            raise
        listening.setblocking(False)
        self.listening = listening
        self.selector.register(listening, selectors.EVENT_READ, ("door", None))

    def close(self) -> None:
        """No listening, no connections; the host knows that they are gone."""
        for way in list(self.ways.values()):
            self.drop(way, tell=False)
        listening, self.listening = self.listening, None
        if listening is not None:
            self.selector.unregister(listening)
            listening.close()

    def happened(self, way: Way | None, mask: int) -> None:
        """An event of the listening socket or of a connection."""
        if way is None:
            self.accept()
        elif way.number in self.ways:
            if mask & selectors.EVENT_WRITE:
                self.feed(way)
            if mask & selectors.EVENT_READ and way.number in self.ways:
                self.take(way)

    def accept(self) -> None:
        """A program has come."""
        try:
            connection, _ = self.listening.accept()  # type: ignore[union-attr]
        except OSError:
            return
        if len(self.ways) >= MOST:
            connection.close()
            return
        connection.setblocking(False)
        self.last += 1
        way = self.ways[self.last] = Way(self.last, connection)
        self.send({"ev": "way", "id": way.number, "do": "open"})
        self.listen(way)

    def listen(self, way: Way) -> None:
        """Wait for what can happen next."""
        mask = (selectors.EVENT_READ if way.room > 0 and not way.heard_end else 0) | (selectors.EVENT_WRITE if way.pending else 0)
        known = way.connection in self.selector.get_map()
        if known:
            self.selector.unregister(way.connection)
        if mask:
            self.selector.register(way.connection, mask, ("door", way))

    def take(self, way: Way) -> None:
        """Pass on what a program sends."""
        try:
            data = way.connection.recv(min(PIECE, way.room))
        except BlockingIOError:
            return
        except OSError:
            self.drop(way)
            return
        way.room -= len(data)
        way.heard_end = not data
        self.send({"ev": "way", "id": way.number, "do": "data" if data else "end"}, data)
        self.listen(way)

    def feed(self, way: Way) -> None:
        """Give a program what has come for it."""
        try:
            sent = way.connection.send(way.pending[:PIECE]) if way.pending else 0
        except BlockingIOError:
            return
        except OSError:
            self.drop(way)
            return
        del way.pending[:sent]
        if sent:
            self.send({"ev": "way", "id": way.number, "do": "room", "bytes": sent})
        if way.ending and not way.pending:
            try:
                way.connection.shutdown(socket.SHUT_WR)
            except OSError:
                self.drop(way)
                return
        self.listen(way)

    def drop(self, way: Way, tell: bool = True) -> None:
        """It is over."""
        del self.ways[way.number]
        if way.connection in self.selector.get_map():
            self.selector.unregister(way.connection)
        way.connection.close()
        if tell:
            self.send({"ev": "way", "id": way.number, "do": "gone"})

    def obey(self, header: dict, payload: bytes) -> None:
        """What the host has for a connection; one that is gone is no error."""
        way = self.ways.get(header["way"])
        if way is None:
            return
        if header["do"] == "gone":
            self.drop(way, tell=False)
        elif header["do"] == "room":
            way.room += header["bytes"]
            self.listen(way)
        else:
            way.pending += payload
            way.ending = way.ending or header["do"] == "end"
            self.feed(way)
