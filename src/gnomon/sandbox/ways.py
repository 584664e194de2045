"""Which proxy a sandbox's only door leads to: one that keeps its rules, made and ended with them, or a socket of the owner's."""

from __future__ import annotations

from pathlib import Path

from gnomon.sandbox.network import Egress
from gnomon.sandbox.sandbox import Network


class Ways:
    """The proxies of one backend's sandboxes, by id."""

    def __init__(self) -> None:
        self.egresses: dict[str, Egress] = {}

    async def lead(self, id: str, network: Network) -> Path | None:
        """Where the door of a sandbox leads under these rules; `None` if nowhere. What new rules forbid is cut."""
        egress = self.egresses.get(id)
        if network.allow:
            if egress is None:
                egress = self.egresses[id] = Egress(network)
                await egress.start()
            else:
                egress.replace(network)
            return egress.path
        await self.end(id)
        return network.proxy

    async def end(self, id: str) -> None:
        """The sandbox is gone, or reaches nothing any more."""
        egress = self.egresses.pop(id, None)
        if egress is not None:
            await egress.close()
