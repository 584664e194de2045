"""What a checkpoint is worth, and which goes first when memory is needed.

The worth is (FLOPs that a hit saves) × (how likely a hit is) ÷ (bytes that go with it), above a floor that rises to the worth of whatever
was evicted last. So what was used lately stays longer (the floor it got then is higher), among equals the oldest goes first, and something
big that nobody comes back to cannot stay for ever. A hit saves what lies between a checkpoint and the one before it: when one goes, the
next one's worth grows, which leaves states ever sparser towards the past and dense near the end of a running sequence.
Read next: `prefix.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from gnomon.model.config import ModelConfig
from gnomon.serve.index import Index, Node
from gnomon.serve.pages import Memory

TURN = 16.0
"""How much likelier a request comes back to the end of a turn, a fork or an end than to any other block."""
FARTHEST = 4096
"""Blocks that are walked back in search of the checkpoint before."""


class Worth:
    """Queues of the tree's checkpoints, the least worth first: of all, and of those that lie in a slot and could be packed."""

    def __init__(self, index: Index, memory: Memory):
        self.index, self.memory = index, memory
        self.clock = 0.0
        self._order = count()
        self._all: list[tuple[float, int, Node]] = []
        self._exact: list[tuple[float, int, Node]] = []
        self._saved = saved_flops(memory.config)

    def touch(self, node: Node) -> None:
        """The node's checkpoint is new or was used just now."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.floor = self.clock
        self.changed(node)

    def changed(self, node: Node) -> None:
        """Something that its worth depends on is different."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            return
        checkpoint.score = self.score(node)
        for queue in (self._all, self._exact)[:2 if checkpoint.packed is None else 1]:
            heapq.heappush(queue, (checkpoint.score, next(self._order), node))
            if len(queue) > 4 * self.index.count + 1024:
                queue[:] = sorted(entry for entry in queue if entry[2].checkpoint and entry[2].checkpoint.score == entry[0])

    def score(self, node: Node) -> float:
        """The worth of the node's checkpoint."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        above = node.parent
        for _ in range(FARTHEST):
            if above is None or above.checkpoint is not None or above.parent is None:
                break
            above = above.parent
        start = 0 if above is None else above.depth
        leaf = not node.children and not node.pins
        pages = (node.depth - start) * self.index.block * self.memory.page_bytes / self.memory.page_tokens if leaf else 0
        reuse = (1.0 if checkpoint.kind == "grid" else TURN) * (1 + checkpoint.hits) * max(1, len(node.children))
        return checkpoint.floor + self._saved(start * self.index.block, checkpoint.length) * reuse / (checkpoint.bytes + pages + 1)

    def prospect(self, start: int, stop: int, turn: bool) -> float:
        """What a checkpoint after `stop` tokens will be worth if the one before it is after `start`."""
        return self.clock + self._saved(start, stop) * (TURN if turn else 1.0) / (self.memory.slot_bytes + 1)

    def least(self, below: float = float("inf")) -> Node | None:
        """Take out the node whose checkpoint is worth least, if that is no more than `below`; the floor rises to it."""
        node = self._least(self._all, below)
        if node is not None and node.checkpoint is not None:
            self.clock = max(self.clock, node.checkpoint.score)
        return node

    def least_exact(self) -> Node | None:
        """Take out the node whose checkpoint is worth least of those that are not packed; its worth is to be told anew."""
        return self._least(self._exact, float("inf"))

    def _least(self, queue: list[tuple[float, int, Node]], below: float) -> Node | None:
        while queue:
            score, _, node = queue[0]
            checkpoint = node.checkpoint
            if checkpoint is None or checkpoint.score != score or (queue is self._exact and checkpoint.packed is not None):
                heapq.heappop(queue)
            elif self.score(node) > score:
                heapq.heappop(queue)
                self.changed(node)
            elif score > below:
                return None
            else:
                heapq.heappop(queue)
                return node
        return None


def saved_flops(config: ModelConfig) -> Callable[[int, int], float]:
    """A function: FLOPs of computing the tokens from one position to another."""
    constant = config.flops_per_token(0)
    slope = (config.flops_per_token(4096) - constant) / 4096
    return lambda start, stop: (stop - start) * constant + slope * (stop * stop - start * start) / 2
